"""The arithmetic task: evaluator, generator, splits, prepared files, and its likeness to the published data."""

import collections
import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import re
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy import stats

from train.graders import GRADERS
from train.tasks import TASKS, arith
from train.tasks.arith import TEMPLATES, VARIANTS, ArithConfig, SplitSpec, generate_questions, make_source, prepare
from train.tasks.expressions import Difficulty, evaluate, sample_expression, split_of

_QUESTION = re.compile(r"(?:What is the value of |What is |Evaluate |Calculate )?([-+() 0-9]+?)[?.]?")
_OPERAND = re.compile(r"(?:(?<=^)|(?<=[ (]))-?[0-9]+")


def expression_of(question: str) -> str:
    return _QUESTION.fullmatch(question)[1]


def questions(variant: str, split: str, examples: int, seed: int = 0) -> list[tuple[str, str]]:
    spec = dataclasses.replace(VARIANTS[variant][split], examples=examples)
    return list(generate_questions(spec, split=split, seed=seed))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("-7", -7),
        ("2 - -4", 6),
        ("1 - (2 - 3)", 2),
        ("1 - (2 + 3)", -4),
        ("1 - 2 - 3", -4),
        ("-(3 - 10)", 7),
        ("--3", 3),
        ("((1)) + ( 2 ) ", 3),
        ("-48 + (8 - (-12 + (3 + 2 - -4)))", -37),
        ("99999999999999999999 + 1", 10**20),
    ],
)
def test_evaluate_by_hand(expression, value):
    assert evaluate(expression) == value


_TREES = st.recursive(
    st.integers(-(10**6), 10**6).map(lambda value: (str(value), value)),
    lambda inner: st.tuples(inner, st.sampled_from("+-"), inner).map(
        lambda parts: (
            f"({parts[0][0]} {parts[1]} {parts[2][0]})",
            parts[0][1] + parts[2][1] if parts[1] == "+" else parts[0][1] - parts[2][1],
        )
    ),
    max_leaves=12,
)


@given(_TREES)
def test_evaluate_agrees_with_the_tree_that_was_printed(tree):
    text, value = tree
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1 +",
        "(1",
        "1)",
        "1 2",
        "()",
        "1 (2)",
        "3 * 4",
        "1e5",
        "1.5",
        "１ + 1",
        "__import__('os')",
        "1 + x",
        ")(",
    ],
)
def test_evaluate_refuses_what_is_not_a_chain(text):
    with pytest.raises(ValueError, match="evaluate"):
        evaluate(text)


def test_evaluate_is_linear_in_length_and_depth():
    started = time.perf_counter()
    assert evaluate("1 + " * 50_000 + "1") == 50_001
    assert evaluate("(" * 50_000 + "1" + ")" * 50_000) == 1
    assert time.perf_counter() - started < 5  # a quadratic evaluator takes minutes


@pytest.mark.parametrize("operands", [2, 3, 5, 10])
def test_values_are_uniform_within_the_entropy_range(operands):
    # A bracket lost in printing would put the value outside the range or bend the distribution.
    rng = random.Random(0)
    difficulty = Difficulty(entropy=(8.0, 8.0), operands=(operands,))
    values = np.array([evaluate(sample_expression(rng, difficulty)) for _ in range(5000)])
    assert np.abs(values).max() == 50
    assert stats.chisquare(np.bincount(values + 50, minlength=101)).pvalue > 1e-3


def test_small_keeps_to_its_operands():
    for split, counts in {"train": {2, 3}, "interpolate": {2, 3}, "longer": {4}}.items():
        operands = [[int(x) for x in _OPERAND.findall(expression_of(q))] for q, _ in questions("small", split, 500)]
        assert {len(row) for row in operands} == counts
        assert 45 <= max(abs(value) for row in operands for value in row) <= 50


def test_small_has_brackets_signs_and_over_fifty_thousand_questions():
    rng = random.Random(0)
    expressions = {sample_expression(rng, VARIANTS["small"]["train"].difficulties[0]) for _ in range(15_000)}
    assert len(expressions) * len(TEMPLATES) > 50_000
    assert any("(" in expression for expression in expressions) and any(
        "- -" in expression for expression in expressions
    )


def test_an_unreachable_operand_limit_is_an_error(monkeypatch):
    monkeypatch.setattr("train.tasks.expressions._MAX_TRIES", 50)
    with pytest.raises(ValueError, match="raise max_operand"):
        sample_expression(random.Random(0), Difficulty(entropy=(8.0, 8.0), operands=(2,), max_operand=-1))


@pytest.mark.parametrize("wrong", [{"entropy": (4, 3)}, {"entropy": (-1, 3)}, {"operands": ()}, {"operands": (1,)}])
def test_a_wrong_difficulty_is_refused(wrong):
    with pytest.raises(ValueError, match="entropy must be"):
        Difficulty(**{"entropy": (3, 4), "operands": (2,)} | wrong)


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_right_and_lengths_limited(variant):
    for split in VARIANTS[variant]:
        for question, answer in questions(variant, split, 300):
            assert str(evaluate(expression_of(question))) == answer
            assert len(question) <= 160 and len(answer) <= 30


def test_splits_never_share_an_expression_whatever_seed_and_size():
    # One difficulty with few expressions for all three splits: without the partition they would overlap at once.
    difficulty = Difficulty(entropy=(3.0, 3.0), operands=(2,), tree_offset=0.0)
    by_split = collections.defaultdict(set)
    for split in ("train", "interpolate", "longer"):
        for seed, examples in ((0, 400), (1, 900)):
            spec = SplitSpec(examples=examples, difficulties=(difficulty,), unique=False)
            pairs = generate_questions(spec, split=split, seed=seed)
            by_split[split] |= {expression_of(question) for question, _ in pairs}
    assert min(map(len, by_split.values())) > 50
    assert not by_split["train"] & by_split["interpolate"]
    assert not by_split["train"] & by_split["longer"]
    assert not by_split["interpolate"] & by_split["longer"]


def test_the_partition_gives_each_evaluation_split_a_sixteenth():
    counts = collections.Counter(split_of(f"{a} + {b}") for a in range(200) for b in range(200))
    assert stats.chisquare([counts[s] for s in ("interpolate", "longer", "train")], [2500, 2500, 35000]).pvalue > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_questions_are_distinct(variant):
    for split in ("interpolate", "longer"):
        asked = [question for question, _ in questions(variant, split, 1000)]
        assert len(set(asked)) == 1000


def test_too_few_questions_is_an_error(monkeypatch):
    monkeypatch.setattr(arith, "_MAX_TRIES_PER_EXAMPLE", 2000)
    spec = SplitSpec(examples=5000, difficulties=(Difficulty(entropy=(0.0, 0.0), operands=(2,)),), unique=True)
    with pytest.raises(ValueError, match="of the 5,000 questions asked for"):
        list(generate_questions(spec, split="train", seed=0))


def test_seed_alone_decides_the_questions():
    assert questions("small", "train", 50) == questions("small", "train", 80)[:50]
    assert questions("small", "train", 50, seed=1) != questions("small", "train", 50)


@pytest.mark.parametrize(("variant", "expected"), [("small", "b16ec1e755770a9c"), ("deepmind", "36dc0fc9c95b8bc1")])
def test_a_changed_generator_is_noticed(variant, expected):
    # On a deliberate change: raise GENERATOR_VERSION, so that files prepared before are not taken for new ones, and
    # renew this.
    pairs = [pair for split in VARIANTS[variant] for pair in questions(variant, split, 100)]
    text = "\n".join(f"{question} {answer}" for question, answer in pairs)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == expected


def tiny_config(seed: int = 0, train: int = 120) -> ArithConfig:
    splits = {
        name: dataclasses.replace(spec, examples=train if name == "train" else 20)
        for name, spec in VARIANTS["small"].items()
    }
    return ArithConfig.make("small", seed=seed, splits=splits)


def test_prepared_files_hold_the_generated_questions(tmp_path):
    source = make_source("train", data_dir=str(tmp_path), examples={"train": 120, "interpolate": 20, "longer": 20})
    pairs = questions("small", "train", 120)
    assert len(source) == 120
    assert [(example.prompt, example.answer) for example in map(source.__getitem__, range(120))] == [
        (question + "\n", answer) for question, answer in pairs
    ]
    assert source.__getitems__([5, 3]) == [source[5], source[3]]
    assert len({source[index].key for index in range(120)}) == 120
    content = hashlib.sha256("".join(f"{question}\n{answer}\n" for question, answer in pairs).encode()).hexdigest()
    assert source.fingerprint.endswith(content)
    assert list(tmp_path.rglob("*.array_record*"))


def test_preparing_again_reuses_the_files_and_prints_nothing(tmp_path, capfd):
    first = prepare(tiny_config(), data_dir=str(tmp_path))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.array_record*")}
    second = prepare(tiny_config(), data_dir=str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.array_record*")} == written
    assert second.info.metadata == first.info.metadata and len(first.info.metadata) == 3
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("change", [{"seed": 1}, {"train": 121}])
def test_a_changed_parameter_never_meets_old_files(tmp_path, change):
    old = arith.ArithSource(prepare(tiny_config(), data_dir=str(tmp_path)), "train")
    new = arith.ArithSource(prepare(tiny_config(**change), data_dir=str(tmp_path)), "train")
    assert new.fingerprint != old.fingerprint
    assert len(new) == change.get("train", 120) and len(old) == 120
    assert len(list(tmp_path.rglob("*train.array_record*"))) == 2


def _prepare_in_process(folder: str, results) -> None:
    results.put(prepare(tiny_config(train=3000), data_dir=folder).info.metadata["train"])


@pytest.mark.slow
def test_two_processes_may_prepare_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_prepare_in_process, args=(str(tmp_path), results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    hashes = {results.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(hashes) == 1
    assert not [path for path in tmp_path.rglob("*") if "incomplete" in path.name]


def test_default_folder_is_in_the_user_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Path(arith.default_data_dir()) == tmp_path / "smmd_jax" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Path(arith.default_data_dir()) == tmp_path / ".cache" / "smmd_jax" / "data"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "known splits: train, interpolate, longer"),
        ({"split": "train", "variant": "large"}, "known variants: small, deepmind"),
        ({"split": "train", "examples": {"val": 3}}, "unknown split 'val'"),
    ],
)
def test_unknown_names_are_listed(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_source(**arguments, data_dir=str(tmp_path))


@pytest.mark.parametrize("name", TASKS)
def test_rows_of_the_task_table_are_consistent(name):
    task = TASKS[name]
    assert task.name == name and task.summary
    assert {task.train_split, task.eval_split} <= set(task.splits)
    assert task.train_split != task.eval_split
    assert task.grader in GRADERS


_REGIMES = {
    "train-easy": ("train", 0),
    "train-medium": ("train", 1),
    "train-hard": ("train", 2),
    "interpolate": ("interpolate", 0),
    "extrapolate": ("longer", 0),
}


@pytest.fixture(scope="module")
def published():
    folder = os.environ.get("SMMD_DATA_DIR")
    if not folder:
        pytest.skip("SMMD_DATA_DIR is not set: no published questions to compare with")
    by_regime = collections.defaultdict(list)
    for path in sorted((Path(folder) / "math_arithmetic").glob("add_sub_multiple_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            by_regime[row["regime"]].append((row["question"], row["answer"]))
    return by_regime


def generated(regime: str, examples: int = 4000) -> list[tuple[str, str]]:
    split, level = _REGIMES[regime]
    difficulty = VARIANTS["deepmind"][split].difficulties[level]
    # Any expression may stand for the distribution, so the split with the most of them is used throughout.
    spec = SplitSpec(examples=examples, difficulties=(difficulty,), unique=True)
    return list(generate_questions(spec, split="train", seed=0))


def same_counts(ours: list, theirs: list) -> float:
    """p-value of the hypothesis that two samples of categories come from one distribution."""
    kinds = sorted({*ours, *theirs})
    table = [[collections.Counter(sample)[kind] for kind in kinds] for sample in (ours, theirs)]
    return stats.chi2_contingency(table).pvalue


# Sampling error is the tolerance: two-sample tests at one in a thousand, and four standard errors for shares.
@pytest.mark.realdata
@pytest.mark.parametrize("regime", _REGIMES)
def test_deepmind_variant_has_the_published_distribution(published, regime):
    theirs, ours = published[regime], generated(regime)
    assert len(theirs) > 400
    features = {}
    for name, pairs in (("theirs", theirs), ("ours", ours)):
        expressions = [expression_of(question) for question, _ in pairs]
        operands = [[int(x) for x in _OPERAND.findall(expression)] for expression in expressions]
        features[name] = {
            "length": [len(question) for question, _ in pairs],
            "answer": [int(answer) for _, answer in pairs],
            # One operand a question: those of one question depend on each other.
            "operand": [abs(row[index % len(row)]) for index, row in enumerate(operands)],
            "brackets": [expression.count("(") for expression in expressions],
            "operands": [len(row) for row in operands],
            "template": [question.replace(e, "{}") for (question, _), e in zip(pairs, expressions, strict=True)],
            "negative": [row[index % len(row)] < 0 for index, row in enumerate(operands)],
            "operators": [re.findall(r" ([+-]) ", e)[0] for e in expressions],
        }
    for feature in ("length", "answer", "operand"):
        result = stats.ks_2samp(features["ours"][feature], features["theirs"][feature])
        assert result.pvalue > 1e-3, (feature, result)
    for feature in ("brackets", "operands", "template", "negative", "operators"):
        assert same_counts(features["ours"][feature], features["theirs"][feature]) > 1e-3, feature
    assert set(features["theirs"]["operands"]) == set(features["ours"]["operands"])
    assert set(features["theirs"]["template"]) == set(TEMPLATES)
    for feature in ("length", "answer"):
        a, b = (np.array(features[name][feature], float) for name in ("ours", "theirs"))
        error = np.sqrt(a.var() / len(a) + b.var() / len(b))
        assert abs(a.mean() - b.mean()) < 4 * error, feature
        # A variance has a relative error of sqrt((kurtosis - 1) / n).
        spread = np.sqrt(sum((stats.kurtosis(x, fisher=False) - 1) / len(x) for x in (a, b)))
        assert abs(np.log(a.var() / b.var())) < 4 * spread, feature


@pytest.mark.realdata
def test_interpolation_answers_have_the_published_variance(published):
    # Uniform on -50..50 has variance 850; 865 was measured on a larger sample than the one here.
    for pairs in (published["interpolate"], generated("interpolate")):
        variance = np.var([int(answer) for _, answer in pairs])
        assert abs(variance / 857 - 1) < 4 * np.sqrt(0.8 / len(pairs))


@pytest.mark.realdata
def test_published_answers_are_reproduced(published):
    for pairs in published.values():
        for question, answer in pairs:
            assert evaluate(expression_of(question)) == int(answer)
