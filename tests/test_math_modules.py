"""The arithmetic modules: exact evaluation, answers from the question alone, splits, regimes, files, likeness."""

import collections
import hashlib
import json
import os
import re
from fractions import Fraction
from pathlib import Path

import hypothesis.strategies as st
import pytest
import tensorflow_datasets as tfds
from hypothesis import given

from train.exits import DataError
from train.tasks import TASKS
from train.tasks.arith import make_source
from train.tasks.math_answers import format_decimal, nearest_root, solve, to_base
from train.tasks.math_data import LEVELS, MODULE_VARIANTS, generate_records, regime_of
from train.tasks.math_modules import MODULES
from train.tasks.surds import evaluate_exact, format_surd, invert, multiply

REGIMES = (*LEVELS, "interpolate", "extrapolate")
CASES = [(name, regime) for name in MODULES for regime in REGIMES if MODULES[name].entropy(regime)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", {1: 7}), ("-7", {1: -7}), ("2 - -4", {1: 6}), ("1 - 2 - 3", {1: -4}), ("2*3/4", {1: Fraction(3, 2)}),
        ("12/(2*3)", {1: 2}), ("3*-5", {1: -15}), ("-2**2", {1: -4}), ("(-2)**2", {1: 4}), ("2**3*5", {1: 40}),
        ("0.1 + 0.2", {1: Fraction(3, 10)}), ("sqrt(12)", {3: 2}), ("sqrt(9/4)", {1: Fraction(3, 2)}),
        ("(1 + sqrt(2))*(1 - sqrt(2))", {1: -1}), ("1/(1 + sqrt(2))", {1: -1, 2: 1}), ("sqrt(6)*sqrt(10)", {15: 2}),
        ("-sqrt(2)*-1", {2: 1}), ("sqrt(sqrt(16))", {1: 2}), ("1 - 1", {}), ("sqrt(0)", {}), ("+3", {1: 3}),
    ],
)  # fmt: skip
def test_exact_values_by_hand(text, value):
    assert evaluate_exact(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " ", "1 +", "(1", "1)", "1 2", "()", "1(2)", "sqrt 2", "sqrt", "sqrt(-1)", "1/0", "1/(2 - 2)", "x", "1e5",
     "２", "2**-1", "2**99", "2**sqrt(2)", "__import__('os')", "1/(1 + sqrt(2) + sqrt(3))",
     "sqrt(1 + sqrt(2))", ".5", "sqrt(", "*2"],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused(text):
    with pytest.raises(ValueError):
        evaluate_exact(text)


_TREES = st.recursive(
    st.integers(-50, 50).map(lambda value: (f"({value})", Fraction(value))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        lambda parts: (
            f"({parts[0][0]} {parts[1]} {parts[2][0]})",
            {"+": parts[0][1] + parts[2][1], "-": parts[0][1] - parts[2][1], "*": parts[0][1] * parts[2][1]}[parts[1]],
        )
    ),
    max_leaves=10,
)


@given(_TREES)
def test_exact_evaluation_agrees_with_the_tree_that_was_printed(tree):
    assert evaluate_exact(tree[0]).get(1, 0) == tree[1]


_FRACTIONS = st.fractions(-20, 20, max_denominator=9).filter(bool)


@given(_FRACTIONS, _FRACTIONS, st.sampled_from((2, 3, 5, 7)))
def test_surds_invert_and_print_so_that_they_are_read_back(a, b, root):
    value = {1: a, root: b}
    assert multiply(value, invert(value)) == {1: 1}
    assert evaluate_exact(format_surd(value)) == value


def test_long_and_deep_text_costs_no_recursion():
    assert evaluate_exact("1 + " * 20_000 + "1") == {1: 20_001}
    assert evaluate_exact("(" * 20_000 + "1" + ")" * 20_000) == {1: 1}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is -0.4 minus -65.1?", "64.7"),
        ("In base 16, what is -5f6 + 4?", "-5f2"),
        ("Calculate -0.11*-7.54.", "0.8294"),
        ("Divide -837 by 9.", "-93"),
        ("What is 3*((-3)/(-3))/(-6)?", "-1/2"),
        ("Calculate (-8)/9 + (-2050)/(-1845).", "2/9"),
        ("What is the third root of 2598 to the nearest integer?", "14"),
        ("What is 118845 to the power of 1/3, to the nearest integer?", "49"),
        ("-0.1+464.318855471926", "464.218855471926"),
        ("What is -0.4 less than 2640?", "2640.4"),
        ("Subtract -1.67456 from 2455.95.", "2457.62456"),
        ("What is the difference between -8 and 3?", "11"),
        ("Simplify 5*(2*sqrt(300) + 2)**2.", "400*sqrt(3) + 6020"),
        ("1*0.5*2", "1"),
    ],
)
def test_answers_come_from_the_question_alone(question, answer):
    assert solve(question) == answer


@pytest.mark.parametrize("question", ["", "What is the capital?", "In base 2, what is 12 + 1?", "Add 1 and x"])
def test_other_questions_are_refused(question):
    with pytest.raises(ValueError):
        solve(question)


@given(st.integers(0, 10**20), st.integers(2, 10))
def test_nearest_roots(number, degree):
    root = nearest_root(number, degree)
    assert number << degree < (2 * root + 1) ** degree
    assert root == 0 or (2 * root - 1) ** degree <= number << degree


@given(st.integers(-(10**12), 10**12), st.integers(2, 16))
def test_bases_are_read_back(number, base):
    assert int(to_base(number, base), base) == number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=5, min_value=-(10**9), max_value=10**9))
def test_decimals_are_printed_without_trailing_zeros(value):
    text = format_decimal(Fraction(value))
    assert Fraction(text) == Fraction(value) and not re.search(r"\.[0-9]*0$|e|^-?\.", text)


def records(name, regime, examples=150, seed=0, **options):
    return list(generate_records(MODULE_VARIANTS[name], regime, examples=examples, seed=seed, **options))


@pytest.mark.parametrize(("name", "regime"), CASES)
def test_every_module_and_regime_gives_right_answers_of_the_published_form(name, regime):
    found = records(name, regime)
    for record in found:
        assert solve(record["question"]) == record["answer"]
        assert len(record["question"]) <= 160 and len(record["answer"]) <= 30
        assert record["regime"] == regime
    assert len({record["question"] for record in found}) > 120
    module = MODULES[name].longer if regime == "extrapolate" else name
    assert {record["module"] for record in found} == {f"arithmetic__{module}"}


def test_there_are_fifteen_modules():
    assert len([*MODULES, *filter(None, (module.longer for module in MODULES.values()))]) == 15


def test_entropy_ranges_are_the_published_ones():
    assert MODULES["mul"].entropy("train-easy") == (3, pytest.approx(3 + 7 / 3))
    assert MODULES["mul"].entropy("train-hard") == (pytest.approx(10 - 7 / 3), 10)
    assert MODULES["add_or_sub"].entropy("train-medium") == (8, 12)
    assert MODULES["add_or_sub"].entropy("interpolate") == (12, 12)
    assert MODULES["add_or_sub"].entropy("extrapolate") == (16, 20)


@pytest.mark.parametrize("name", ["mul", "add_or_sub", "div"])
def test_harder_levels_have_longer_numbers(name):
    digits = [
        sum(len(re.sub(r"\D", "", record["question"])) for record in records(name, regime)) for regime in REGIMES
    ]
    easy, medium, hard, interpolate, extrapolate = digits
    assert easy < medium < hard < extrapolate and medium < interpolate < extrapolate


def test_splits_share_no_problem_whatever_seed_and_size():
    by_regime = {
        regime: {
            record["question"]
            for seed, examples in ((0, 200), (1, 300))
            for record in records("nearest_integer_root", regime, examples, seed)
        }
        for regime in (*LEVELS, "interpolate")
    }
    canonical = lambda question: tuple(sorted(re.findall(r"[0-9]{2,}", question)))
    numbers = {regime: {canonical(question) for question in found} for regime, found in by_regime.items()}
    assert not by_regime["train-easy"] & by_regime["interpolate"]
    for first in numbers:
        for second in numbers:
            assert first == second or not by_regime[first] & by_regime[second]


def test_every_wording_of_a_problem_is_in_one_split():
    assert regime_of("12 + 5") == regime_of("12 + 5")
    for regime in ("train-easy", "interpolate"):
        for record in records("add_or_sub", regime):
            p, q = re.findall(r"(?<![0-9])-?[0-9]+(?:\.[0-9]+)?", re.sub(r"(?<=\d)[+](?=.)", " + ", record["question"]))
            options = {regime_of(f"{a} {sign} {b}") for sign in "+-" for a, b in ((p, q), (q, p))}
            assert regime in options


def test_train_is_the_three_levels_in_turn():
    levels = [records("mul", level, 4) for level in LEVELS]
    assert records("mul", "train", 11) == [levels[index % 3][index // 3] for index in range(11)]


def test_all_mixes_the_modules_and_leaves_out_those_without_extrapolation():
    counts = collections.Counter(record["module"] for record in records("all", "train-easy", 900))
    assert len(counts) == 9 and min(counts.values()) > 60
    assert {record["module"] for record in records("all", "extrapolate", 200)} == {
        f"arithmetic__{module.longer}" for module in MODULES.values() if module.longer
    }


def test_seed_alone_decides_the_questions():
    assert records("mixed", "train-hard", 20) == records("mixed", "train-hard", 30)[:20]
    assert records("mixed", "train-hard", 20) != records("mixed", "train-hard", 20, seed=1)


def test_a_changed_generator_is_noticed():
    # On a deliberate change: raise MODULES_VERSION, so that files prepared before are not taken for new ones.
    text = "\n".join(f"{r['question']} {r['answer']}" for name, regime in CASES for r in records(name, regime, 20))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "8c4f63d99785dbdc"


def test_too_few_problems_is_an_error(monkeypatch):
    monkeypatch.setattr("train.tasks.math_data._MAX_TRIES_PER_EXAMPLE", 50)
    with pytest.raises(ValueError, match="has fewer than 5,000 questions"):
        records("mul", "interpolate", 5000, unique=True)


def test_prepared_sources(tmp_path):
    source = lambda split, **options: make_source(
        split, data_dir=str(tmp_path), variant="div", examples={split: 30}, **options
    )
    train, interpolate = source("train"), source("interpolate")
    wanted = records("div", "train", 30)
    assert [(e.prompt, e.answer) for e in map(train.__getitem__, range(30))] == [
        (record["question"] + "\n", record["answer"]) for record in wanted
    ]
    assert len({train.fingerprint, interpolate.fingerprint, source("train", seed=1).fingerprint}) == 3
    assert len({interpolate[index].prompt for index in range(30)}) == 30
    assert source("train").fingerprint == train.fingerprint


def test_the_default_task_is_what_it_was():
    task = TASKS["arith"]
    assert task.variants[:2] == ("small", "deepmind") and task.splits[:3] == ("train", "interpolate", "longer")


@pytest.mark.parametrize(
    ("variant", "split", "message"),
    [
        ("div", "longer", "known splits: train, train-easy, train-medium, train-hard, interpolate, extrapolate"),
        ("simplify_surd", "extrapolate", "unknown split 'extrapolate'"),
        ("small", "extrapolate", "known splits: train, interpolate, longer"),
        ("sums", "train", "known variants: small, deepmind, all, add_or_sub"),
        ("released", "longer", "known splits: train, train-easy"),
    ],
)
def test_unknown_names_are_listed(tmp_path, variant, split, message):
    with pytest.raises(ValueError, match=message):
        make_source(split, data_dir=str(tmp_path), variant=variant)


@pytest.fixture
def released(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "archive" / "mathematics_dataset-v1.0"
    for place, regime in enumerate(REGIMES):
        (root / regime).mkdir(parents=True)
        lines = [f"What is {place} + {number}?\n{place + number}\n" for number in range(4)]
        suffix = "_longer" if regime == "extrapolate" else ""
        (root / regime / f"arithmetic__add_sub_multiple{suffix}.txt").write_text("".join(lines))
        name = f"arithmetic__mul{'_big' if suffix else ''}.txt"
        (root / regime / name).write_text(("2*3\n6\n", "5*5\n25\n")[place > 2])
        (root / regime / "algebra__linear_1d.txt").write_text("Solve x = 1.\n1\n")
    # A held-out question among those of training, in another case.
    path = root / "train-easy" / "arithmetic__add_sub_multiple.txt"
    path.write_text("what is  3 + 2?\n5\n" + path.read_text())
    return root.parent


def test_released_files_are_read_without_what_is_held_out(released):
    source = make_source("train", data_dir=str(released), variant="released_add_sub_multiple")
    found = [(source[index].prompt, source[index].answer) for index in range(len(source))]
    assert found == [(f"What is {place} + {n}?\n", str(place + n)) for place in range(3) for n in range(4)]
    assert len(make_source("train", data_dir=str(released), variant="released")) == 15
    assert len(make_source("train-hard", data_dir=str(released / "mathematics_dataset-v1.0"), variant="released")) == 5
    assert len(make_source("extrapolate", data_dir=str(released), variant="released")) == 5
    few = make_source("train", data_dir=str(released), variant="released", examples={"train": 1})
    assert len(few) == 6 and few.fingerprint != source.fingerprint


@pytest.mark.parametrize("text", ["What is 1?\n", "What is 1?\n\n", "\n1\n", "What is 1?\n1\nWhat is 2?"])
def test_a_released_file_with_a_line_too_few_is_refused(released, text):
    (released / "mathematics_dataset-v1.0" / "interpolate" / "arithmetic__mul.txt").write_text(text)
    with pytest.raises(DataError, match="lacks a line"):
        make_source("interpolate", data_dir=str(released), variant="released")


class MathDataset(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """In the shape of TFDS's own: one configuration a module, splits train and test."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="arithmetic__mul"), tfds.core.BuilderConfig(name="algebra__x")]  # noqa: RUF012
    name = "math_dataset"

    def _info(self):
        features = tfds.features.FeaturesDict({"question": tfds.features.Text(), "answer": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(start) for split, start in (("train", 0), ("test", 2))}

    def _generate_examples(self, start):
        for number in range(start, start + 4):
            yield number, {"question": f"Multiply {number} and 3.", "answer": str(3 * number)}


@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_the_copy_of_tfds_is_read_where_it_is_prepared(tmp_path, monkeypatch, file_format):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = lambda split: make_source(split, data_dir=str(tmp_path), variant="released_tfds")
    for name in ("arithmetic__mul", "algebra__x"):
        MathDataset(config=name, data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    if file_format == "tfrecord":  # writing them takes TensorFlow
        info = tmp_path / "math_dataset" / "arithmetic__mul" / "1.0.0" / "dataset_info.json"
        info.write_text(info.read_text().replace("array_record", "tfrecord"))
        with pytest.raises(DataError, match="cannot be read without TensorFlow"):
            source("interpolate")
        return
    train, interpolate = source("train"), source("interpolate")
    # Questions 2 and 3 are in the test split too.
    assert [train[i].prompt + train[i].answer for i in range(2)] == ["Multiply 0 and 3.\n0", "Multiply 1 and 3.\n3"]
    assert len(train) == 2 and len(interpolate) == 4
    with pytest.raises(DataError, match="no split extrapolate"):
        source("extrapolate")


def test_missing_released_files_are_explained(tmp_path):
    with pytest.raises(DataError, match=r"no arithmetic__\*.txt in interpolate below .*give --data_dir"):
        make_source("interpolate", data_dir=str(tmp_path), variant="released")


@pytest.fixture(scope="module")
def published():
    folder = os.environ.get("SMMD_DATA_DIR")
    if not folder:
        pytest.skip("SMMD_DATA_DIR is not set: no published questions to compare with")
    rows = collections.defaultdict(list)
    for path in sorted((Path(folder) / "math_arithmetic").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[row["module"].removeprefix("arithmetic__")].append(row)
    return rows


@pytest.mark.realdata
def test_every_published_answer_of_all_fifteen_modules_is_reproduced(published):
    assert len(published) == 15
    for rows in published.values():
        for row in rows:
            assert solve(row["question"]) == row["answer"], row["question"]


def shape(question):
    """A question without its numbers and expression."""
    question = question if "sqrt" not in question else "Simplify #."
    words = re.sub(r"\b(square|cube|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth) root", "K root", question)
    words = re.sub(r"(?<=[ (])(-?\b[0-9][0-9a-f.]*\b|-?\b[a-f][0-9a-f]*\b(?= [-+]|\?))", "#", " " + words).strip()
    head = re.match(r"[A-Za-z ]*", re.sub(r"sqrt", "", words))[0].strip()
    return head if len(re.findall("[A-Za-z]{3,}", words)) <= 4 else words


def kind(answer):
    for name, pattern in (("integer", r"-?\d+"), ("decimal", r"-?\d+\.\d+"), ("fraction", r"-?\d+/\d+")):
        if re.fullmatch(pattern, answer):
            return name
    return "expression"


@pytest.mark.realdata
@pytest.mark.parametrize("name", MODULES)
def test_generated_questions_resemble_the_published_ones(published, name):
    theirs = [row for row in published[name] if row["regime"] in (*LEVELS, "interpolate")][:400]
    ours = [record for regime in (*LEVELS, "interpolate") for record in records(name, regime, 100)]
    kinds = [collections.Counter(kind(row["answer"]) for row in rows) for rows in (theirs, ours)]
    for answer_kind in {*kinds[0], *kinds[1]}:
        shares = [counts[answer_kind] / counts.total() for counts in kinds]
        # About 125 of theirs: a standard error of 0.045, and the generators are not the same.
        assert abs(shares[0] - shares[1]) < 0.2, (answer_kind, shares)
    assert {shape(row["question"]) for row in theirs} <= {shape(row["question"]) for row in ours}
