"""The text tasks end to end with the tiny backbone: assembled, trained for a step, generated from and graded."""

import dataclasses
import json
import os
import re

import pytest

from tests.runs import ROOT, shrink
from tests.test_smollm2 import real_file
from tests.test_word_problems import GSM8K_ROWS, SVAMP_ROWS
from train.assembly import assemble
from train.config import make_config, parse_command_line
from train.exits import DataError, UsageError
from train.log import EVALS, PREDICTIONS, read_jsonl
from train.loop import train
from train.main import TABLES
from train.tasks import TASKS


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shrink(monkeypatch.setitem)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "SVAMP.json").write_text(json.dumps(SVAMP_ROWS))
    for split, rows in GSM8K_ROWS.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(task, files, **given):
    small = {"steps": 1, "batch_size": 2, "max_length": 256, "eval_examples": 2, "eval_batch_size": 2, "log_every": 1}
    folders = {"data_dir": str(files), "workdir": str(files.parent / "run")}
    return make_config({"task": task, **small, **folders, **given}, tables=TABLES)


@pytest.mark.parametrize(
    ("task", "variant"),
    [
        pytest.param("gsm8k", "plain_stripped", marks=pytest.mark.slow),
        pytest.param("svamp", "plain", marks=pytest.mark.slow),
        ("jsonl", "plain"),
    ],
)
def test_a_text_task_trains_and_is_graded(files, monkeypatch, task, variant):
    before = sorted(files.rglob("*"))
    given = config(task, files, variant=variant)
    # A model after one step never ends by itself.
    monkeypatch.setitem(TASKS, task, dataclasses.replace(TASKS[task], max_new_tokens=4))
    train(given, [])
    [row] = read_jsonl(files.parent / "run" / EVALS)
    assert (row["n"], row["split"]) == (2, "test") and row["parse_failure_rate"] is not None
    rows = read_jsonl(files.parent / "run" / PREDICTIONS / "1.jsonl")
    assert [set(r) >= {"prompt", "answer", "prediction", "correct", "parsed"} for r in rows] == [True, True]
    # Nothing is written beside the user's files.
    assert sorted(files.rglob("*")) == before


def test_lines_left_out_are_in_the_header(files):
    with open(files / "train.jsonl", "a") as stream:
        stream.write("{\n")
    notes = assemble(config("jsonl", files)).notes
    assert "train.jsonl: 1 of 6 lines are left out: not JSON (1: line 6)." in notes
    with pytest.raises(DataError, match="At most 0 may be bad"):
        assemble(config("jsonl", files, variant="plain_strict"))


def test_a_chat_variant_needs_a_chat_template(files):
    with pytest.raises(UsageError, match="no chat template"):
        assemble(config("gsm8k", files, variant="chat"))


def test_long_examples_are_counted_and_refused_never_cut(files):
    with pytest.raises(DataError, match=r"of 5 examples need more than max_length=40 positions"):
        assemble(config("gsm8k", files, max_length=40))


@pytest.mark.parametrize(
    ("variant", "split"), [("all", "longer"), ("small", "extrapolate"), ("simplify_surd", "extrapolate")]
)
def test_a_split_of_another_variant_is_a_wrong_flag(files, variant, split):
    with pytest.raises(UsageError, match="unknown split"):
        TASKS["arith"].make_source(split, data_dir=str(files), variant=variant)


def documented_commands() -> list[str]:
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    return re.findall(r"^python -m train\.main (--task=(?:gsm8k|svamp).*--data_dir=data.*)$", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.parametrize("command", documented_commands())
def test_the_documented_commands_keep_every_published_example(command, tmp_path, monkeypatch):
    folder = os.environ.get("SMMD_DATA_DIR", "")
    if not os.path.isdir(os.path.join(folder, "gsm8k")):
        pytest.skip("SMMD_DATA_DIR holds no gsm8k")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if "--backbone=smollm2-135m" in command:
        pytest.importorskip("gguf")
        command = command.replace("smollm2-135m", str(real_file()), 1)
    argv = ["main", *command.replace("--data_dir=data", f"--data_dir={folder}").split(), "--eval_examples=0"]
    run = assemble(parse_command_line(argv, tables=TABLES))
    assert (run.statistics.examples, run.statistics.dropped) == (7473, 0)
    assert sum(len(batch.examples) for batch in run.prompts) == {"gsm8k": 1319, "svamp": 1000}[run.task.name]


def test_the_documented_commands_are_found():
    assert len(documented_commands()) == 3
