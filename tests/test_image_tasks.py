"""The tasks with images from painting to scores: they train, evaluate, can be inspected, and are scored again."""

import dataclasses
import functools

import pytest
from PIL import Image

from tests.runs import captured, rows_of, train_here
from train.evaluation import EvaluateFlags, evaluate
from train.inspect_data import main as inspect
from train.log import read_jsonl
from train.tasks import TASKS

COUNTS = {"train": 40, "test": 10}
TASK_FLAGS = {
    "clock": ("--max_length=24",),
    "clock hard": ("--variant=hard", "--max_length=24"),
    "chartqa": ("--max_length=96",),
}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Paint few of them."""
    for name in ("clock", "chartqa"):
        make_source = functools.partial(TASKS[name].make_source, examples=COUNTS)
        monkeypatch.setitem(TASKS, name, dataclasses.replace(TASKS[name], make_source=make_source))


@pytest.mark.slow
@pytest.mark.parametrize("case", TASK_FLAGS)
def test_a_task_with_images_trains_and_is_graded(tmp_path, case):
    task, flags = case.split()[0], TASK_FLAGS[case]
    workdir = tmp_path / "run"
    text, _ = captured(
        train_here, workdir, tmp_path / "data", f"--task={task}", *flags, "--steps=3", "--batch_size=4",
        "--eval_examples=8", "--eval_batch_size=4", "--checkpoint_every=3",
    )  # fmt: skip
    assert "tiny-vlm" in text and "image" in text
    rows = rows_of(workdir)
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["numeric_count"] > 0 for row in rows)
    [scores] = rows_of(workdir, "eval.jsonl")
    assert scores["n"] == 8 and (task == "clock" or scores["time_gap"] is None)
    with Image.open(workdir / "plots" / f"{task}_examples.png") as sheet:
        assert min(sheet.size) > 100
    predictions = read_jsonl(workdir / "predictions" / "3.jsonl")
    assert len(predictions) == 8 and all(row["answer"] for row in predictions)

    path, summary = evaluate(EvaluateFlags(workdir=str(workdir), eval_examples=8, eval_batch_size=3))
    again = {row["key"]: row["prediction"] for row in read_jsonl(path)}
    assert again == {row["key"]: row["prediction"] for row in predictions}
    assert summary["metrics"]["accuracy"] == scores["accuracy"]


@pytest.mark.slow
def test_sound_pictures_are_shown_to_whoever_looks(tmp_path):
    text, _ = captured(inspect, ["inspect", "--task=clock", f"--data_dir={tmp_path}"])
    for words in ("40 of 40 examples have one", "48 x 48", "faults\n  none"):
        assert words in text, text
