"""Opening splits by a config: options reach the data they have a use for, change its fingerprint, and end runs well."""

import dataclasses
import functools
import json

import pytest

from tests.runs import run_child
from tests.test_jsonl import images, png, write
from train.config import DATA_OPTIONS, make_config
from train.exits import DataError, UsageError
from train.main import TABLES
from train.splits import cache_folder, open_split
from train.tasks import TASKS
from train.tasks.base import stream_examples

ROWS = [{"question": f"{n}?", "answer": n} for n in range(8)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "own"
    path.mkdir()
    write(path, train=[*ROWS, "{"], test=[{"question": f"held out {n}?", "answer": n} for n in range(5)])
    return path


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Painted and generated data of a handful of examples."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, sizes in {
        "arith": {"train": 9, "interpolate": 3, "longer": 3},
        "clock": {"train": 9, "test": 3},
        "chartqa": {"train": 3, "test": 1},
    }.items():
        make = functools.partial(TASKS[name].make_source, examples=sizes)
        monkeypatch.setitem(TASKS, name, dataclasses.replace(TASKS[name], make_source=make))


def config(**given):
    return make_config({"backbone": "tiny", **given}, tables=TABLES)


def answers(source):
    return [example.answer for example in stream_examples(source)]


@pytest.mark.parametrize("task", ["arith", "clock", "chartqa"])
def test_the_seed_of_the_data_is_another_than_that_of_the_run(few, task):
    split = TASKS[task].train_split
    first, same, other = (
        open_split(config(task=task, **given), split) for given in ({}, {"seed": 1}, {"data_seed": 1})
    )
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert [first[index] for index in range(len(first))] != [other[index] for index in range(len(other))]


def test_a_limit_takes_the_first_examples_of_the_training_split_alone(folder):
    given = config(task="jsonl", data_dir=str(folder), limit=3)
    assert answers(open_split(given, "train")) == ["0", "1", "2"]
    assert len(open_split(given, "test")) == 5
    whole = open_split(config(task="jsonl", data_dir=str(folder)), "train")
    assert len(whole) == 8 and whole.fingerprint != open_split(given, "train").fingerprint


def test_bad_lines_are_refused_above_a_number(folder):
    for bound, is_refused in [(0, True), (1, False), (None, False)]:
        given = config(task="jsonl", data_dir=str(folder), max_bad_lines=bound)
        if is_refused:
            with pytest.raises(DataError, match="1 of 9 lines are left out: not JSON"):
                open_split(given, "train")
        else:
            assert len(open_split(given, "train")) == 8


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"task": "gsm8k", "data_seed": 1}, "data_seed=1 has no effect on task gsm8k"),
        ({"task": "arith", "variant": "released", "data_seed": 1}, "variant released"),
        ({"task": "arith", "limit": 5}, "limit=5 has no effect on task arith"),
        ({"task": "clock", "max_bad_lines": 0}, "for folder, folder_chat"),
        ({"task": "chartqa", "variant": "human", "data_seed": 1}, "variant human"),
        ({"task": "jsonl", "variant": "plain_strict", "max_bad_lines": 3}, "variant plain_strict"),
    ],
)
def test_options_without_effect_are_refused(given, words):
    with pytest.raises(UsageError, match=words) as refused:
        config(**given)
    assert refused.value.exit_code == 2


def test_every_option_is_used_by_a_variant_that_its_task_has():
    used = {(option, variant) for task in TASKS.values() for option in task.options for variant in task.options[option]}
    assert {option for option, _ in used} == set(DATA_OPTIONS)
    for task in TASKS.values():
        assert {*task.file_variants, *(name for names in task.options.values() for name in names)} <= {*task.variants}


def test_an_unknown_variant_is_refused_here_too():
    with pytest.raises(UsageError, match="variant=huge: task arith has small"):
        open_split(dataclasses.replace(config(task="arith"), variant="huge"), "train")


def test_nothing_is_kept_beside_files_of_the_users(folder):
    assert "cache" in cache_folder(config(task="jsonl", data_dir=str(folder)))
    assert "cache" in cache_folder(config(task="clock", variant="folder", data_dir=str(folder)))
    assert cache_folder(config(task="clock", data_dir="prepared")) == "prepared"
    assert "cache" in cache_folder(config(task="arith", variant="released", data_dir=str(folder)))


def test_pictures_of_a_users_own_go_through_whole(folder):
    """From a file of lines to examples with bytes, the bad picture counted."""
    places = images(folder, a=png(1), b=png(2)[:40])
    rows = [{"question": "Which?", "answer": 7, "image": place} for place in places.values()]
    write(folder, train=[*rows, *ROWS], test=[ROWS[0] | {"question": "held out?"}])
    source = open_split(config(task="jsonl", data_dir=str(folder), limit=4), "train")
    assert [(example.answer, example.image) for example in stream_examples(source)] == [
        ("7", png(1)), ("0", None), ("1", None), ("2", None)
    ]  # fmt: skip
    assert source.notes == ("train.jsonl: 1 of 5 lines are left out: truncated or broken image (1: line 2).",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--variant=plain_strict"], 3, "1 of 9 lines are left out: not JSON (1: line 9). At most 0 may be bad"),
        (["--max_bad_lines=0"], 3, "At most 0 may be bad"),
        (["--variant=chat_strict", "--max_bad_lines=1"], 2, "max_bad_lines=1 has no effect"),
        (["--data_seed=1"], 2, "data_seed=1 has no effect on task jsonl"),
    ],
)
def test_the_command_ends_with_its_code_and_the_reason(folder, flags, code, words):
    command = ["-m", "train.main", "--task=jsonl", f"--data_dir={folder}", f"--workdir={folder.parent}/run", *flags]
    done = run_child(command, XDG_CACHE_HOME=str(folder.parent / "cache"))
    assert done.returncode == code and words in done.stderr, done.stderr
    assert not (folder.parent / "run").exists()


@pytest.mark.slow
def test_a_folder_of_pictures_ends_the_look_at_it_with_3(tmp_path):
    (tmp_path / "train" / "3-05").mkdir(parents=True)
    (tmp_path / "train" / "3-05" / "a.png").write_bytes(b"no picture")
    command = ["-m", "train.inspect_data", "--task=clock", "--variant=folder", f"--data_dir={tmp_path}"]
    done = run_child([*command, "--backbone=tiny"], XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 3 and "no image of a known format (1: picture train/3-05/a.png)" in done.stderr
    assert json.dumps(str(tmp_path))[1:-1] in done.stderr
