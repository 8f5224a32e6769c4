"""A user's own JSON lines: every kind of bad line counted with its number, limits, strict mode, splits, images."""

import io
import json
import struct
import zlib

import pytest
from PIL import Image

from train.config import make_config
from train.exits import DataError
from train.main import TABLES
from train.overlap import overlap, prompts_of
from train.splits import open_split
from train.tasks.json_lines import MAX_LINE_BYTES, JsonLines, split_of
from train.tasks.jsonl import make_source


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "own"
    path.mkdir()
    return path


def write(folder, *, train=(), test=()):
    for name, rows in (("train", train), ("test", test)):
        lines = [row if isinstance(row, (bytes, str)) else json.dumps(row) for row in rows]
        data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        (folder / f"{name}.jsonl").write_bytes(data)


def pairs(source):
    return [(source[index].prompt, source[index].answer) for index in range(len(source))]


GOOD = {"question": "2 + 2?", "answer": "4"}
BAD = [
    ("not UTF-8", b'{"question": "\xff", "answer": "1"}'),
    ("not JSON", "{"),
    ("not JSON", '{"question": "a", "answer": "1"} x'),
    ("not JSON", "[" * 100_000),
    ("not an object", "[1, 2]"),
    ("not an object", '"text"'),
    ("no prompt or question", {"answer": "4"}),
    ("both prompt and question", {"prompt": "a", "question": "a", "answer": "4"}),
    ("prompt is no text, or empty", {"prompt": 5, "answer": "4"}),
    ("question is no text, or empty", {"question": " ", "answer": "4"}),
    ("no answer", {"question": "a"}),
    ("answer is neither text nor number, or empty", {"question": "a", "answer": None}),
    ("answer is neither text nor number, or empty", {"question": "a", "answer": True}),
    ("answer is neither text nor number, or empty", {"question": "a", "answer": ["4"]}),
    ("answer is neither text nor number, or empty", {"question": "a", "answer": ""}),
    ("answer is neither text nor number, or empty", '{"question": "a", "answer": NaN}'),
    ("half a surrogate pair", '{"question": "\\ud800", "answer": "4"}'),
    ("longer than 1,048,576 bytes", json.dumps({"question": "a" * (MAX_LINE_BYTES + 1), "answer": "4"})),
    ("image is no path", {"question": "a", "answer": "4", "image": 3}),
    ("image file is missing or not readable", {"question": "a", "answer": "4", "image": "none.png"}),
    ("image file is missing or not readable", {"question": "a", "answer": "4", "image": "a\0b"}),
    ("question of the test split", {"question": "HELD  out?", "answer": "4"}),
]


@pytest.mark.parametrize(("reason", "line"), BAD)
def test_a_bad_line_is_counted_by_reason_and_number(folder, reason, line):
    write(folder, train=[GOOD, line, GOOD], test=[{"question": "held out?", "answer": "1"}])
    source = make_source("train", data_dir=str(folder))
    assert len(source) == 2
    assert source.notes == (f"train.jsonl: 1 of 3 lines are left out: {reason} (1: line 2).",)
    with pytest.raises(DataError, match="1 of 3 lines are left out") as refused:
        make_source("train", data_dir=str(folder), variant="plain_strict")
    assert refused.value.exit_code == 3 and reason in str(refused.value) and "line 2" in str(refused.value)


def test_all_bad_lines_together(folder):
    rows = [line for _, line in BAD]
    write(folder, train=[*rows, GOOD, *(["{"] * 20)], test=[{"question": "held out?", "answer": "1"}])
    [note] = make_source("train", data_dir=str(folder)).notes
    assert note.startswith("train.jsonl: 42 of 43 lines are left out: not JSON (23: lines 2, 3, 4, 24, 25, ...); ")
    # The report is kept beside the prepared data: a second start tells the same.
    assert make_source("train", data_dir=str(folder)).notes == (note,)


def test_prompts_are_taken_as_they_are_and_questions_get_the_fixed_prompt(folder):
    write(folder, train=[{"prompt": "  7 = \t", "answer": " 7 ", "extra": 1}, GOOD, "", "  "])
    source = make_source("train", data_dir=str(folder))
    assert pairs(source) == [("  7 = \t", " 7 "), ("Question: 2 + 2?\nAnswer:\n", "4")]
    assert source.notes == () and source[1].key == "train.jsonl-2"
    assert pairs(make_source("train", data_dir=str(folder), variant="chat")) == [("  7 = \t", " 7 "), ("2 + 2?", "4")]


@pytest.mark.parametrize("answer", ["51.0", "1e3", "-0.50", "123456789012345678901234567890", "9" * 5000])
def test_answers_that_are_numbers_keep_their_digits(folder, answer):
    write(folder, train=[f'{{"question": "a", "answer": {answer}}}'])
    assert make_source("train", data_dir=str(folder))[0].answer == answer


def test_byte_order_mark_and_carriage_returns_are_no_fault(folder):
    line = json.dumps(GOOD).encode()
    (folder / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n" + line)
    source = make_source("train", data_dir=str(folder), variant="plain_strict")
    assert len(source) == 2 and not source.notes


def test_limits(folder):
    write(folder, train=[GOOD, "{", *({"question": f"{n}?", "answer": n} for n in range(9))])
    source = make_source("train", data_dir=str(folder), limit=3)
    assert [answer for _, answer in pairs(source)] == ["4", "0", "1"]
    assert source.fingerprint != make_source("train", data_dir=str(folder)).fingerprint
    assert len(make_source("train", data_dir=str(folder), max_bad_lines=1)) == 10
    with pytest.raises(DataError, match="At most 0 may be bad"):
        make_source("train", data_dir=str(folder), max_bad_lines=0)
    with pytest.raises(ValueError, match="limit must be at least 1"):
        make_source("train", data_dir=str(folder), limit=0)


def test_one_file_is_split_by_question(tmp_path):
    path = tmp_path / "all.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(400)]
    path.write_text("\n".join(json.dumps(row) for row in [*rows, *rows]))
    train, test = (pairs(make_source(split, data_dir=str(path))) for split in ("train", "test"))
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in test}
    assert len(train) + len(test) == 800 and 10 < len(test) < 100
    assert all(split_of(prompt[10:-9]) == "test" for prompt, _ in test)


def png(level=0):
    stream = io.BytesIO()
    Image.new("L", (4, 3), level).save(stream, "PNG")
    return stream.getvalue()


def images(folder, **contents):
    (folder / "pictures").mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / "pictures" / f"{name}.png").write_bytes(content)
    return {name: f"pictures/{name}.png" for name in contents}


def test_images_come_with_their_bytes_and_decide_the_fingerprint(folder):
    place = images(folder, a=png(1))["a"]
    write(folder, train=[{"question": "a", "answer": "4", "image": place}, GOOD])
    source = make_source("train", data_dir=str(folder))
    assert (source[0].image, source[1].image) == (png(1), None)
    fingerprint = source.fingerprint
    images(folder, a=png(2))
    again = make_source("train", data_dir=str(folder))
    assert again[0].image == png(2) and again.fingerprint != fingerprint


def test_images_that_nobody_can_see_are_counted_by_their_fault(folder):
    header = png()[12:16] + b"\0\0\x40\0" * 2 + png()[24:29]  # 16,384 pixels square
    large = png()[:12] + header + struct.pack(">I", zlib.crc32(header)) + png()[33:]
    faults = {
        "empty image": b"", "no image of a known format": b"text with the name of a picture",
        "truncated or broken image": png()[:40], "too many pixels": large,
    }  # fmt: skip
    places = images(folder, good=png(), **{f"bad{index}": data for index, data in enumerate(faults.values())})
    rows = [{"question": "Which?", "answer": "4", "image": place} for place in places.values()]
    write(folder, train=rows)
    source = make_source("train", data_dir=str(folder))
    [note] = source.notes
    assert len(source) == 1 and note.startswith("train.jsonl: 4 of 5 lines are left out: ")
    assert all(f"{reason} (1: line {line})" in note for line, reason in enumerate(faults, 2))
    with pytest.raises(DataError, match=r"At most 0 may be bad"):
        make_source("train", data_dir=str(folder), variant="plain_strict")
    with pytest.raises(DataError, match=r"At most 3 may be bad"):
        make_source("train", data_dir=str(folder), max_bad_lines=3)
    # A picture that was mended is seen at the next start.
    images(folder, bad0=png(7))
    assert len(make_source("train", data_dir=str(folder), max_bad_lines=3)) == 2


def test_one_question_about_two_pictures_is_two_questions(folder):
    places = images(folder, a=png(1), b=png(2), c=png(1))
    ask = lambda name: {"question": "What time is it?", "answer": name, "image": places[name]}
    write(folder, train=[ask("a"), ask("b"), {"question": "What time is it?", "answer": "c"}], test=[ask("c")])
    source = make_source("train", data_dir=str(folder))
    # "a" and "c" are the same picture under two names.
    assert [answer for _, answer in pairs(source)] == ["b", "c"]
    assert source.notes == ("train.jsonl: 1 of 3 lines are left out: question of the test split (1: line 1).",)


def test_one_file_of_images_is_split_by_question_and_picture(folder):
    places = images(folder, **{f"p{level}": png(level) for level in range(200)})
    path = folder / "all.jsonl"
    rows = [{"question": "Which?", "answer": "4", "image": place} for place in places.values()]
    path.write_text("\n".join(map(json.dumps, rows)))
    sizes = {split: len(make_source(split, data_dir=str(path))) for split in ("train", "test")}
    assert sum(sizes.values()) == 200 and 2 < sizes["test"] < 40
    train, test = (make_source(split, data_dir=str(path)) for split in ("train", "test"))
    assert not overlap(prompts_of(train), prompts_of(test)).shared_test_rows
    assert overlap(prompts_of(train), prompts_of(train)).repeated_test_rows == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"split": "dev"}, ValueError, "known splits: train, test"),
        ({"split": "train", "variant": "x"}, ValueError, "known variants: plain, plain_strict, chat"),
        ({"split": "test"}, DataError, r"test.jsonl is missing"),
        ({"split": "train", "data_dir": None}, DataError, "give --data_dir=FOLDER"),
    ],
)
def test_what_cannot_be_opened(folder, arguments, error, message):
    (folder / "train.jsonl").write_text(json.dumps(GOOD))
    with pytest.raises(error, match=message):
        make_source(**{"data_dir": str(folder)} | arguments)


@pytest.mark.parametrize("text", ["", "\n\n", "{\n"])
def test_a_file_without_a_good_line_is_refused(folder, text):
    (folder / "train.jsonl").write_text(text)
    with pytest.raises(DataError, match="has no good line for split train"):
        make_source("train", data_dir=str(folder))


def test_lines_of_any_length_are_read_in_bounded_memory(folder):
    path = folder / "train.jsonl"
    with open(path, "wb") as stream:
        stream.write(b'{"question": "' + b"a" * (5 * MAX_LINE_BYTES) + b'"}\n' + json.dumps(GOOD).encode() + b"\n")
        stream.write(b"a" * (3 * MAX_LINE_BYTES))
    lines = JsonLines(path=path, split="train")
    assert [record["line"] for record in lines()] == ["2"]
    assert lines.bad == {"longer than 1,048,576 bytes": [1, 3]}


def test_a_run_without_a_folder_is_told_which_flag_to_give():
    config = make_config({"task": "jsonl"}, tables=TABLES)
    with pytest.raises(DataError, match="give --data_dir=FOLDER with train"):
        open_split(config, "train")
