"""A loss of one's own: what it is averaged over, and what is said where it cannot be used."""

import dataclasses
import re
import types
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smmd_jax import LOSSES, LossSpec, make_numeric_kernel, make_numeric_vocab, mean_from, numeric_mask, sum_and_count
from train.data import Batch
from train.objective import make_objective
from train.own_loss import check_own_loss, find_own_loss

PAGE = Path(__file__).parents[1] / "docs" / "training.md"
VOCAB, SHAPE = 16, (2, 6)
KERNEL = make_numeric_kernel(make_numeric_vocab({str(digit): digit for digit in range(10)}))
MODEL = types.SimpleNamespace(
    logits=lambda hidden: hidden, numeric_logits=lambda hidden, kernel: hidden[..., kernel.token_ids]
)


def batch():
    """Two rows with a prompt, an answer of numbers and other tokens, and padding."""
    return Batch(
        input_ids=jnp.zeros(SHAPE, jnp.int32),
        targets=jnp.array([[12, 3, 4, 11, 0, 0], [5, 5, 13, 7, 10, 0]], jnp.int32),
        target_mask=jnp.array([[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]], bool),
        positions=jnp.zeros(SHAPE, jnp.int32),
        segment_ids=jnp.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]], jnp.int32),
    )


def hidden():
    return jax.random.normal(jax.random.key(0), (*SHAPE, VOCAB))


def one_everywhere(logits, targets, kernel, *, mask):
    return jnp.ones(targets.shape)


def expected_value(logits, targets, kernel, *, mask):
    """Not a number where the target is none, in the gradient too."""
    expected = jax.nn.softmax(logits[..., kernel.token_ids]) @ kernel.values
    return jnp.sqrt(expected * jnp.where(numeric_mask(targets, kernel, mask=mask), 1.0, -1.0))


def half_columns(scores, match, kernel):
    return 0.5 + jnp.log(match.any(-1)) + 0.0 * scores.sum(-1)


with_columns = LossSpec(function=one_everywhere, columns=half_columns, terms="smmd", default_weight=2.0, source="test")
mean_columns = LossSpec(
    function=one_everywhere, columns=lambda scores, match, kernel: scores.mean(), default_weight=1.0, source="test"
)


def two_arguments(logits, targets):
    return targets


def failing(logits, targets, kernel, *, mask):
    return jnp.dot(logits, kernel.gram)  # the line that is named


FAILING_LINE = failing.__code__.co_firstlineno + 1


def pair(logits, targets, kernel, *, mask):
    return targets, targets


@pytest.mark.parametrize("name, value", [("one_everywhere", 1.0), ("with_columns", 0.5)])
def test_the_mean_is_over_numeric_targets(name, value):
    """Two of the ten positions are numeric targets: a function of ones has the mean one, not five."""
    objective = make_objective(f"tests.test_own_loss:{name}")
    counts, sums = objective.counts(batch(), KERNEL), objective.sums(MODEL, hidden(), batch(), KERNEL)
    assert int(counts.numeric) == 2
    row = objective.metrics(sums, counts, objective.coefficients(counts))
    assert float(row["numeric"]) == pytest.approx(value)
    assert float(row["loss"]) == pytest.approx(float(row["ce"]) + objective.weight * value)


@pytest.mark.parametrize("name", ["expected_value", "with_columns"])
def test_what_a_function_gives_elsewhere_changes_nothing(name):
    objective = make_objective(f"tests.test_own_loss:{name}")
    total = lambda hidden: objective.sums(MODEL, hidden, batch(), KERNEL).numeric
    value, gradient = jax.value_and_grad(total)(hidden())
    assert np.isfinite(value) and np.isfinite(gradient).all()
    numeric = np.asarray(numeric_mask(batch().targets, KERNEL, mask=batch().target_mask))
    assert not gradient[~numeric].any()
    if name == "expected_value":
        losses = expected_value(hidden(), batch().targets, KERNEL, mask=batch().target_mask)
        assert float(value) == pytest.approx(float(losses[numeric].sum()), rel=1e-6) and gradient[numeric].any()


@pytest.mark.parametrize("name", ["one_everywhere", "expected_value", "with_columns"])
def test_logits_in_chunks_give_the_same_sums_and_gradient(name):
    head = jax.random.normal(jax.random.key(1), (4, VOCAB))
    model = types.SimpleNamespace(
        logits=lambda hidden: hidden @ head, stored_head=head,
        numeric_logits=lambda hidden, kernel: (hidden @ head)[..., kernel.token_ids],
    )  # fmt: skip
    dense = make_objective(f"tests.test_own_loss:{name}")
    coefficients = dense.coefficients(dense.counts(batch(), KERNEL))
    found = [
        jax.value_and_grad(lambda hidden, objective=objective: objective.total(
            model, hidden, batch(), KERNEL, coefficients
        ), has_aux=True)(jax.random.normal(jax.random.key(2), (*SHAPE, 4)))
        for objective in (dense, dataclasses.replace(dense, logits="chunked"))
    ]  # fmt: skip
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-6)


def test_the_example_of_the_page(tmp_path, monkeypatch):
    [text] = re.findall(r"^```python\n(# my_losses\.py\n.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "my_losses.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    named = re.findall(r"--loss=(my_losses:\w+)", PAGE.read_text("utf-8"))
    assert {name: make_objective(name).weight for name in named} == {
        "my_losses:relative_distance": 1.0, "my_losses:halved": 0.5,
    }  # fmt: skip
    logits, targets, mask = hidden(), batch().targets, batch().target_mask
    for name in named:
        check_own_loss(name, KERNEL, VOCAB)
        objective = make_objective(name)
        counts, sums = objective.counts(batch(), KERNEL), objective.sums(MODEL, logits, batch(), KERNEL)
        row = objective.metrics(sums, counts, objective.coefficients(counts))
        wanted = LOSSES["ntl_mae"].function(logits, targets, KERNEL, mask=mask) / (1 + targets)
        mean = mean_from(*sum_and_count(wanted, numeric_mask(targets, KERNEL, mask=mask)))
        assert float(row["numeric"]) == pytest.approx(float(mean), rel=1e-6)


@pytest.mark.parametrize(
    "name, words",
    [
        ("two_arguments", r"two_arguments cannot be called as \(logits .*: too many positional arguments"),
        ("failing", rf"fails in its own code, {re.escape(__file__)}, line {FAILING_LINE}: TypeError: .*--debug"),
        ("pair", "gives a tuple; wanted one array"),
        ("mean_columns", r"mean_columns, columns gives shape \[\] for targets of shape \[2, 3\]; wanted \[2, 3\]"),
    ],
)
def test_a_wrong_call_is_told_from_a_failing_body(name, words):
    with pytest.raises(ValueError, match=words):
        check_own_loss(f"tests.test_own_loss:{name}", KERNEL, VOCAB)


def test_a_module_that_fails_is_told_from_one_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_inside.py").write_text("import math\nlimit = math.no_such_name\n")
    with pytest.raises(ValueError, match=r"cannot be imported, .*fails_inside\.py, line 2: AttributeError: module"):
        find_own_loss("fails_inside:loss")
    with pytest.raises(ValueError, match=r"no_such_module cannot be imported: ModuleNotFoundError: .*PYTHONPATH"):
        find_own_loss("no_such_module:loss")
    with pytest.raises(ValueError, match=r"cannot be imported: tests\.test_own_loss has no los"):
        find_own_loss("tests.test_own_loss:los")
