"""`train.evaluate`: whose answers, to which questions, graded how; and that its files say it, once and whole."""

import dataclasses
import json
import re
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest

from smmd_jax import make_numeric_vocab, numeric_vocab_from_tokenizer
from tests.runs import captured, contents, run_child, shrink, train_here
from tests.test_word_problems import SVAMP_ROWS
from train.backbone import make_backbone
from train.distribution_metrics import measure_distributions
from train.encode import encode
from train.evaluate import main
from train.evaluation import EvaluateFlags, default_variant
from train.exits import CheckpointCorruptError, DataError, StorageError, UsageError, exit_code_of
from train.graders import GRADERS
from train.hf_folder import export
from train.log import read_jsonl
from train.regression_decoding import expected_value, median_value
from train.sampled_answers import mean_text, median_text
from train.tasks import TASKS, Example
from train.token_answers import check_single_tokens
from train.trained import read_run_config, restore_trained

FEW = ("--steps=4", "--eval_examples=5", "--checkpoint_every=2")


@pytest.fixture(autouse=True, scope="module")
def small(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        shrink(patch.setitem)
        # A model of a few steps never ends by itself.
        for name in ("arith", "svamp"):
            patch.setitem(TASKS, name, dataclasses.replace(TASKS[name], max_new_tokens=6))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "SVAMP.json").write_text(json.dumps(SVAMP_ROWS))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("runs") / "run"
    captured(train_here, folder, data, *FEW)
    return folder


def evaluate(*flags):
    """Call the command; returns its output."""
    return captured(main, ["evaluate", *map(str, flags)])[0]


def test_a_run_answers_its_own_task_as_it_did_in_training(run, tmp_path):
    out = evaluate(f"--workdir={run}", "--eval_examples=5", "--eval_batch_size=4", f"--out={tmp_path}")
    rows = read_jsonl(tmp_path / "arith-interpolate-4.jsonl")
    assert rows == read_jsonl(run / "predictions" / "4.jsonl") and len(rows) == 5
    former = read_jsonl(run / "eval.jsonl")[-1]
    metrics = json.loads((tmp_path / "arith-interpolate-4.json").read_text())["metrics"]
    assert {name: former[name] for name in metrics} == metrics
    assert "accuracy" in out and "parse failures" in out and "95 % interval" in out and "R2" in out


def test_a_run_is_scored_on_another_task_with_results_in_its_folder(run):
    before = contents(run)
    out = evaluate(f"--workdir={run}", "--task=svamp", "--step=2")
    written = contents(run)
    names = {Path("evaluations/svamp-test-2.jsonl"), Path("evaluations/svamp-test-2.json")}
    assert written.keys() - before.keys() == names and all(written[name] == before[name] for name in before)
    rows = read_jsonl(run / "evaluations" / "svamp-test-2.jsonl")
    assert {row["key"] for row in rows} == {row["ID"] for row in SVAMP_ROWS}
    assert all(row["prompt"].startswith("Question: ") for row in rows)
    summary = json.loads((run / "evaluations" / "svamp-test-2.json").read_text())
    assert summary["inputs"]["grader"] == "gsm8k_flexible" and summary["metrics"]["n"] == len(rows)
    assert "svamp" in out and f"{run}/evaluations/svamp-test-2.jsonl" in out


@pytest.mark.parametrize("decode", ["greedy", "median"])
def test_the_answers_are_the_same_for_any_batch_size(run, tmp_path, decode):
    drawn = [] if decode == "greedy" else ["--samples=3"]
    written = []
    for size in (1, 3, 8):
        evaluate(f"--workdir={run}", "--eval_examples=9", f"--eval_batch_size={size}", f"--decode={decode}", *drawn,
                 f"--out={tmp_path}/{size}")  # fmt: skip
        written.append(contents(tmp_path / str(size)))
    assert written[0] == written[1] == written[2] and len(written[0]) == 2


def test_a_model_folder_answers_as_the_run_it_was_exported_from(run, tmp_path):
    captured(export, run, tmp_path / "model")
    shared = ("--task=arith", "--eval_examples=5", f"--data_dir={read_run_config(run).data_dir}")
    evaluate(f"--backbone={tmp_path}/model", f"--out={tmp_path}/folder", *shared)
    rows = read_jsonl(tmp_path / "folder" / "arith-interpolate-pretrained.jsonl")
    assert rows == read_jsonl(run / "predictions" / "4.jsonl")
    with pytest.raises(UsageError, match="backbone=tiny has no weights"):
        evaluate("--backbone=tiny", f"--out={tmp_path}/none", *shared)


@pytest.mark.slow
def test_adapters_beside_narrow_weights_answer_as_in_training(run, data, tmp_path):
    captured(export, run, tmp_path / "model")
    flags = (f"--backbone={tmp_path}/model", "--lora_rank=2", "--dtype=bfloat16", "--scan_layers=true")
    captured(train_here, tmp_path / "adapters", data, *FEW, *flags)
    evaluate(f"--workdir={tmp_path}/adapters", "--eval_examples=5", "--eval_batch_size=4", f"--out={tmp_path}/out")
    rows = read_jsonl(tmp_path / "out" / "arith-interpolate-4.jsonl")
    assert rows == read_jsonl(tmp_path / "adapters" / "predictions" / "4.jsonl") and len(rows) == 5


def test_the_same_evaluation_may_be_written_again_and_another_is_refused(run, tmp_path):
    flags = (f"--workdir={run}", f"--out={tmp_path}", "--eval_examples=4")
    evaluate(*flags)
    before = contents(tmp_path)
    evaluate(*flags, "--eval_batch_size=3")
    assert contents(tmp_path) == before
    with pytest.raises(UsageError, match=r'grader: "math_exact" -> "math_value"\nNothing is overwritten'):
        evaluate(*flags, "--grader=math_value")
    with pytest.raises(UsageError, match="examples: 4 -> 5"):
        evaluate(*flags[:2], "--eval_examples=5")
    assert contents(tmp_path) == before
    (tmp_path / "arith-interpolate-4.json").unlink()
    with pytest.raises(UsageError, match=r"exists without arith-interpolate-4\.json"):
        evaluate(*flags)


def test_the_distribution_is_that_of_the_whole_vocabulary_at_numeric_targets(run, tmp_path):
    summaries = []
    for size in (2, 5):
        evaluate(f"--workdir={run}", "--eval_examples=5", f"--eval_batch_size={size}", "--distribution",
                 f"--out={tmp_path}/{size}")  # fmt: skip
        summaries.append(json.loads((tmp_path / str(size) / "arith-interpolate-4.json").read_text())["distribution"])
    config = read_run_config(run)
    backbone = make_backbone(config)
    model = restore_trained(run, config, backbone, None).model()
    vocab = numeric_vocab_from_tokenizer(backbone.tokenizer.backend)
    ids = np.asarray(vocab.token_ids)
    source = TASKS["arith"].make_source("interpolate", data_dir=config.data_dir)
    rows, columns = [], []
    for index in range(5):
        tokens, supervised = encode(source[index], backbone.tokenizer)
        p = np.asarray(jax.nn.softmax(model(tokens[None, :-1])[0]), np.float64)
        for place in np.flatnonzero(supervised[1:] & np.isin(tokens[1:], ids)):
            rows.append(p[place, ids])
            columns.append(int(np.flatnonzero(ids == tokens[place + 1])[0]))
    wanted = dataclasses.asdict(measure_distributions(rows, columns, np.asarray(vocab.values)))
    assert wanted["n"] > 5
    for summary in summaries:
        assert summary == pytest.approx(wanted, rel=1e-4)


def test_the_median_is_an_answer_that_was_drawn_and_the_mean_a_number():
    read = lambda text: GRADERS["gsm8k_flexible"](text, "0").value
    texts = ["so #### 7", "none", "it is 12", "-1"]
    assert median_text(texts, read) == "so #### 7"
    assert mean_text(texts, read) == "6"
    assert mean_text(["-1/4", "0"], lambda text: Fraction(text)) == "-0.125"
    assert mean_text(["none", "at all"], read) == median_text(["none", "at all"], read) == "none"


def test_regression_aware_answers_are_graded_and_draw_by_seed(run, tmp_path):
    written = {}
    for seed in (0, 1):
        evaluate(f"--workdir={run}", "--eval_examples=5", "--decode=expected_value", "--samples=2", f"--seed={seed}",
                 "--temperature=2.0", "--grader=gsm8k_strict", f"--out={tmp_path}/{seed}")  # fmt: skip
        written[seed] = read_jsonl(tmp_path / str(seed) / "arith-interpolate-4-expected_value.jsonl")
    assert [row["prediction"] for row in written[0]] != [row["prediction"] for row in written[1]]
    with pytest.raises(UsageError, match="times of a dial"):
        evaluate(f"--workdir={run}", "--decode=median", "--grader=clock", f"--out={tmp_path}/clock")


def test_answers_of_one_token_are_those_of_the_distribution_after_the_prompt(run, tmp_path):
    pairs = [(1, 2), (3, 3), (0, 7), (4, 1), (12, 40)]
    rows = [{"prompt": f"What is {a} + {b}?\n", "answer": str(a + b)} for a, b in pairs]
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train.jsonl", {"prompt": "0\n", "answer": "0"})
    write_lines(tmp_path / "data" / "test.jsonl", *rows)
    ask = lambda decode, *flags: evaluate(
        f"--workdir={run}", "--task=jsonl", f"--data_dir={tmp_path}/data", f"--decode={decode}", *flags,
        f"--out={tmp_path}/{decode}"
    )  # fmt: skip
    with pytest.raises(DataError, match=r"1 of 5 gold answers are not one numeric token \(example .*: '52'\)"):
        ask("token_median")
    config = read_run_config(run)
    backbone = make_backbone(config)
    model = restore_trained(run, config, backbone, None).model()
    ids = np.asarray(numeric_vocab_from_tokenizer(backbone.tokenizer.backend).token_ids)
    for decode, answer in (("token_expected_value", expected_value), ("token_median", median_value)):
        ask(decode, "--eval_examples=4", "--eval_batch_size=3")
        found = read_jsonl(tmp_path / decode / f"jsonl-test-4-{decode}.jsonl")
        for row, given in zip(found, rows[:4], strict=True):
            prompt = np.array([backbone.tokenizer.encode_prompt(given["prompt"])])
            p = np.asarray(jax.nn.softmax(model(prompt)[0, -1]), np.float64)[ids]
            assert float(row["prediction"]) == pytest.approx(float(answer(p, np.arange(10.0))), rel=1e-5)
            assert row["parsed"] and row["gold_value"] == float(given["answer"])


def test_a_picture_is_not_passed_over_in_silence():
    example = Example(key="k", prompt="?", answer="4", image=b"png")
    with pytest.raises(DataError, match="example k has an image"):
        check_single_tokens([example], None, make_numeric_vocab(["4", "5"]), decode="token_median")


def write_lines(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_file_of_predictions_is_graded_without_a_model(tmp_path):
    """The platform does not exist, so that any work of jax would fail."""
    rows = [{"prediction": "11:58", "answer": "12:02"}, {"prediction": "noon", "answer": "12:00"},
            {"prediction": "3:10", "answer": "15:10", "key": "a", "prompt": "?"}]  # fmt: skip
    path = write_lines(tmp_path / "mine.jsonl", *rows, "")
    command = ["-m", "train.evaluate", f"--predictions={path}", "--grader=clock", f"--out={tmp_path}/out"]
    done = run_child(command, JAX_PLATFORMS="nowhere")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("time gap +2 minutes", done.stdout) and "1 (33.33 %) state no number" in done.stdout
    graded = read_jsonl(tmp_path / "out" / "mine-clock.jsonl")
    assert [(row["key"], row["correct"]) for row in graded] == [("line-1", False), ("line-2", False), ("a", True)]
    metrics = json.loads((tmp_path / "out" / "mine-clock.json").read_text())["metrics"]
    assert (metrics["time_gap"], metrics["parse_failures"], metrics["n"]) == (2, 1, 3)


def test_numbers_keep_their_digits_and_without_out_nothing_is_written(tmp_path):
    path = write_lines(
        tmp_path / "mine.jsonl", '{"prediction": 12345678901234567890.50, "answer": 12345678901234567890.5}'
    )
    out = evaluate(f"--predictions={path}", "--task=jsonl")
    assert "100.00 % of 1 predictions" in out and "nothing was written" in out
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "line 2 is not JSON"),
        ('{"prediction": "4"', "line 2 is not JSON"),
        ('{"prediction": "4"}', "line 2: wanted .* see answer"),
        ('{"prediction": null, "answer": "4"}', "line 2: wanted .* see prediction"),
        ("[1]", "line 2: wanted .* see prediction"),
        ('{"prediction": "\udcff"}', "line 2 is not JSON"),
    ],
)
def test_a_line_that_is_no_prediction_is_refused_with_its_number(tmp_path, line, words):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"prediction": "4", "answer": "4"}\n' + line.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=words) as caught:
        evaluate(f"--predictions={path}", "--grader=math_exact", f"--out={tmp_path}/out")
    assert exit_code_of(caught.value) == 3 and not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="holds no predictions"):
        evaluate(f"--predictions={write_lines(path, ' ')}", "--grader=math_exact")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--task=arith"], "exactly one of .* got none of them"),
        (["--workdir=a", "--backbone=b"], "got --workdir and --backbone"),
        (["--predictions=a"], "needs --grader"),
        (["--predictions=a", "--grader=clock", "--step=3", "--distribution"], "no effect .*--step, --distribution"),
        (["--predictions=nowhere", "--grader=clock"], "is not a file"),
        (["--backbone=b", "--task=arith"], "needs --task=TASK and --out"),
        (["--backbone=b", "--task=arith", "--out=c", "--step=1"], "no effect with --backbone: --step"),
        (["--workdir=nowhere"], "not the folder of a run"),
        (["--workdir=a", "--samples=3"], "--samples without --decode"),
        (["--workdir=a", "--samples=3", "--decode=token_median"], "--samples without --decode"),
        (["--workdir=a", "--numeric_policy=digits"], "--numeric_policy without --distribution"),
        (["--workdir=a", "--task=svmap"], "did you mean svamp"),
        (["--workdir=a", "--grader=clok"], "did you mean clock"),
        (["--workdir=a", "--decode=beam"], "decode='beam'"),
        (["--workdir=a", "--split=test", "--eval_split=train"], "--eval_split=train are one flag: give one"),
        (["--predictions=a", "--grader=clock", "--eval_split=test"], "no effect with --predictions: --eval_split"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        evaluate(*flags)
    assert not list(tmp_path.iterdir())


def test_help_shows_the_defaults_of_this_command_not_those_of_training(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "First examples of the split; 0: all of them. Default: 0. --eval_batch_size" in text
    assert not re.findall(rf"Default: [^.]*\b(?:{'|'.join(TASKS)})\b", text)


def test_what_a_run_does_not_have_is_refused(run, tmp_path):
    for flags, words in [
        (["--step=3"], "does not hold step 3"),
        (["--split=intrepolate"], "did you mean interpolate"),
        (["--eval_split=intrepolate"], "did you mean interpolate"),
        (["--variant=big"], "variant=big: not known"),
        (["--eval_examples=25"], "has 24 examples"),
        (["--task=jsonl", "--data_dir=nowhere"], "is missing"),
    ]:
        with pytest.raises((UsageError, CheckpointCorruptError, DataError), match=words) as caught:
            evaluate(f"--workdir={run}", f"--out={tmp_path}/out", *flags)
        assert exit_code_of(caught.value) in (2, 3, 4)
    assert not (tmp_path / "out").exists()


def test_a_failed_write_is_a_storage_error(run, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        evaluate(f"--workdir={run}", "--eval_examples=1", f"--out={tmp_path}/out")


def test_a_model_of_chats_is_asked_in_chats():
    assert default_variant("svamp", own_task="gsm8k", own_variant="plain_stripped") == "plain_stripped"
    assert default_variant("arith", own_task="gsm8k", own_variant="plain") == "small"
    with pytest.raises(UsageError):
        EvaluateFlags()
