"""A run that was killed or stopped anywhere goes on as if it never had been: state, losses, examples and records."""

import os
import signal
import textwrap
import time

import pytest

from tests import runs
from tests.runs import HARD, inject, numbers_of, record_examples, rows_of, same_state, state_of, steps_of, train_here
from train.exits import StoppedError

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


@pytest.mark.parametrize(
    "fault, saved",
    [
        ("SIGTERM@compile", 0),
        ("SIGTERM@batch:1", 1),
        ("SIGTERM@batch:3", 3),
        ("SIGINT@batch:8", 8),
        ("SIGTERM@save begun:1", 4),
        ("SIGTERM@evaluate:1", 6),
        ("SIGTERM@evaluate:2", 12),
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
