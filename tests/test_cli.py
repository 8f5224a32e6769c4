"""The command itself, in a process of its own: exit codes, outputs, and what never appears in them."""

import dataclasses
import json
import os
import random
import re
import signal
import time

import pytest

from tests import runs
from tests.runs import examples_of, numbers_of, rows_of, run_child, steps_of, tiny_command, train_there
from train.config import TrainConfig, config_from_json
from train.exits import EXIT_CODES
from train.log import read_jsonl
from train.preview import MARKS_LEGEND

EVALUATED = (*runs.HARD, "--eval_every=6")
SECRET = "hf_" + "aB3" * 10


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def command(*flags, python=(), **variables):
    return run_child([*python, "-m", "train.main", *flags], **variables)


def test_help_lists_every_flag_with_its_default_and_starts_no_library():
    done = command("--help", python=["-X", "importtime"])
    assert done.returncode == 0
    for field in dataclasses.fields(TrainConfig):
        entry = re.search(rf"^  --(?:\[no\])?{field.name}\n((?:      .*\n)+)", done.stdout, re.MULTILINE)
        assert entry and re.search(r"Required\.|Default:\s+\S", entry[1]), field.name
    assert "--loss\n" in done.stdout and "ntl_was" in done.stdout and "tiny" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"flax", "orbax.checkpoint", "matplotlib", "torch", "tensorflow"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, words",
    [
        (["--task=arith", "--learning_rte=1e-4"], "--learning_rte is not a flag; did you mean --learning_rate?"),
        pytest.param(
            ["--task=arith", "--backbone=gpt2"], "backbone=gpt2: not known. Known: tiny", marks=pytest.mark.slow
        ),
        pytest.param(["arith"], "did you mean --task=arith?", marks=pytest.mark.slow),
        (["--task=arith", f"--data_dir={SECRET}"], "this looks like an access token"),
    ],
)
def test_a_wrong_command_ends_with_2_and_one_sentence(flags, words, tmp_path):
    done = command(*flags, f"--workdir={tmp_path}/run", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert SECRET not in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("platforms", ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cpu", "tpu"))])
def test_a_platform_that_is_not_there_ends_the_command_before_any_work(platforms, tmp_path):
    done = command(
        "--task=arith", "--platform=tpu", f"--workdir={tmp_path}/run",
        XDG_CACHE_HOME=str(tmp_path / "cache"), JAX_PLATFORMS=platforms,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "tpu" in done.stderr
    assert not list(tmp_path.iterdir())


def test_print_config_is_the_config_of_the_run(tmp_path):
    done = command("--task=arith", "--print_config", "--loss=ntil", f"--workdir={tmp_path}/run")
    assert done.returncode == 0 and done.stderr == ""
    config = config_from_json(done.stdout)
    assert (config.loss, config.variant, config.eval_split) == ("ntil", "small", "interpolate")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_compiles_shows_examples_and_memory_and_writes_nothing(data_dir, tmp_path):
    done = train_there(tmp_path / "run", data_dir, "--dry_run", *runs.HARD)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run").exists()
    assert re.search(r"step +compiled in \d+s; memory per device:", done.stdout)
    for name in ("arguments", "outputs", "temporaries", "peak"):
        assert re.search(rf"{name} +\d+\.\d MiB", done.stdout)
    title = f"examples ({MARKS_LEGEND})\n"
    lines = done.stdout.partition(title)[2].splitlines()[:6]
    for texts, marks in zip(lines[::2], lines[1::2], strict=True):
        marks = marks.split()
        assert marks[0] == "." and marks[-1] == "a" and re.fullmatch(r"\.p*[aN]+", "".join(marks)), (texts, marks)
        assert texts.rstrip().endswith("<eos>") and "N" in marks
        starts = [found.start() for found in re.finditer(r"\S+", lines[lines.index(texts) + 1])]
        numbers = [texts[start] for start, mark in zip(starts, marks, strict=True) if mark == "N"]
        assert all(number in "0123456789" for number in numbers)


@pytest.mark.slow
def test_a_trace_appears_only_under_debug(tmp_path):
    """A run folder below a file cannot be made: storage, exit 5."""
    (tmp_path / "file").write_text("")
    plain = train_there(tmp_path / "file" / "run", tmp_path / "data")
    assert plain.returncode == 5 and "Traceback" not in plain.stderr
    assert plain.stderr.startswith("error: cannot write checkpoints: ") and "--workdir" in plain.stderr


@pytest.mark.slow
def test_the_trace_under_debug_is_free_of_secrets(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / SECRET  # named by a variable, as a shell would
    done = run_child(
        ["-c", "import os, sys; from train.main import main; from train.exits import run_guarded\n"
               "import train.loop\n"
               "train.loop.assemble = lambda config: (_ for _ in ()).throw(OSError(os.environ['FOLDER']))\n"
               "run_guarded(main, ['main', '--task=arith', '--debug', sys.argv[1]])", f"--workdir={tmp_path}/run"],
        FOLDER=str(folder),
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" in done.stderr and "[redacted]" in done.stderr
    assert SECRET not in done.stderr + done.stdout


def test_every_exit_code_is_documented_once():
    assert sorted(EXIT_CODES) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 141, 143]


def numbers_without_clock(folder):
    return numbers_of(folder), rows_of(folder, "eval.jsonl"), rows_of(folder, "predictions/12.jsonl")


@pytest.fixture(scope="module")
def straight(data_dir, tmp_path_factory):
    """A run that nothing stopped: (folder, examples, the finished process)."""
    folder = tmp_path_factory.mktemp("straight")
    done = train_there(folder / "run", data_dir, *EVALUATED, examples=folder / "examples.jsonl")
    assert done.returncode == 0, done.stderr
    return folder / "run", folder / "examples.jsonl", done


def assert_same_run(folder, examples, straight, data_dir):
    assert numbers_without_clock(folder) == numbers_without_clock(straight[0])
    assert examples_of(examples) == examples_of(straight[1])
    states = []
    with pytest.MonkeyPatch.context() as patch:
        runs.shrink(patch.setitem)
        for run in (folder, straight[0]):
            states.append(runs.state_of(run, data_dir, *EVALUATED))
    assert runs.same_state(*states)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_command(straight, data_dir, tmp_path):
    folder, examples = tmp_path / "run", tmp_path / "examples.jsonl"
    killed = train_there(folder, data_dir, *EVALUATED, fault="SIGKILL@evaluate:2", examples=examples)
    assert killed.returncode == -signal.SIGKILL and [row["step"] for row in rows_of(folder, "eval.jsonl")] == [6]
    done = train_there(folder, data_dir, *EVALUATED, examples=examples)
    assert done.returncode == 0, done.stderr
    assert re.search(r"resumed from step (8|12)\n", done.stdout) and "(resuming)" in done.stdout
    assert_same_run(folder, examples, straight, data_dir)
    environment = json.loads((folder / "environment.json").read_text())
    assert len(environment["earlier_starts"]) == 1


@pytest.mark.slow
def test_kills_at_every_phase_one_after_the_other_lose_nothing(straight, data_dir, tmp_path):
    folder, examples = tmp_path / "run", tmp_path / "examples.jsonl"
    flags = (*EVALUATED, "--keep_checkpoints=1")
    for fault in (
        "SIGKILL@compile",
        "SIGKILL@batch:3",
        "SIGKILL@save begun:1",
        "SIGKILL@state written:1",
        "SIGKILL@manifest written:1",
        "SIGKILL@evaluate:1",
        "SIGKILL@old step renamed:1",
        "SIGKILL@batch:3",
        "SIGKILL@plots",
    ):
        killed = train_there(folder, data_dir, *flags, fault=fault, examples=examples)
        assert killed.returncode == -signal.SIGKILL, (fault, killed.stderr)
    done = train_there(folder, data_dir, *flags, examples=examples)
    assert done.returncode == 0 and "nothing is left to train" in done.stdout, done.stderr
    assert_same_run(folder, examples, straight, data_dir)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["12"]


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(straight, data_dir, tmp_path):
    folder, examples = tmp_path / "run", tmp_path / "examples.jsonl"
    rng = random.Random(0)
    for _ in range(8):
        with runs.start_child(tiny_command(folder, data_dir, *EVALUATED, examples=examples)) as child:
            # The header: imports and data are behind it.
            next(line for line in iter(child.stdout.readline, "") if line.startswith("task"))
            time.sleep(rng.uniform(0, 5))
            child.kill()
            child.communicate()
    done = train_there(folder, data_dir, *EVALUATED, examples=examples)
    assert done.returncode == 0, done.stderr
    assert_same_run(folder, examples, straight, data_dir)
    assert not [name for name in os.listdir(folder / "checkpoints") if not name.isdecimal()]


def wait_for(child, words):
    """Read stderr up to a line that holds the words."""
    for line in child.stderr:
        if words in line:
            return
    raise AssertionError(f"{words!r} never came")


@pytest.mark.slow
def test_one_writer_at_a_time_and_a_real_signal_saves(data_dir, tmp_path):
    folder = tmp_path / "run"
    flags = ("--steps=100000", "--checkpoint_every=0", "--schedule=constant")
    with runs.start_child(tiny_command(folder, data_dir, *flags)) as first:
        try:
            wait_for(first, "step      3/100000")
            second = train_there(folder, data_dir, *flags)
            assert second.returncode == 8 and f"process {first.pid} " in second.stderr, second.stderr
            assert json.loads((folder / "environment.json").read_text())["earlier_starts"] == []
            first.send_signal(signal.SIGTERM)
            _, stderr = first.communicate(timeout=60)
        finally:
            first.kill()
    assert first.returncode == 143
    (step,) = steps_of(folder)
    assert f"stopped: a signal ended the run; step {step} is saved and verified." in stderr
    assert rows_of(folder)[-1]["step"] == step and (folder / "checkpoints" / str(step) / "manifest.json").exists()


@pytest.mark.slow
def test_a_signal_while_xla_compiles_ends_with_143_and_two_end_at_once(data_dir, tmp_path):
    for signals in (1, 2):
        folder = tmp_path / f"run{signals}"
        # No cache, and a step that takes seconds to compile.
        command = tiny_command(folder, data_dir, "--loss=ntil", "--grad_accum=2")
        with runs.start_child(command, JAX_ENABLE_COMPILATION_CACHE="0") as child:
            try:
                while not (folder / "environment.json").exists():
                    time.sleep(0.02)
                time.sleep(1.5)
                for _ in range(signals):
                    child.send_signal(signal.SIGTERM)
                    time.sleep(0.2)
                child.communicate(timeout=120 if signals == 1 else 5)
            finally:
                child.kill()
        assert child.returncode == 143
        assert steps_of(folder) == ([0] if signals == 1 else [])


@pytest.mark.slow
@pytest.mark.parametrize("level", ["1", "2"])
def test_the_checks_hold_without_asserts(level, data_dir, tmp_path):
    done = train_there(tmp_path / "run", data_dir, "--max_length=4", PYTHONOPTIMIZE=level)
    assert done.returncode == 3 and "need more than max_length=4 positions" in done.stderr
    loss = train_there(
        tmp_path / "run", data_dir, "--optimizer=sgd", "--learning_rate=1e30", "--clip_norm=0", PYTHONOPTIMIZE=level
    )
    assert loss.returncode == 6 and "of step 2 is not finite" in loss.stderr, loss.stderr
    assert command("--task=arith", "--steps=0", PYTHONOPTIMIZE=level).returncode == 2


@pytest.mark.slow
def test_a_terminal_that_knows_only_ascii_and_another_clock_change_nothing(straight, data_dir, tmp_path):
    variables = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "TZ": "Asia/Kathmandu", "PYTHONUTF8": "0"}
    dry = train_there(tmp_path / "run", data_dir, "--dry_run", *EVALUATED, **variables)
    assert dry.returncode == 0 and "\\xb7" in dry.stdout, dry.stderr
    done = train_there(tmp_path / "run", data_dir, *EVALUATED, **variables)
    assert done.returncode == 0, done.stderr
    assert numbers_without_clock(tmp_path / "run") == numbers_without_clock(straight[0])


@pytest.mark.slow
def test_tokens_in_the_environment_are_in_no_output(data_dir, tmp_path):
    variables = {"HF_TOKEN": SECRET, "XLA_FLAGS": os.environ["XLA_FLAGS"], "WANDB_API_KEY": SECRET}
    done = train_there(tmp_path / "run", data_dir, *EVALUATED, "--debug", **variables)
    assert done.returncode == 0 and SECRET not in done.stdout + done.stderr
    assert all(SECRET.encode() not in content for content in runs.contents(tmp_path / "run").values())


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["small", "deepmind"])
def test_the_command_of_the_readme_with_few_steps(variant, tmp_path):
    """The real model and the real data, made once per machine in the user's cache."""
    flags = ["--task=arith", f"--variant={variant}", "--steps=2", "--batch_size=2", "--eval_examples=4",
             f"--workdir={tmp_path}/run"]  # fmt: skip
    for words in ("step 2/2", ""):
        done = command(*flags)
        assert done.returncode == 0 and words in done.stderr, done.stderr
    assert "nothing is left to train" in done.stdout and " 0 too long" not in done.stdout
    row = read_jsonl(tmp_path / "run" / "eval.jsonl")[0]
    assert row["split"] == "interpolate" and row["n"] == 4
