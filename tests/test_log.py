"""Records of a run: strict JSON, every row once over kills and resumes."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from train.exits import DataError, UsageError
from train.log import (
    JsonlWriter,
    TensorBoardWriter,
    drop_later_predictions,
    encode_row,
    read_jsonl,
    write_jsonl,
)


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("value, word", [(math.nan, "nan"), (math.inf, "inf"), (np.float32(-np.inf), "-inf")])
def test_rows_stay_strict_json_and_name_what_is_not_finite(value, word):
    row = json.loads(encode_row({"step": 1, "loss": value, "ce": 2.0}), parse_constant=refuse_constant)
    assert row == {"step": 1, "loss": None, "ce": 2.0, "nonfinite": {"loss": word}}


def test_array_scalars_become_plain_numbers():
    row = {"step": jnp.int32(3), "loss": jnp.float32(0.5), "ok": np.bool_(True)}
    assert json.loads(encode_row(row)) == {"step": 3, "loss": 0.5, "ok": True}


def test_a_resume_drops_later_rows_and_keeps_the_bytes_of_the_others(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        for step in range(1, 7):
            writer.write({"step": step, "loss": 1 / step})
    whole = path.read_bytes()
    with JsonlWriter(path, resume_step=4) as writer:
        assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3, 4]
        for step in (5, 6):
            writer.write({"step": step, "loss": 1 / step})
    assert path.read_bytes() == whole


def test_a_new_run_starts_the_file_anew(tmp_path):
    path = tmp_path / "eval.jsonl"
    write_jsonl(path, [{"step": 0}])
    with JsonlWriter(path) as writer:
        writer.write({"step": 0, "loss": 1.0})
    assert read_jsonl(path) == [{"step": 0, "loss": 1.0}]


CUT_ROW = '{"step": 2, "text": "é"}'.encode()


@pytest.mark.parametrize("cut", range(1, len(CUT_ROW)))
def test_a_half_written_last_line_is_dropped_wherever_it_was_cut(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + CUT_ROW[:cut])
    with JsonlWriter(path, resume_step=5) as writer:
        assert path.read_bytes() == b'{"step": 1}\n'
        writer.write({"step": 2})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]


def test_a_complete_last_row_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    with JsonlWriter(path, resume_step=5) as writer:
        writer.write({"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff", b'{"loss": 1}'])
def test_a_broken_line_in_the_middle_is_refused_not_dropped(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + line + b'\n{"step": 3}\n'
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"line 2|without a step") as caught:
        JsonlWriter(path, resume_step=9)
    assert path.read_bytes() == content and caught.value.exit_code == 3


def test_a_row_is_written_once_per_key(tmp_path):
    with JsonlWriter(tmp_path / "eval.jsonl", key=("step", "split")) as writer:
        writer.write({"step": 5, "split": "easy"})
        assert writer.has(step=5, split="easy") and not writer.has(step=5, split="hard")
        writer.write({"step": 5, "split": "hard"})
        with pytest.raises(ValueError, match="'split': 'hard'"):
            writer.write({"step": 5, "split": "hard"})
    with JsonlWriter(tmp_path / "eval.jsonl", key=("step", "split"), resume_step=5) as writer:
        assert writer.has(step=5, split="hard")


def test_rows_are_on_the_disk_when_write_returns(tmp_path):
    code = """
        import os, signal, sys
        from train.log import JsonlWriter
        writer = JsonlWriter(sys.argv[1])
        writer.write({"step": 1})
        writer.write({"step": 2})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "m.jsonl")]
    died = subprocess.run(command, cwd=Path(__file__).parents[1], timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_jsonl(tmp_path / "m.jsonl")] == [1, 2]


def test_a_file_of_rows_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "predictions" / "5.jsonl"
    write_jsonl(path, [{"key": "a"}])

    def rows():
        yield {"key": "b"}
        raise RuntimeError("stopped in the middle")

    with pytest.raises(RuntimeError):
        write_jsonl(path, rows())
    assert read_jsonl(path) == [{"key": "a"}] and os.listdir(path.parent) == ["5.jsonl"]


def test_predictions_after_the_resumed_step_are_removed(tmp_path):
    for step in (5, 10, 15):
        write_jsonl(tmp_path / "predictions" / f"{step}.jsonl", [])
    drop_later_predictions(tmp_path, 10)
    assert sorted(os.listdir(tmp_path / "predictions")) == ["10.jsonl", "5.jsonl"]
    drop_later_predictions(tmp_path, None)
    assert os.listdir(tmp_path / "predictions") == []


def test_tensorboard_events_are_written_and_its_absence_is_a_usage_error(tmp_path, monkeypatch):
    writer = TensorBoardWriter(tmp_path / "tensorboard")
    writer.write({"step": 1, "loss": 0.5, "numeric": None, "split": "x"}, prefix="train")
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes() and b"numeric" not in events.read_bytes()
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UsageError, match="pip install tensorboardX"):
        TensorBoardWriter(tmp_path)
