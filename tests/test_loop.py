"""One run from start to end: what it writes and prints, what it refuses before it trains, where it stops."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from smmd_jax import LOSSES, TokenizerError
from smmd_jax.backbones import PRESETS
from tests import runs
from tests.runs import HARD, numbers_of, rows_of, state_of, steps_of, train_here
from tests.test_data import toy_tokenizer
from train.assembly import assemble
from train.backbone import Backbone
from train.config import parse_command_line
from train.data import Batches
from train.exits import DataError, NonFiniteError, StorageError, UsageError
from train.main import TABLES
from train.optimizer import OPTIMIZERS, SCHEDULES
from train.preview import header
from train.tasks import TASKS, Example

METRICS_FIELDS = {
    "step", "loss", "ce", "numeric", "ce_count", "numeric_count", "samples", "learning_rate", "grad_norm",
    "tokens_per_second", "input_wait", "compile_seconds", "epoch",
}  # fmt: skip
EVAL_FIELDS = {
    "step", "split", "n", "accuracy", "accuracy_low", "accuracy_high", "parse_failures",
    "parse_failure_rate", "pairs", "mae", "median_error", "log_mae", "r2", "time_gap", "time_gap_unwrapped",
}  # fmt: skip
PREDICTION_FIELDS = {"key", "prompt", "answer", "prediction", "correct", "parsed", "value", "gold_value"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.shrink(monkeypatch.setitem)


def strict(text):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def run(data_dir, tmp_path_factory):
    """One whole run: (folder, stdout, stderr)."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        runs.shrink(patch.setitem)
        out, err = runs.captured(
            train_here, folder, data_dir, *HARD, "--eval_every=6", "--tensorboard", "--log_every=5"
        )
    return folder, out, err


def test_a_run_says_at_once_that_it_prepares_and_then_how_long_that_took(run):
    _, out, _ = run
    assert re.match(r"preparing data and model \.\.\.\ntask       arith: .*\nprepared   in \d+s\n", out, re.DOTALL)


def test_a_run_folder_holds_every_record_as_strict_json(run):
    folder, _, _ = run
    config = strict((folder / "config.json").read_text())
    assert (config["steps"], config["batch_size"], config["loss"], config["workdir"]) == (12, 2, "smmd", str(folder))
    environment = strict((folder / "environment.json").read_text())
    assert environment["command"][0] == "main" and environment["command"][1] == "--task=arith"
    assert environment["versions"]["jax"] and environment["platform"] == "cpu"
    assert strict((folder / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    for name in ("metrics.jsonl", "eval.jsonl", "predictions/6.jsonl", "predictions/12.jsonl"):
        lines = (folder / name).read_text().splitlines()
        assert lines and all(isinstance(strict(line), dict) for line in lines)
    assert steps_of(folder) == [4, 8, 12]
    assert all((folder / "checkpoints" / str(step) / "manifest.json").exists() for step in (4, 8, 12))
    plots = {path.name for path in (folder / "plots").iterdir()}
    assert plots == {"losses.png", "accuracy.png", "error_histogram.png"}
    assert all((folder / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in plots)
    assert list((folder / "tensorboard").glob("events.*"))


def test_a_logged_step_has_one_row_with_every_field(run):
    rows = rows_of(run[0])
    assert [row["step"] for row in rows] == [1, 5, 10, 12]
    for row in rows:
        assert set(row) == METRICS_FIELDS
        assert row["loss"] == pytest.approx(row["ce"] + 3.0 * row["numeric"], rel=1e-5)
        assert 0 < row["numeric_count"] < row["ce_count"] and row["samples"] > 0
        assert row["grad_norm"] > 0 and row["tokens_per_second"] > 0 and row["compile_seconds"] > 0
        assert 0 <= row["input_wait"] < 1
    # A tenth of twelve steps is one of warm-up.
    assert rows[0]["learning_rate"] == pytest.approx(0.01) and rows[-1]["learning_rate"] < rows[1]["learning_rate"]


def test_an_evaluation_has_one_row_and_its_predictions(run):
    rows = rows_of(run[0], "eval.jsonl")
    assert [(row["step"], row["split"]) for row in rows] == [(6, "interpolate"), (12, "interpolate")]
    for row in rows:
        assert set(row) == EVAL_FIELDS and row["n"] == 8
        predictions = rows_of(run[0], f"predictions/{row['step']}.jsonl")
        assert len(predictions) == 8 and all(set(prediction) == PREDICTION_FIELDS for prediction in predictions)
        assert len({prediction["key"] for prediction in predictions}) == 8
        assert row["accuracy"] == sum(prediction["correct"] for prediction in predictions) / 8
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]


def test_a_run_says_what_it_trains_and_how_it_went(run):
    _, out, err = run
    for words in (
        r"task +arith: 84 training examples",
        r"tokens +per example: \d+\.\d, of them \d\.\d\d supervised and \d\.\d\d numeric",
        r"backbone +tiny: [\d,]+ parameters",
        r"loss +smmd \(weight 3, add\)",
        r"numbers +10 tokens",
        rf"run folder {run[0]}\n",
        r"interpolate +12 +\d+\.\d %",
        r"last logged step 12: loss",
        r"time of this start: steps \w+, .*compile",
        r"(wrong|right)  .* ->",
    ):
        assert re.search(words, out), words
    assert re.search(r"step 12/12  loss .* tokens/s  ETA 0s", err)
    assert err.count("accuracy") == 2


@pytest.mark.slow
def test_cross_entropy_alone_has_no_numeric_term(data_dir, tmp_path):
    train_here(tmp_path / "run", data_dir, "--loss=ce", "--steps=2", "--eval_examples=2")
    rows = rows_of(tmp_path / "run")
    assert [row["numeric"] for row in rows] == [None, None] and all(row["loss"] == row["ce"] for row in rows)
    assert all(row["numeric_count"] > 0 for row in rows)


def without_evaluation(monkeypatch):
    """Leave out what a test of the training alone does not look at: it compiles for seconds."""
    monkeypatch.setattr("train.loop._Loop._evaluate_if_due", lambda *args: None)
    monkeypatch.setattr("train.loop.write_plots", lambda folder: [])


@pytest.mark.slow  # each compiles its own step
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_of_the_table_trains(loss, data_dir, tmp_path, monkeypatch):
    without_evaluation(monkeypatch)
    train_here(tmp_path / "run", data_dir, f"--loss={loss}", "--steps=2")
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["loss"] != rows[1]["loss"]
    assert all(np.isfinite([row["loss"], row["ce"], row["grad_norm"]]).all() for row in rows)
    assert all((row["numeric"] is None) == (loss == "ce") for row in rows)


@pytest.mark.slow  # each compiles its own step
@pytest.mark.parametrize(
    "optimizer, schedule",
    [*((name, "cosine") for name in OPTIMIZERS), *(("adamw", name) for name in SCHEDULES if name != "cosine")],
)
def test_every_optimizer_and_schedule_trains(optimizer, schedule, data_dir, tmp_path, monkeypatch):
    without_evaluation(monkeypatch)
    train_here(tmp_path / "run", data_dir, f"--optimizer={optimizer}", f"--schedule={schedule}", "--steps=3")
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 3 and len({row["loss"] for row in rows}) == 3
    assert all(np.isfinite([row["loss"], row["grad_norm"]]).all() for row in rows)


def squared_distance(logits, targets, kernel, *, mask):
    """The expected squared distance to the target's value; one value per position."""
    probability = jnp.exp(logits[..., kernel.token_ids] - jnp.max(logits, axis=-1, keepdims=True))
    expected = (probability * kernel.values).sum(-1) / probability.sum(-1)
    is_target = targets[..., None] == kernel.token_ids
    value = jnp.where(is_target, kernel.values, 0.0).sum(-1)
    return jnp.where(is_target.any(-1) & mask, (expected - value) ** 2, 0.0)


def mean_distance(logits, targets, kernel, *, mask):
    return jnp.mean(squared_distance(logits, targets, kernel, mask=mask))


BAD_SUM = -1


def nan_in_one_batch(logits, targets, kernel, *, mask):
    """Not a number in the first row of the batch whose supervised targets sum up to BAD_SUM."""
    is_bad = (jnp.sum(jnp.where(mask, targets, 0)) == BAD_SUM) & (jnp.arange(mask.shape[0]) == 0)
    return jnp.where(is_bad[:, None], jnp.nan, 0.1) * mask



@pytest.mark.slow
def test_a_loss_of_ones_own_is_trained_by_its_path(data_dir, tmp_path, monkeypatch):
    without_evaluation(monkeypatch)
    train_here(tmp_path / "run", data_dir, "--loss=tests.test_loop:squared_distance", "--steps=2", "--loss_weight=0.5")
    for row in rows_of(tmp_path / "run"):
        assert row["loss"] == pytest.approx(row["ce"] + 0.5 * row["numeric"], rel=1e-5) and row["numeric"] > 0


@pytest.mark.parametrize(
    "path, words",
    [
        ("tests.test_loop:no_such", "cannot be imported"),
        ("no_such_module:loss", "cannot be imported"),
        ("tests.test_loop:METRICS_FIELDS", "wanted a function"),
        ("tests.test_loop:mean_distance", r"gives shape \[\] for targets .*; wanted \[2, 3\], one value"),
        ("json:dumps", r"json:dumps cannot be called as \(logits .*: too many positional arguments"),
    ],
)
def test_a_loss_that_cannot_be_used_is_a_usage_error(path, words, data_dir, tmp_path):
    with pytest.raises(UsageError, match=words):
        train_here(tmp_path / "run", data_dir, f"--loss={path}")
    assert not (tmp_path / "run").exists()


def batch_sum(data_dir, workdir, step):
    """What `nan_in_one_batch` sees of the batch of a step."""
    argv = ["main", *runs.FLAGS, f"--workdir={workdir}", f"--data_dir={data_dir}"]
    batches = assemble(parse_command_line(argv, tables=TABLES)).batches
    for _ in range(step):
        batch = next(batches)
    return int(batch.targets[batch.target_mask].sum()), np.unique(batches.examples[batches.examples >= 0]).tolist()


@pytest.mark.parametrize("mesh", ["", pytest.param("data:2", marks=pytest.mark.slow)])  # data:2: on one device only
def test_a_loss_that_is_not_finite_stops_before_the_update(mesh, data_dir, tmp_path, monkeypatch):
    total, examples = batch_sum(data_dir, tmp_path, 6)
    monkeypatch.setattr("tests.test_loop.BAD_SUM", total)
    flags = ("--loss=tests.test_loop:nan_in_one_batch", "--checkpoint_every=2", f"--mesh={mesh}")
    for _ in range(2):  # the same command again ends the same way
        with pytest.raises(NonFiniteError, match=r"step 6 is not finite .* the step was not applied") as stopped:
            train_here(tmp_path / "run", data_dir, *flags)
        assert stopped.value.exit_code == 6 and "--learning_rate" in str(stopped.value)
        *good, bad = rows_of(tmp_path / "run")
        assert [row["step"] for row in good] == [1, 2, 3, 4, 5] and all(set(row) == METRICS_FIELDS for row in good)
        assert bad["step"] == 6 and bad["loss"] is None and bad["numeric"] is None and bad["ce"] > 0
        assert bad["nonfinite"]["loss"] == "nan" and bad["examples"] == examples
        assert steps_of(tmp_path / "run") == [2, 4]
    _, leaves = state_of(tmp_path / "run", data_dir, *flags)
    assert all(np.isfinite(leaf).all() for leaf in leaves.values())


@pytest.mark.slow
def test_an_update_that_overflows_is_never_saved(data_dir, tmp_path):
    flags = ("--optimizer=sgd", "--learning_rate=1e30", "--clip_norm=0", "--schedule=constant", "--checkpoint_every=1")
    with pytest.raises(NonFiniteError, match="step 2 "):
        train_here(tmp_path / "run", data_dir, *flags, "--warmup_steps=0")
    _, leaves = state_of(tmp_path / "run", data_dir, *flags, "--warmup_steps=0")
    assert all(np.isfinite(leaf).all() for leaf in leaves.values())
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("length", [8, 4])
def test_answers_that_do_not_fit_are_refused_before_training(length, data_dir, tmp_path):
    with pytest.raises(DataError) as refused:
        train_here(tmp_path / "run", data_dir, f"--max_length={length}")
    found = re.fullmatch(
        rf"(\d+) of 84 examples need more than max_length={length} positions \(for example (train-\d+), (train-\d+), "
        r"(train-\d+)\), more than the 1\.0% .* max_length=(\d+) is the smallest that keeps all of them\.",
        str(refused.value),
    )
    assert found and refused.value.exit_code == 3 and not (tmp_path / "run").exists()
    fitting = assemble_with(data_dir, tmp_path, f"--max_length={found[5]}")
    assert (fitting.statistics.dropped, fitting.statistics.longest) == (0, int(found[5]))
    lengths = np.diff(fitting.batches.encoded.starts)
    assert (lengths > length).sum() == int(found[1]) and lengths.max() == int(found[5])
    assert all(lengths[int(key.partition("-")[2])] > length for key in found.groups()[1:4])


def assemble_with(data_dir, workdir, *flags):
    argv = ["main", *runs.FLAGS, f"--workdir={workdir}", f"--data_dir={data_dir}", *flags]
    return assemble(parse_command_line(argv, tables=TABLES))


def test_a_flag_allows_to_leave_long_examples_out_and_the_header_counts_them(data_dir, tmp_path):
    run = assemble_with(data_dir, tmp_path, "--max_length=8", "--max_dropped_fraction=0.9")
    found = re.search(r"(\d+) training examples, (\d+) too long", header(run, resuming=False))
    kept, dropped = map(int, found.groups())
    assert kept + dropped == 84 and dropped > 10


@pytest.mark.parametrize(
    "flag, error, words",
    [
        ("--eval_examples=25", UsageError, "split interpolate has 24 examples; ask for fewer, or for all with 0"),
        ("--batch_size=3", UsageError, "batch_size"),
        ("--mesh=data:16", UsageError, "needs 16 devices and cpu has"),
        ("--mesh=data:4", UsageError, "batch_size=2 must be a multiple of data x fsdp x grad_accum = 4 x 1"),
        ("--loss=ntil", UsageError, "normalize_by=tokens has no meaning"),
        ("--rescale=50", UsageError, "rescale"),
        ("--data_dir=/dev/null/data", StorageError, "cannot be prepared or read"),
        ("--platform=tpu", UsageError, "--platform=tpu was asked for and jax runs on cpu"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(flag, error, words, data_dir, tmp_path):
    others = ["--grad_accum=2"] if flag == "--batch_size=3" else []
    others += ["--normalize_by=tokens"] if flag == "--loss=ntil" else []
    with pytest.raises(error, match=re.escape(words)):
        train_here(tmp_path / "run", data_dir, flag, *others)
    assert not (tmp_path / "run").exists()


def test_a_whole_split_is_evaluated_with_0(data_dir, tmp_path):
    assert sum(len(batch.examples) for batch in assemble_with(data_dir, tmp_path, "--eval_examples=0").prompts) == 24


def test_data_without_a_number_are_refused_for_a_numeric_loss_only(tmp_path, monkeypatch):
    class Words:
        fingerprint = "words"

        def __len__(self):
            return 30

        def __getitem__(self, index):
            return Example(key=str(index), prompt="1 + 1?\n", answer="yes")

    task = dataclasses.replace(TASKS["arith"], make_source=lambda split, **options: Words())
    monkeypatch.setitem(TASKS, "arith", task)
    flags = ("--eval_examples=2", "--steps=1")
    with pytest.raises(DataError, match=r"none of the 120 supervised tokens of split train is a number") as refused:
        assemble_with(tmp_path / "cache", tmp_path, *flags)
    assert refused.value.exit_code == 3
    assert assemble_with(tmp_path / "cache", tmp_path, *flags, "--loss=ce").statistics.numeric_tokens == 0


@pytest.mark.parametrize("loss", ["ce", "smmd"])
def test_a_tokenizer_without_numbers_is_refused_with_the_flags_that_choose_them(loss, tmp_path, monkeypatch):
    class Words:
        fingerprint = "words"

        def __len__(self):
            return 30

        def __getitem__(self, index):
            return Example(key=str(index), prompt="=", answer="yes")

    tokenizer = toy_tokenizer({"y": 0, "e": 1, "s": 2, "=": 3, "end": 4})
    backbone = Backbone(
        name="words", tokenizer=tokenizer, config=dataclasses.replace(PRESETS["tiny"], vocab_size=5), folder=None
    )
    monkeypatch.setattr("train.assembly.make_backbone", lambda config: backbone)
    task = dataclasses.replace(TASKS["arith"], make_source=lambda split, **options: Words())
    monkeypatch.setitem(TASKS, "arith", task)
    words = r"backbone=words, numeric_policy=integers: none of 5 tokens is a number .*: --numeric_policy, --backbone\."
    with pytest.raises(TokenizerError, match=words):
        assemble_with(tmp_path / "cache", tmp_path, f"--loss={loss}", "--eval_examples=2")


class ANumberInTen:
    """Of thirty examples, three have a number in their answer; each fills a row of its own."""

    fingerprint = "a number in ten"

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return Example(key=str(index), prompt="1 + 1?\n", answer="yes" if index % 10 else "the answer is 2")


@pytest.mark.parametrize("loss", ["smmd", pytest.param("ce", marks=pytest.mark.slow)])
def test_steps_without_a_number_are_said_once_and_counted_at_the_end(loss, tmp_path, monkeypatch):
    without_evaluation(monkeypatch)
    task = dataclasses.replace(TASKS["arith"], make_source=lambda split, **options: ANumberInTen())
    monkeypatch.setitem(TASKS, "arith", task)
    flags = (f"--loss={loss}", "--batch_size=1", "--max_length=24", "--checkpoint_every=0")
    out, err = runs.captured(train_here, tmp_path / "run", tmp_path, *flags)
    rows = rows_of(tmp_path / "run")
    without = sum(row["numeric_count"] == 0 for row in rows)
    assert len(rows) == 12 and 1 < without < 12  # else the test shows nothing
    assert all(row["numeric"] == 0 for row in rows if row["numeric_count"] == 0 and loss != "ce")
    said = err.count("none of the targets of step"), f"{without} of the 12 steps of this start had no numeric" in out
    assert said == ((0, False) if loss == "ce" else (1, True))


def losses_of(folder):
    return [[row["loss"], row["ce"], row["numeric"], row["grad_norm"]] for row in rows_of(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:2,fsdp:2,tensor:2"])
def test_eight_devices_give_the_losses_of_one(mesh, data_dir, tmp_path):
    flags = ("--batch_size=8", "--grad_accum=2", "--dropout=0.1", "--steps=6")
    train_here(tmp_path / "one", data_dir, *flags)
    train_here(tmp_path / "eight", data_dir, *flags, f"--mesh={mesh}")
    np.testing.assert_allclose(losses_of(tmp_path / "eight"), losses_of(tmp_path / "one"), rtol=1e-5)
    one, eight = (rows_of(tmp_path / name, "predictions/6.jsonl") for name in ("one", "eight"))
    assert [row["key"] for row in one] == [row["key"] for row in eight]


@pytest.mark.slow
def test_a_run_moves_from_eight_devices_to_one_and_back_and_says_so(data_dir, tmp_path, monkeypatch, capsys):
    without_evaluation(monkeypatch)
    flags = ("--batch_size=8", "--dropout=0.1", "--schedule=constant", "--checkpoint_every=0")
    eight = ("--mesh=data:2,fsdp:2,tensor:2",)
    train_here(tmp_path / "one", data_dir, *flags, "--steps=9")
    for steps, mesh in ((3, eight), (6, ()), (9, eight)):
        train_here(tmp_path / "moved", data_dir, *flags, f"--steps={steps}", *mesh)
    out = capsys.readouterr().out
    note = r"note: devices: {} -> {}: the run goes on from the same state, but not bitwise"
    assert re.search(note.format(r"\{.*tensor.*\}", r"\{\}"), out) and re.search(note.format(r"\{\}", r"\{.*\}"), out)
    np.testing.assert_allclose(losses_of(tmp_path / "moved"), losses_of(tmp_path / "one"), rtol=1e-5)
    (_, moved), (_, one) = (state_of(tmp_path / name, data_dir, *flags, "--steps=9") for name in ("moved", "one"))
    for path in one:
        # Adam's update is near its sign where the gradient is near rounding, so a few parameters differ by more.
        np.testing.assert_allclose(moved[path], one[path], rtol=1e-3, atol=1e-3, err_msg=path)


def test_a_row_tells_the_epoch_of_its_own_batch_whatever_was_read_ahead(data_dir, tmp_path, monkeypatch):
    without_evaluation(monkeypatch)
    for name, every in (("ahead", 0), ("each", 3)):
        train_here(tmp_path / name, data_dir, *HARD, f"--checkpoint_every={every}")
    assert numbers_of(tmp_path / "ahead") == numbers_of(tmp_path / "each")


def test_the_next_batch_is_read_while_a_step_runs(data_dir, tmp_path, monkeypatch):
    """The metrics of a step are fetched only after the next step was handed over, unless something is due."""
    without_evaluation(monkeypatch)
    order = []
    draw, finish = Batches.__next__, runs.train.loop._Loop._finish
    monkeypatch.setattr(Batches, "__next__", lambda self: order.append("draw") or draw(self))

    def finished(self):
        if self._in_flight is not None:
            order.append(f"finish {self._in_flight.step}")
        finish(self)

    monkeypatch.setattr(runs.train.loop._Loop, "_finish", finished)
    train_here(tmp_path / "run", data_dir, *HARD, "--checkpoint_every=11")
    assert order[:6] == ["draw", "draw", "finish 1", "draw", "finish 2", "draw"]
    assert order[-6:] == ["finish 9", "draw", "finish 10", "finish 11", "draw", "finish 12"]
