"""The sheet of pictures: which are chosen, what stands above them, and that a run without pictures has none."""

import io

import pytest
from PIL import Image

from train.log import write_jsonl
from train.picture_sheet import caption, draw_picture_sheet, write_picture_sheet
from train.tasks.base import Example


def png(level):
    stream = io.BytesIO()
    Image.new("L", (12, 9), level).save(stream, "PNG")
    return stream.getvalue()


def example(key, image):
    return Example(key=key, prompt="Time?\n", answer="3:00", image=image)


def row(key, prediction="3:00"):
    return {"key": key, "prediction": prediction, "answer": "3:00", "correct": prediction == "3:00"}


def titles(figure):
    return [axes.get_title() for axes in figure.axes if axes.images]


def test_wrong_answers_come_first_with_the_true_one_and_the_same_records_give_the_same_bytes(tmp_path):
    write_jsonl(tmp_path / "predictions" / "5.jsonl", [row("a"), row("b", "4:00"), row("text"), row("c", "noon")])
    examples = [example("a", png(0)), example("b", png(100)), example("c", png(200)), example("text", None)]
    path = write_picture_sheet(tmp_path, "clock", examples)
    assert path == tmp_path / "plots" / "clock_examples.png"
    with Image.open(path) as sheet:
        assert sheet.size == (1080, 210)
    first = path.read_bytes()
    assert write_picture_sheet(tmp_path, "clock", reversed(examples)).read_bytes() == first
    rows = [row("a"), row("b", "4:00"), row("c", "noon")]
    figure = draw_picture_sheet(rows, {name: png(0) for name in "abc"})
    assert titles(figure) == ["4:00 (true 3:00)", "noon (true 3:00)", "3:00"]


def test_no_more_than_a_sheet_full_is_drawn_half_of_it_wrong():
    rows = [row(f"w{index}", "1:00") for index in range(40)] + [row(f"r{index}") for index in range(40)]
    found = titles(draw_picture_sheet(rows, {entry["key"]: png(9) for entry in rows}))
    assert (len(found), found.count("3:00")) == (24, 12)


def test_without_pictures_there_is_no_sheet_and_an_old_one_goes(tmp_path):
    write_jsonl(tmp_path / "predictions" / "5.jsonl", [row("a")])
    assert write_picture_sheet(tmp_path, "clock", [example("a", png(0))]).exists()
    assert write_picture_sheet(tmp_path, "clock", [example("a", None)]) is None
    assert not list((tmp_path / "plots").iterdir())
    assert write_picture_sheet(tmp_path / "none", "arith", []) is None
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("prediction", "shown"),
    [("$x^$", r"\$x^\$ (true 3:00)"), ("9" * 99, "9" * 24 + "... (true 3:00)"), ("a\n\u202e", "a?? (true 3:00)")],
)
def test_whatever_was_answered_can_be_drawn(prediction, shown):
    assert caption(row("a", prediction)) == shown
    figure = draw_picture_sheet([row("a", prediction)], {"a": b"changed since"})
    figure.canvas.draw()
    assert titles(figure) == [shown]
