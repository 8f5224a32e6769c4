"""The chart task: painted charts, the published layout with its faults, splits that share nothing, real samples."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from train.exits import DataError, UsageError
from train.graders import GRADERS
from train.image_files import read_image
from train.metrics import score
from train.overlap import overlap, prompts_of
from train.tasks import TASKS
from train.tasks.chartqa import ChartSet, generate_questions, make_source
from train.tasks.chartqa_files import find_split
from train.tasks.painted import split_of_picture

FEW = {"train": 20, "test": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def png(level):
    stream = io.BytesIO()
    Image.new("L", (8, 8), level).save(stream, "PNG")
    return stream.getvalue()


def examples(source):
    return [source[index] for index in range(len(source))]


def test_painted_charts_have_short_questions_and_answers():
    train, test = (examples(make_source(split, examples=FEW)) for split in ("train", "test"))
    assert (len(train), len(test)) == (60, 24)
    for example in (*train, *test):
        image = read_image(example.image)
        assert image.size == (96, 96)
        assert split_of_picture(image.tobytes()) == example.key.partition("-")[0]
        assert example.prompt.endswith("?\n") and len(example.prompt) <= 20 and len(example.answer) <= 3
        assert GRADERS["chartqa"](example.answer, example.answer).correct
    assert train[0].image == train[1].image == train[2].image != train[3].image
    assert len({example.prompt for example in train[:3]}) == 3
    assert not {example.image for example in train} & {example.image for example in test}
    assert make_source("test", variant="generated_chat", examples=FEW)[0].prompt == test[0].prompt.strip()


def test_seed_split_and_chart_alone_decide_the_questions():
    small, large = (ChartSet(size=96, questions=2, charts={"train": count}) for count in (4, 6))
    first, longer, other = (
        list(generate_questions(charts, split="train", seed=seed))
        for charts, seed in [(small, 0), (large, 0), (small, 1)]
    )
    assert longer[:8] == first and not {row["image"] for row in first} & {row["image"] for row in other}
    prints = {make_source("train", examples=FEW, seed=seed).fingerprint for seed in (0, 1)}
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("split", "variant", "words"),
    [
        ("val", "generated", "known splits of variant generated: train, test"),
        ("dev", "published", "known splits of variant published: train, val, test"),
        ("train", "bars", "known variants: generated, published, human, augmented, numeric"),
    ],
)
def test_unknown_splits_and_variants_are_refused(split, variant, words):
    with pytest.raises(UsageError, match=words):
        make_source(split, variant=variant)


def write(place, pictures=(), **files):
    """A folder of a split: pictures by name, and files of questions by name."""
    for folder in ("png", "tables"):
        (place / folder).mkdir(parents=True, exist_ok=True)
    for name, content in dict(pictures).items():
        (place / "png" / name).write_bytes(content)
    for name, rows in files.items():
        (place / f"{name}.json").write_text(rows if isinstance(rows, str) else json.dumps(rows))


def ask(imgname, query="How many?", label="4"):
    return {"imgname": imgname, "query": query, "label": label}


@pytest.fixture
def published(tmp_path):
    place = tmp_path / "ChartQA Dataset"
    human = [ask("a.png"), ask("a.png", "Which?", "Yes")]
    augmented = [ask("b.png", label="0.31")]
    write(place / "train", {"a.png": png(1), "b.png": png(2)}, train_human=human, train_augmented=augmented)
    write(place / "val", {"v.png": png(3)}, val_human=[ask("v.png")], val_augmented=[])
    write(place / "test", {"t.png": png(4)}, test_human=[ask("t.png", label="[2003, 2009]")],
          test_augmented=[ask("t.png", "What?", ["12%"])])  # fmt: skip
    (place / "train" / "tables" / "a.csv").write_text("x,y\n1,nan\n")
    return tmp_path


def test_the_published_folder_is_read_as_it_stands(published):
    for place in (published, published / "ChartQA Dataset"):
        sources = {
            split: make_source(split, data_dir=str(place), variant="published") for split in ("train", "val", "test")
        }
        assert {split: len(source) for split, source in sources.items()} == {"train": 3, "val": 1, "test": 2}
    [first, second, third] = examples(sources["train"])
    assert (first.prompt, first.answer, first.image) == ("How many?\n", "4", png(1))
    assert (first.key, second.key, third.key) == ("a.png#1", "a.png#2", "b.png#1")
    assert [example.answer for example in examples(sources["test"])] == ["[2003, 2009]", "12%"]
    assert find_split(published, "train")[0].name == "train"


@pytest.mark.parametrize(
    ("variant", "answers"),
    [("human", ["4", "Yes"]), ("augmented", ["0.31"]), ("numeric", ["4", "0.31"]), ("numeric_chat", ["4", "0.31"])],
)
def test_variants_choose_questions(published, variant, answers):
    source = make_source("train", data_dir=str(published), variant=variant)
    assert [example.answer for example in examples(source)] == answers and source.notes == ()


def test_a_missing_file_of_questions_is_said(published):
    (published / "ChartQA Dataset" / "test" / "test_augmented.json").unlink()
    source = make_source("test", data_dir=str(published), variant="published")
    assert len(source) == 1
    [note] = source.notes
    assert note == f"{published.name}: test_augmented.json is missing, so its questions are not in split test."
    assert make_source("test", data_dir=str(published), variant="human").notes == ()


def test_questions_that_cannot_be_used_are_counted_by_reason(published):
    place = published / "ChartQA Dataset" / "train"
    bad = [
        ask("none.png"), ask("a\0.png"), ask("text.png"), ask("cut.png"), ask("a.png", ""),
        ask("a.png", label=["a", "b"]), ask("a.png", label=None), ["list"], "text", ask("v2.png"),
        ask("v2.png", "Which?"),
    ]  # fmt: skip
    write(place, {"text.png": b"words", "cut.png": png(9)[:30], "v2.png": png(3)}, train_human=[ask("a.png"), *bad])
    source = make_source("train", data_dir=str(published), variant="published")
    assert len(source) == 3
    [note] = source.notes
    assert note.startswith(f"{published.name}: 10 of 13 questions are left out: no texts imgname, query and label (5: ")
    for words in ("image file is missing or not readable (2: questions human 1, human 2)",
                  "no image of a known format (1: question human 3)", "truncated or broken image (1: question human 4)",
                  "question of another split (1: question human 10)"):  # fmt: skip
        assert words in note
    with pytest.raises(DataError, match=r"10 of 13 questions .* At most 0 may be bad"):
        make_source("train", data_dir=str(published), variant="published", max_bad_lines=0)
    train, val = (make_source(split, data_dir=str(published), variant="published") for split in ("train", "val"))
    assert not overlap(prompts_of(train), prompts_of(val)).shared_test_rows


def test_nothing_is_written_beside_the_files_and_a_changed_picture_is_seen(published):
    before = {path: path.read_bytes() for path in published.rglob("*") if path.is_file()}
    fingerprint = make_source("train", data_dir=str(published), variant="published").fingerprint
    now = {path: path.read_bytes() for path in published.rglob("*") if path.is_file() and "cache" not in path.parts}
    assert now == before
    (published / "ChartQA Dataset" / "train" / "png" / "a.png").write_bytes(png(7))
    assert make_source("train", data_dir=str(published), variant="published").fingerprint != fingerprint


@pytest.mark.parametrize("content", ["{", "{}", "[" * 100_000])
def test_a_file_of_questions_that_is_none_is_refused(published, content):
    write(published / "ChartQA Dataset" / "train", train_human=content)
    with pytest.raises(DataError, match=r"train_human.json(:| is not)"):
        make_source("train", data_dir=str(published), variant="human")


def test_a_folder_without_the_split_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no train_human.json or train_augmented.json for split train"):
        make_source("train", data_dir=str(tmp_path), variant="published")
    with pytest.raises(DataError, match="give --data_dir=FOLDER"):
        make_source("train", variant="numeric")


def test_options_go_where_they_have_a_use():
    task = TASKS["chartqa"]
    assert task.has_option("data_seed", "") and not task.has_option("data_seed", "human")
    assert task.has_option("max_bad_lines", "numeric_chat") and not task.has_option("max_bad_lines", "generated")


def sample():
    folder = Path(os.environ.get("SMMD_DATA_DIR", "")) / "chartqa_sample"
    if not os.environ.get("SMMD_DATA_DIR") or not folder.exists():
        pytest.skip("no SMMD_DATA_DIR with chartqa_sample")
    return folder


@pytest.mark.realdata
@pytest.mark.parametrize("grader", [name for name in GRADERS if name.startswith("chartqa")])
def test_real_charts_are_read_and_gold_scores_all(grader):
    source = make_source("test", data_dir=str(sample()), variant="published")
    assert (len(source), source.notes) == (59, ())
    found = examples(source)
    sizes = [read_image(example.image).size for example in found]
    assert min(width for width, _ in sizes) >= 309 and max(width for width, _ in sizes) <= 858
    metrics = score([GRADERS[grader](example.answer, example.answer) for example in found])
    assert metrics.accuracy == 1.0
    assert overlap(prompts_of(source), prompts_of(source)).repeated_test_rows == 0


@pytest.mark.realdata
def test_the_views_of_the_real_sample_add_up():
    sizes = {
        variant: len(make_source("test", data_dir=str(sample()), variant=variant))
        for variant in ("human", "augmented", "numeric")
    }
    assert sizes["human"] == 34 and sizes["augmented"] == 25 and 20 < sizes["numeric"] < 59


@pytest.mark.realdata
def test_a_real_question_of_the_test_never_trains(tmp_path):
    """The sample under the name of the training split, beside itself: every question is in both."""
    place = tmp_path / "both"
    shutil.copytree(sample(), place)
    for source in ("human", "augmented"):
        shutil.copy(place / f"test_{source}.json", place / f"train_{source}.json")
    with pytest.raises(DataError, match=r"59 of 59 questions are left out: question of another split"):
        make_source("train", data_dir=str(place), variant="published")
