"""GSM8K and SVAMP: reading, prompts, splits, fingerprints, downloads; on made-up files and on the published ones."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from train.exits import DataError
from train.graders import GRADERS
from train.overlap import overlap, prompts_of
from train.tasks import TASKS, gsm8k, published, svamp
from train.tasks.questions import check_disjoint, make_prompt

GSM8K_ROWS = {
    "train": [
        {"question": f"Ann has {n} pens and buys {n} more. How many?",
         "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
        for n in range(1, 6)
    ],
    "test": [
        {"question": "Bo’s 3,000 cards are lost. How many are left {of} them?",
         "answer": "3,000-3,000=<<3000-3000=0>>0\n#### 0"},
        {"question": "Cy owes $3. What has he?", "answer": "Less than nothing.\n#### -3"},
    ],
}  # fmt: skip
SVAMP_ROWS = [
    {"ID": "chal-1", "Body": "A pack costs 76 dollars. There is a discount of 25 dollars on each pack",
     "Question": "What do you pay?", "Equation": "( 76.0 - 25.0 )", "Answer": 51.0, "Type": "Subtraction"},
    {"ID": "chal-2", "Body": "Di had 4 nuts and ate 1.5.", "Question": "How many has she?",
     "Equation": "( 4.0 - 1.5 )", "Answer": 2.5, "Type": "Subtraction"},
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "smmd_jax" / "data"


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "published"
    (folder / "gsm8k").mkdir(parents=True)
    for split, rows in GSM8K_ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "gsm8k" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    (folder / "svamp").mkdir()
    (folder / "svamp" / "SVAMP.json").write_text(json.dumps(SVAMP_ROWS), encoding="utf-8")
    return folder


def examples(source):
    return [source[index] for index in range(len(source))]


def test_gsm8k_examples_are_the_published_text_in_the_fixed_prompt(files):
    source = gsm8k.make_source("test", data_dir=str(files))
    row = GSM8K_ROWS["test"][0]
    assert len(source) == 2
    assert source[0].prompt == f"Question: {row['question']}\nAnswer:\n"
    assert source[0].answer == row["answer"]
    assert [example.key for example in examples(source)] == ["test-0", "test-1"]
    assert source.__getitems__([1, 0]) == [source[1], source[0]]


@pytest.mark.parametrize(
    ("variant", "prompt", "answer"),
    [
        ("plain", "Question: {}\nAnswer:\n", "1+1=<<1+1=2>>2\n#### 2"),
        ("plain_stripped", "Question: {}\nAnswer:\n", "1+1=2\n#### 2"),
        ("chat", "{}", "1+1=<<1+1=2>>2\n#### 2"),
        ("chat_stripped", "{}", "1+1=2\n#### 2"),
    ],
)
def test_gsm8k_variants(files, variant, prompt, answer):
    example = gsm8k.make_source("train", data_dir=str(files), variant=variant)[0]
    assert example.prompt == prompt.format("Ann has 1 pens and buys 1 more. How many?")
    assert example.answer == answer


def test_marks_alone_are_stripped():
    assert gsm8k.strip_marks("a <<1+1=2>>2 b < c > d << e") == "a 2 b < c > d << e"


def test_chat_variants_are_known_to_the_table():
    assert TASKS["gsm8k"].is_chat("chat") and not TASKS["gsm8k"].is_chat("") and not TASKS["gsm8k"].is_chat("plain")
    for name in ("gsm8k", "svamp", "jsonl"):
        assert set(TASKS[name].chat_variants) == {v for v in TASKS[name].variants if v.startswith("chat")}


def test_svamp_answers_lose_their_point_zero_and_nothing_else(files):
    first, second = examples(svamp.make_source("test", data_dir=str(files)))
    assert (first.key, first.answer, second.answer) == ("chal-1", "51", "2.5")
    body = SVAMP_ROWS[0]["Body"]
    assert first.prompt == f"Question: {body} What do you pay?\nAnswer:\n"
    first, second = examples(svamp.make_source("test", data_dir=str(files), variant="plain_stop"))
    assert first.prompt == f"Question: {body}. What do you pay?\nAnswer:\n"
    assert second.prompt == "Question: Di had 4 nuts and ate 1.5. How many has she?\nAnswer:\n"
    assert svamp.make_source("test", data_dir=str(files), variant="chat")[0].prompt == f"{body} What do you pay?"


@pytest.mark.parametrize(
    ("answer", "plain"), [("51.0", "51"), ("51", "51"), ("10.0", "10"), ("100", "100"), ("0.50", "0.5")],
)
def test_plain_answers(answer, plain):
    assert svamp.plain_answer(answer) == plain


def test_svamp_learns_from_gsm8k_in_the_same_form(files):
    for variant in svamp.VARIANTS:
        source = svamp.make_source("train", data_dir=str(files), variant=variant)
        theirs = gsm8k.make_source("train", data_dir=str(files), variant=svamp.VARIANTS[variant][0])
        assert examples(source) == examples(theirs) and source.fingerprint == theirs.fingerprint


def test_fingerprints_follow_the_content_and_the_form(files):
    source = lambda **options: gsm8k.make_source("train", data_dir=str(files), **options)
    first = source()
    assert source(seed=3).fingerprint == first.fingerprint
    assert len({source(variant=variant).fingerprint for variant in gsm8k.VARIANTS}) == 4
    path = files / "gsm8k" / "train.jsonl"
    path.write_text(path.read_text().replace("Ann", "Amy"))
    changed = source()
    assert changed.fingerprint != first.fingerprint and changed[0].prompt.startswith("Question: Amy")
    assert first[0].prompt.startswith("Question: Ann")


def test_nothing_is_written_where_the_files_are(files, cache):
    before = sorted(files.rglob("*"))
    gsm8k.make_source("train", data_dir=str(files))
    svamp.make_source("test", data_dir=str(files / "svamp"))
    assert sorted(files.rglob("*")) == before
    assert list(cache.rglob("*.array_record*"))


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        (gsm8k, {"split": "validation"}, "known splits: train, test"),
        (gsm8k, {"split": "train", "variant": "x"}, "known variants: plain, plain_stripped, chat"),
        (svamp, {"split": "dev"}, "known splits: train, test"),
        (svamp, {"split": "test", "variant": "x"}, "known variants: plain, .*plain_stop"),
    ],
)
def test_unknown_names_are_listed(files, task, arguments, message):
    with pytest.raises(ValueError, match=message):
        task.make_source(**arguments, data_dir=str(files))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"), ("[]", "line 2"), ('{"question": "a"}', "line 2"),
        ('{"question": 3, "answer": "\\n#### 3"}', "line 2"),
        ('{"question": "a", "answer": "3"}', "no last line"),
        ('{"question": "a", "answer": "\\n#### "}', "no last line"),
    ],
)  # fmt: skip
def test_a_malformed_published_line_is_refused(files, line, message):
    path = files / "gsm8k" / "test.jsonl"
    path.write_text(path.read_text(encoding="utf-8").splitlines()[0] + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        gsm8k.make_source("test", data_dir=str(files))


@pytest.mark.parametrize("text", ["{", "{}", "[3]", '[{"ID": "1"}]', json.dumps([SVAMP_ROWS[0] | {"Answer": "many"}])])
def test_a_malformed_svamp_file_is_refused(files, text):
    (files / "svamp" / "SVAMP.json").write_text(text)
    with pytest.raises(DataError, match=r"SVAMP.json|no examples"):
        svamp.make_source("test", data_dir=str(files))


def test_splits_that_share_a_question_are_refused(files):
    path = files / "gsm8k" / "train.jsonl"
    shared = GSM8K_ROWS["test"][1] | {"question": " cy owes  $3. WHAT has he?"}
    path.write_text(path.read_text() + json.dumps(shared) + "\n")
    with pytest.raises(DataError, match="1 training questions are in the test split too"):
        gsm8k.make_source("train", data_dir=str(files))
    check_disjoint("x", ["a"], ["b"])


def test_a_download_is_checked_kept_and_explained(files, tmp_path, cache, monkeypatch):
    path = files / "svamp" / "SVAMP.json"
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    here = published.PublishedFile(folder="svamp", name="SVAMP.json", url=path.as_uri(), sha256=sha256)
    monkeypatch.setattr(svamp, "FILE", here)
    empty = tmp_path / "empty"
    empty.mkdir()
    source = svamp.make_source("test", data_dir=str(empty))
    assert len(source) == 2 and (cache / "svamp" / "SVAMP.json").read_bytes() == path.read_bytes()
    path.unlink()
    # The second start is offline.
    assert svamp.make_source("test", data_dir=str(empty)).fingerprint == source.fingerprint
    shutil.rmtree(cache)
    with pytest.raises(DataError, match=r"cannot be downloaded.*put it at .*empty/svamp/SVAMP.json"):
        svamp.make_source("test", data_dir=str(empty))
    path.write_text("[]")
    with pytest.raises(DataError, match=f"wanted {sha256}"):
        svamp.make_source("test", data_dir=str(empty))
    assert not [file for file in cache.rglob("*") if file.is_file()], "nothing of a wrong file is kept"


def test_the_prompt_holds_the_question_as_it_is():
    assert make_prompt("{x} {} %s", "plain") == "Question: {x} {} %s\nAnswer:\n"


@pytest.fixture(scope="module")
def real():
    folder = os.environ.get("SMMD_DATA_DIR")
    if not folder:
        pytest.skip("SMMD_DATA_DIR is not set: no published files")
    return folder


@pytest.mark.realdata
def test_published_gsm8k(real):
    for split, count in (("train", 7473), ("test", 1319)):
        assert published.digest(Path(real) / "gsm8k" / f"{split}.jsonl") == gsm8k.FILES[split].sha256
        rows = [json.loads(line) for line in (Path(real) / "gsm8k" / f"{split}.jsonl").read_text().splitlines()]
        for variant in gsm8k.VARIANTS:
            source = gsm8k.make_source(split, data_dir=real, variant=variant)
            assert len(source) == len(rows) == count
            found = source.__getitems__(range(count))
            assert all(row["question"] in example.prompt for row, example in zip(rows, found, strict=True))
            assert any("<<" in example.answer for example in found) is not variant.endswith("stripped")
            if not variant.endswith("stripped"):
                assert [example.answer for example in found] == [row["answer"] for row in rows]
            for grader in ("gsm8k_strict", "gsm8k_flexible"):
                # A blank behind it: the reading is what is tested, not the equality of texts.
                assert all(GRADERS[grader](f"Well: {e.answer} .", e.answer).correct for e in found)


@pytest.mark.realdata
def test_published_svamp(real):
    assert published.digest(Path(real) / "svamp" / "SVAMP.json") == svamp.FILE.sha256
    source = svamp.make_source("test", data_dir=real)
    assert len(source) == 1000 and len({example.key for example in examples(source)}) == 1000
    assert all(example.answer.isdigit() for example in examples(source))
    bodies = [row["Body"] for row in json.loads((Path(real) / "svamp" / "SVAMP.json").read_text())]
    stopped = examples(svamp.make_source("test", data_dir=real, variant="plain_stop"))
    changed = sum(a.prompt != b.prompt for a, b in zip(examples(source), stopped, strict=True))
    assert changed == sum(not body.strip().endswith((".", "?", "!", '"')) for body in bodies) > 300


@pytest.mark.realdata
def test_published_splits_share_no_question(real):
    train = gsm8k.make_source("train", data_dir=real)
    for test in (gsm8k.make_source("test", data_dir=real), svamp.make_source("test", data_dir=real)):
        report = overlap(prompts_of(train), prompts_of(test))
        assert (report.train_rows, report.shared_test_rows, report.repeated_test_rows) == (7473, 0, 0)
