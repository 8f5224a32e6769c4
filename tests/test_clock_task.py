"""The clock task: painted sets and folders of labelled pictures, their splits, faults, seeds and real samples."""

import dataclasses
import hashlib
import io
import json
import os
import time
from pathlib import Path

import pytest
from PIL import Image

from train.clock_time import parse_time
from train.exits import DataError, UsageError
from train.graders import GRADERS
from train.image_files import read_image
from train.metrics import score
from train.overlap import overlap, prompts_of
from train.tasks import TASKS, prepared
from train.tasks.clock import DIAL_SETS, DialSet, generate_dials, make_source
from train.tasks.clock_files import find_photos, read_time
from train.tasks.painted import split_of_picture

FEW = {"train": 160, "test": 30}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def png(color=(10, 20, 30), size=(8, 8)):
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, "PNG")
    return stream.getvalue()


def examples(source):
    return [source[index] for index in range(len(source))]


@pytest.mark.parametrize("variant", ["upright", "hard"])
def test_rendered_sets_are_png_files_with_times(variant):
    train, test = (examples(make_source(split, variant=variant, examples=FEW)) for split in ("train", "test"))
    assert (len(train), len(test)) == (160, 30)
    for example in (*train, *test):
        image = read_image(example.image)
        assert image.size == (48, 48) and example.prompt == "Time?\n"
        assert split_of_picture(image.tobytes()) == example.key.partition("-")[0]
        minutes = parse_time(example.answer)
        assert minutes is not None and (variant == "hard" or minutes % 5 == 0)
    # A round holds every time once, so few examples hold many times.
    assert len({example.answer for example in train}) == (144 if variant == "upright" else 160)
    assert not overlap(prompts_of(train), prompts_of(test)).shared_test_rows
    assert overlap(prompts_of(train), prompts_of(train)).repeated_test_rows == 0


def test_seed_split_and_index_alone_decide_a_dial():
    dials = dataclasses.replace(DIAL_SETS["hard"], examples={"train": 20, "test": 5})
    first, again, other = (list(generate_dials(dials, split="train", seed=seed)) for seed in (0, 0, 1))
    assert first == again and not {row["image"] for row in first} & {row["image"] for row in other}
    longer = dataclasses.replace(dials, examples={"train": 40, "test": 5})
    assert list(generate_dials(longer, split="train", seed=0))[:20] == first


def test_the_scarce_set_is_the_beginning_of_the_upright_one():
    assert DIAL_SETS["scarce"].examples == {"train": 2_000, "test": 1_440}
    rows = [
        list(generate_dials(dataclasses.replace(DIAL_SETS[name], examples={"train": 5}), split="train", seed=0))
        for name in ("scarce", "upright")
    ]
    assert rows[0] == rows[1]


def test_times_come_in_rounds_in_another_order_each():
    dials = DialSet(family="plain", step=5, size=8, examples={"train": 288})
    times = [record["time"] for record in generate_dials(dials, split="train", seed=0)]
    assert len(set(times[:144])) == len(set(times[144:])) == 144 and times[:144] != times[144:]


def test_fingerprints_tell_seeds_variants_and_forms_apart():
    prints = [
        make_source("train", variant=variant, seed=seed, examples={"train": 3, "test": 1}).fingerprint
        for variant, seed in [("upright", 0), ("upright", 1), ("hard", 0), ("upright_chat", 0), ("upright", 0)]
    ]
    assert len(set(prints)) == 4 and prints[0] == prints[4]
    chat = make_source("test", variant="hard_chat", examples={"train": 3, "test": 1})
    assert chat[0].prompt == "What time does the clock show? Answer as H:MM."


def test_a_thousand_small_dials_take_a_second_or_so():
    dials = dataclasses.replace(DIAL_SETS["upright"], examples={"train": 300})
    next(generate_dials(dials, split="train", seed=0))
    began = time.process_time()
    list(generate_dials(dials, split="train", seed=0))
    # Measured 0.15 s of processor time; the bound leaves room for a slow machine.
    assert time.process_time() - began < 1.5


def test_painting_that_takes_long_is_said_once(monkeypatch, capfd):
    make_source("train", examples={"train": 3, "test": 1})
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(prepared, "_PATIENCE_SECONDS", 0.0)
    make_source("train", examples={"train": 30, "test": 2})
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("preparing upright-seed0-") and err.count("\n") == 1


def test_unknown_splits_and_variants_are_refused():
    with pytest.raises(UsageError, match="known splits: train, test"):
        make_source("valid")
    with pytest.raises(UsageError, match="known variants: upright, hard, scarce, folder"):
        make_source("train", variant="easy")


def test_options_go_where_they_have_a_use():
    task = TASKS["clock"]
    assert task.has_option("data_seed", "hard_chat") and not task.has_option("data_seed", "folder")
    assert task.has_option("max_bad_lines", "folder") and not task.has_option("max_bad_lines", "")
    assert task.takes_files("folder_chat") and not task.takes_files("") and task.is_chat("upright_chat")


def make_folder(place, rows):
    for name, content in rows.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return place


def test_a_folder_of_folders_named_by_time(tmp_path):
    same = png((1, 1, 1))
    place = make_folder(tmp_path / "time", {
        "train/1-00/18.png": png((1, 2, 3)), "train/12_55/a.JPG": png((3, 2, 1)), "train/3-60/x.png": png(),
        "train/noon/x.png": png(), "train/9-05/broken.png": b"\x89PNG\r\n\x1a\n", "train/9-05/text.png": b"hello there",
        "train/9-05/same.png": same, "train/notes.txt": b"not a picture", "valid/2-00/v.png": png((9, 9, 9)),
        "test/2-35/b.png": same, "test/2-35/c.png": png((4, 5, 6)),
    })  # fmt: skip
    train, test = (make_source(split, data_dir=str(place), variant="folder") for split in ("train", "test"))
    assert [(e.key, e.answer) for e in examples(train)] == [
        ("train/1-00/18.png", "1:00"), ("train/12_55/a.JPG", "12:55")
    ]  # fmt: skip
    assert train[0].image == png((1, 2, 3)) and train[0].prompt == "Time?\n"
    assert [e.answer for e in examples(test)] == ["2:35", "2:35"] and test.notes == ()
    [note] = train.notes
    assert note.startswith(
        "time: 5 of 7 pictures are left out: no single time (2: pictures train/3-60/x.png, train/noon/x.png); "
    )
    for words in (
        "picture of the test split (1: picture train/9-05/same.png)",
        "truncated or broken image (1: picture train/9-05/broken.png)",
        "no image of a known format (1: picture train/9-05/text.png)",
    ):
        assert words in note
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    again = make_source("train", data_dir=str(place), variant="folder")
    assert (again.notes, again.fingerprint) == (train.notes, train.fingerprint)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    with pytest.raises(DataError, match=r"5 of 7 pictures are left out.*At most 4 may be bad"):
        make_source("train", data_dir=str(place), variant="folder", max_bad_lines=4)
    assert len(make_source("train", data_dir=str(place), variant="folder", max_bad_lines=5)) == 2
    (place / "train/1-00/18.png").write_bytes(png((1, 2, 4)))
    assert make_source("train", data_dir=str(place), variant="folder").fingerprint != train.fingerprint


def test_a_folder_with_a_file_of_labels(tmp_path):
    rows = [
        {"file": "a.png", "hour": 15, "minute": 5, "split": "train"}, {"file": "b.png", "time": "0:30"},
        {"file": "c.png", "hour": 3, "minute": [4, 5]}, {"file": "d.png", "valid": False},
        {"file": "none.png", "time": "1:00"}, {"file": "b\0.png", "time": "1:00"}, ["x"], {"hour": 3, "minute": 4},
        {"file": "a.png", "hour": True, "minute": 0}, {"file": "a.png", "time": "1:00", "split": "valid"},
    ]  # fmt: skip
    place = make_folder(
        tmp_path / "own", {"a.png": png((1, 1, 1)), "b.png": png((2, 2, 2)), "c.png": png(), "d.png": png()}
    )
    lines = [*map(json.dumps, rows), "{", ""]
    (place / "labels.jsonl").write_text("\n".join(lines))
    train, test = (make_source(split, data_dir=str(place), variant="folder") for split in ("train", "test"))
    assert [(e.key, e.answer) for e in examples(train)] == [("a.png", "3:05")]
    assert [(e.key, e.answer) for e in examples(test)] == [("b.png", "12:30")]
    [note] = test.notes
    assert note.startswith("own: 8 of 9 pictures are left out: ")
    for words in (
        "no single time (3: pictures c.png, d.png, a.png)",
        "not readable (2:",
        "(3: pictures line 7, line 8",
    ):
        assert words in note
    assert len(make_source("test", data_dir=str(place / "labels.jsonl"), variant="folder")) == 1


def test_nothing_of_a_folder_is_passed_over_in_silence(tmp_path):
    rows = [
        {"file": "a.png", "time": "1:00"}, {"file": "b.png", "time": "2:00", "split": "Train"},
        {"file": "c.png", "time": "3:00", "split": ["train"]}, {"file": "d.png", "time": "4:00"},
        {"file": "./d.png", "time": "5:00"}, {"file": "a.png", "time": "1:00"},
    ]  # fmt: skip
    labelled = make_folder(tmp_path / "own", {f"{name}.png": png((ord(name),) * 3) for name in "abcd"})
    (labelled / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = make_source("test", data_dir=str(labelled), variant="folder")
    assert [(e.key, e.answer) for e in examples(source)] == [("a.png", "1:00")]
    [note] = source.notes
    for words in (
        "5 of 6 pictures are left out", "split is none of train, test, val, valid, validation, dev (2: pictures b.png,",
        "listed with different times (2: pictures d.png, ./d.png)", "listed a second time (1: picture a.png)",
    ):  # fmt: skip
        assert words in note, note
    with pytest.raises(DataError, match="At most 0 may be bad"):
        make_source("test", data_dir=str(labelled), variant="folder", max_bad_lines=0)
    files = {"train/3-05/b.tif": b"II*\0", "train/3-05/c": b"?", "train/3-05/.hidden": b"x", "train/list.txt": b"x"}
    folders = make_folder(tmp_path / "folders", {"train/3-05/a.png": png((1, 2, 3)), **files})
    [note] = make_source("train", data_dir=str(folders), variant="folder").notes
    assert "2 of 3 pictures are left out: no image of a known format (2: pictures train/3-05/b.tif, train" in note


def test_a_place_without_pictures_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    for data_dir in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match=r"has no pictures: --data_dir is a folder with labels.jsonl"):
            make_source("train", data_dir=str(data_dir), variant="folder")
    with pytest.raises(DataError, match="give --data_dir=FOLDER"):
        make_source("train", variant="folder")
    make_folder(tmp_path, {"train/1-00/a.png": b"text"})
    with pytest.raises(DataError, match=r"no good picture for split train. .*no image of a known format"):
        make_source("train", data_dir=str(tmp_path), variant="folder")
    with pytest.raises(DataError, match="no good picture for split test"):
        make_source("test", data_dir=str(tmp_path), variant="folder")


@pytest.mark.parametrize(
    ("row", "time"),
    [
        ({"hour": 0, "minute": 5}, "12:05"), ({"hour": 23, "minute": 59}, "11:59"), ({"hour": 24, "minute": 0}, None),
        ({"hour": 1, "minute": 60}, None), ({"hour": 1.0, "minute": 0}, None), ({"hour": "1", "minute": "00"}, None),
        ({"time": "9:5"}, None), ({"time": "10:10:10"}, None), ({"time": 900}, None), ({}, None),
    ],
)  # fmt: skip
def test_labels_that_are_times_and_labels_that_are_none(row, time):
    assert read_time(row) == time


def samples(name):
    folder = os.environ.get("SMMD_DATA_DIR")
    if not folder or not (Path(folder) / name).exists():
        pytest.skip(f"no SMMD_DATA_DIR with {name}")
    return Path(folder) / name


@pytest.mark.realdata
def test_real_photos_are_read_and_gold_scores_all():
    place = samples("clocks_sample")
    splits = {split: make_source(split, data_dir=str(place), variant="folder") for split in ("train", "test")}
    assert {split: len(source) for split, source in splits.items()} == {"train": 204, "test": 199}
    for source in splits.values():
        assert source.notes == ()
        found = examples(source)
        assert {read_image(example.image).size for example in found} == {(224, 224)}
        metrics = score([GRADERS["clock"](example.answer, example.answer) for example in found])
        assert (metrics.accuracy, metrics.parse_failures, metrics.time_gap) == (1.0, 0, 0.0)
    assert not overlap(prompts_of(splits["train"]), prompts_of(splits["test"])).shared_test_rows
    # The same pictures in the layout of the whole set.
    rows = [json.loads(line) for line in (place / "labels.jsonl").read_text().splitlines()]
    assert {photo.time for photo in find_photos(place)} == {row["time"] for row in rows}


@pytest.mark.realdata
def test_impossible_times_of_a_real_set_are_counted_and_left_out():
    source = make_source("test", data_dir=str(samples("clocks_sample") / "clockbench_labels.jsonl"), variant="folder")
    [note] = source.notes
    assert len(source) + int(note.split(": ")[1].split(" of ")[0]) == 7 and "no single time" in note
    for example in examples(source):
        corner = read_image(example.image).getpixel((0, 0))
        assert corner == (255, 255, 255), "transparent corners lie on white"
    assert len({hashlib.sha256(example.image).digest() for example in examples(source)}) == len(source)
