"""A run that was killed or stopped anywhere goes on as if it never had been: state, losses, examples and records."""

import errno
import itertools
import json
import os
import shutil
import signal
import textwrap
import time
from pathlib import Path

import pytest

from tests import runs
from tests.runs import (
    HARD,
    contents,
    inject,
    numbers_of,
    record_examples,
    rows_of,
    same_state,
    state_of,
    steps_of,
    train_here,
)
from train.checkpoint import Checkpoints
from train.config import parse_command_line, save_config
from train.exits import CheckpointCorruptError, DataError, StoppedError, StorageError, UsageError, WriterLockError
from train.main import TABLES
from train.manifest import write_manifest

EVALUATED = (*HARD, "--eval_every=6")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.shrink(monkeypatch.setitem)


@pytest.fixture(scope="module")
def straight(data_dir, tmp_path_factory):
    """Twelve steps without an interruption, across the end of an epoch: (run folder, its batches' examples)."""
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        runs.shrink(patch.setitem)
        record_examples(folder / "examples.jsonl", patch.setattr)
        train_here(folder / "run", data_dir, *EVALUATED)
    return folder / "run", runs.examples_of(folder / "examples.jsonl")


def assert_same_run(folder, straight, data_dir, examples=None):
    """The state, every record and the examples are those of the run that never stopped."""
    assert same_state(state_of(folder, data_dir, *EVALUATED), state_of(straight[0], data_dir, *EVALUATED))
    assert numbers_of(folder) == numbers_of(straight[0])
    assert rows_of(folder, "eval.jsonl") == rows_of(straight[0], "eval.jsonl")
    names = sorted(path.name for path in (straight[0] / "predictions").iterdir())
    assert sorted(path.name for path in (folder / "predictions").iterdir()) == names == ["12.jsonl", "6.jsonl"]
    for name in names:
        assert (folder / "predictions" / name).read_bytes() == (straight[0] / "predictions" / name).read_bytes()
    if examples is not None:
        assert runs.examples_of(examples) == straight[1]
    assert not [name for name in os.listdir(folder / "checkpoints") if "tmp" in name or "deleting" in name]


def test_the_straight_run_is_a_hard_one(straight):
    """It crosses an epoch within a batch, has rows of one step each, and is not constant: the others compare to it."""
    rows = rows_of(straight[0])
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[6]["epoch"] < 1 < rows[8]["epoch"] and not float(rows[7]["epoch"]).is_integer()
    assert len({row["loss"] for row in rows}) == 12 and len(straight[1]) == 12
    assert [row["step"] for row in rows_of(straight[0], "eval.jsonl")] == [6, 12]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, saved",
    [
        ("SIGTERM@batch:3", 3),
        ("SIGTERM@evaluate:1", 6),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("SIGTERM@compile", 0),
                ("SIGTERM@batch:1", 1),
                ("SIGINT@batch:8", 8),
                ("SIGTERM@save begun:1", 4),
                ("SIGTERM@evaluate:2", 12),
            )
        ),
    ],
)
def test_a_stop_signal_saves_and_the_same_command_goes_on_bitwise(fault, saved, straight, data_dir, tmp_path):
    folder, examples = tmp_path / "run", tmp_path / "examples.jsonl"
    number = signal.Signals[fault.partition("@")[0]]
    with pytest.MonkeyPatch.context() as patch:
        record_examples(examples, patch.setattr)
        inject(fault, patch.setattr)
        with pytest.raises(StoppedError, match=f"step {saved} is saved and verified") as stopped:
            train_here(folder, data_dir, *EVALUATED)
    assert stopped.value.exit_code == 128 + number
    assert max(steps_of(folder)) == saved and (folder / "checkpoints" / str(saved) / "manifest.json").exists()
    if "evaluate" in fault:  # it does not wait for the end of an evaluation
        assert saved not in [row["step"] for row in rows_of(folder, "eval.jsonl")]
    with pytest.MonkeyPatch.context() as patch:
        record_examples(examples, patch.setattr)
        train_here(folder, data_dir, *EVALUATED)
    assert_same_run(folder, straight, data_dir, examples)


@pytest.mark.slow
def test_a_process_killed_in_an_evaluation_is_gone_on_with_bitwise(straight, data_dir, tmp_path):
    """kill -9, in a process of its own; test_cli.py kills at every other phase."""
    folder, examples = tmp_path / "run", tmp_path / "examples.jsonl"
    killed = runs.train_there(folder, data_dir, *EVALUATED, fault="SIGKILL@evaluate:2", examples=examples)
    assert killed.returncode == -signal.SIGKILL
    assert [row["step"] for row in rows_of(folder, "eval.jsonl")] == [6]
    with pytest.MonkeyPatch.context() as patch:
        record_examples(examples, patch.setattr)
        train_here(folder, data_dir, *EVALUATED)
    assert_same_run(folder, straight, data_dir, examples)


def test_a_second_signal_ends_a_process_that_is_deep_in_compiled_code():
    """While XLA compiles, no Python handler runs; the hash stands for it: one call of many seconds without the GIL."""
    code = """
        import hashlib
        from train.exits import StopSignals
        with StopSignals() as stop:
            print("compiling", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
    """
    with runs.start_child(["-c", textwrap.dedent(code)]) as child:
        assert child.stdout.readline() == "compiling\n"
        try:
            child.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert child.poll() is None
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=20) == 143
        finally:
            child.kill()


@pytest.fixture
def finished(straight, tmp_path):
    """A copy of the straight run, to go on from."""
    return Path(shutil.copytree(straight[0], tmp_path / "run"))


def test_the_same_command_after_the_end_changes_nothing_and_says_so(finished, data_dir, capsys):
    before = contents(finished)
    train_here(finished, data_dir, *EVALUATED)
    out = capsys.readouterr().out
    assert "nothing is left to train: all 12 steps are done and saved" in out
    assert "exact match" in out  # the closing table
    assert contents(finished) == before


def test_fewer_steps_than_are_saved_are_refused(finished, data_dir):
    before = contents(finished)
    with pytest.raises(UsageError, match="holds step 12 and --steps=6 asks for fewer"):
        train_here(finished, data_dir, *EVALUATED, "--steps=6")
    assert contents(finished) == before


@pytest.mark.parametrize(
    "flag, line",
    [
        ("--learning_rate=0.02", "learning_rate: 0.01 -> 0.02"),
        ("--loss=ce", 'loss: "smmd" -> "ce"'),
        ("--dropout=0", "dropout: 0.1 -> 0.0"),
        ("--seed=1", "seed: 0 -> 1"),
        ("--sigma=1", "sigma: [2.0] -> [1.0]"),
    ],
)
def test_another_config_in_the_same_folder_is_refused_with_a_diff(flag, line, finished, data_dir):
    before = contents(finished)
    with pytest.raises(UsageError, match="another config") as refused:
        train_here(finished, data_dir, *EVALUATED, "--steps=16", flag)
    assert line in str(refused.value) and refused.value.exit_code == 2
    assert contents(finished) == before


@pytest.mark.slow
def test_more_steps_and_another_rhythm_go_on_from_the_end(data_dir, tmp_path):
    """With a schedule that does not depend on the number of steps, 8 + 4 steps are 12."""
    flags = (*HARD, "--schedule=constant", "--warmup_steps=2")
    train_here(tmp_path / "run", data_dir, *flags, "--steps=8")
    train_here(tmp_path / "run", data_dir, *flags, "--steps=12", "--log_every=3", "--checkpoint_every=0")
    train_here(tmp_path / "long", data_dir, *flags, "--eval_every=8")
    assert same_state(state_of(tmp_path / "run", data_dir, *flags), state_of(tmp_path / "long", data_dir, *flags))
    by_step = {row["step"]: row for row in numbers_of(tmp_path / "long")}
    rows = numbers_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [*range(1, 9), 9, 12]
    assert all(row == by_step[row["step"]] for row in rows)
    assert rows_of(tmp_path / "run", "eval.jsonl") == rows_of(tmp_path / "long", "eval.jsonl")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["steps"], config["log_every"]) == (12, 3)


def test_an_evaluation_asked_for_later_is_made_up_for(finished, data_dir):
    train_here(finished, data_dir, *EVALUATED, "--eval_split=longer")
    assert [(row["step"], row["split"]) for row in rows_of(finished, "eval.jsonl")] == [
        (6, "interpolate"), (12, "interpolate"), (12, "longer"),
    ]  # fmt: skip
    assert rows_of(finished, "predictions/12.jsonl")[0]["key"].startswith("longer-")


def test_other_data_are_refused_unless_allowed_and_then_recorded(finished, data_dir, monkeypatch, capsys):
    runs.shrink(monkeypatch.setitem, sizes={**runs.SIZES, "train": 85})
    before = contents(finished)
    with pytest.raises(DataError, match="not those this run was started with") as refused:
        train_here(finished, data_dir, *EVALUATED, "--steps=14")
    assert refused.value.exit_code == 3 and "source: " in str(refused.value)
    assert contents(finished) == before
    train_here(finished, data_dir, *EVALUATED, "--allow_data_change")
    out = capsys.readouterr().out
    assert "note: the data changed: source: " in out and "nothing is left to train" in out


@pytest.mark.slow
def test_allowed_other_data_go_on_and_are_those_of_the_next_start(finished, data_dir, monkeypatch, capsys):
    runs.shrink(monkeypatch.setitem, sizes={**runs.SIZES, "train": 85})
    train_here(finished, data_dir, *EVALUATED, "--steps=14", "--allow_data_change")
    assert [row["step"] for row in rows_of(finished)] == list(range(1, 15))
    train_here(finished, data_dir, *EVALUATED, "--steps=14")
    assert "nothing is left to train" in capsys.readouterr().out


def test_a_second_writer_is_refused_and_changes_nothing(finished, data_dir):
    with Checkpoints(finished / "checkpoints"):
        before = contents(finished)
        with pytest.raises(WriterLockError, match=f"process {os.getpid()} .* writes to") as refused:
            train_here(finished, data_dir, *EVALUATED, "--steps=14", "--log_every=2")
        assert refused.value.exit_code == 8
        assert contents(finished) == before


def test_a_run_that_another_process_began_meanwhile_is_not_overwritten(data_dir, tmp_path, monkeypatch):
    """Between the first look at the folder and the lock a whole other run may have been there."""
    folder = tmp_path / "run"

    def after_the_other(*args, **options):
        other = parse_command_line(["main", *runs.FLAGS, f"--workdir={folder}", "--seed=7"], tables=TABLES)
        save_config(other)
        return Checkpoints(*args, **options)

    monkeypatch.setattr("train.loop.Checkpoints", after_the_other)
    with pytest.raises(UsageError, match="seed: 7 -> 0"):
        train_here(folder, data_dir, *EVALUATED)
    assert json.loads((folder / "config.json").read_text())["seed"] == 7


@pytest.mark.parametrize("count, safe", [pytest.param(1, None, marks=pytest.mark.slow), (2, 4)])
def test_a_failed_background_save_ends_the_run_and_leaves_the_last_good_step(
    count, safe, straight, data_dir, tmp_path, monkeypatch
):
    """The disk is full while a save goes on in its thread: the loop must not train on as if it were saved."""
    calls = itertools.count(1)

    def full(*args, **kwargs):
        if next(calls) == count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_manifest(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.checkpoint.write_manifest", full)
        with pytest.raises(StorageError, match=f"step {4 * count} was not saved .*No space left on device") as failed:
            train_here(tmp_path / "run", data_dir, *EVALUATED)
    assert failed.value.exit_code == 5
    assert steps_of(tmp_path / "run") == ([] if safe is None else [safe])
    train_here(tmp_path / "run", data_dir, *EVALUATED)
    assert_same_run(tmp_path / "run", straight, data_dir)


def test_a_save_that_fails_after_a_stop_signal_is_no_verified_save(data_dir, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("train.checkpoint.write_manifest", full)
    inject("SIGTERM@batch:2", monkeypatch.setattr)
    with pytest.raises(StorageError, match="step 2 was not saved"):
        train_here(tmp_path / "run", data_dir, *EVALUATED)


@pytest.mark.slow
def test_a_damaged_newest_step_is_passed_over_aloud_and_the_run_is_the_same(finished, straight, data_dir, capsys):
    next(path for path in (finished / "checkpoints" / "12").rglob("d/*") if path.is_file()).write_bytes(b"")
    train_here(finished, data_dir, *EVALUATED)
    out = capsys.readouterr().out
    assert "note: step 12 was passed over: " in out and "resumed from step 8" in out
    assert_same_run(finished, straight, data_dir)


def test_without_a_usable_step_the_run_does_not_start_again_by_itself(finished, data_dir):
    for step in steps_of(finished):
        (finished / "checkpoints" / str(step) / "manifest.json").unlink()
    before = contents(finished)
    with pytest.raises(CheckpointCorruptError) as refused:
        train_here(finished, data_dir, *EVALUATED)
    assert refused.value.exit_code == 4 and contents(finished) == before
