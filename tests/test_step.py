"""One optimizer step: the same whatever the cut into micro-batches, the packing or the number of devices."""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from smmd_jax import (
    LOSSES,
    NumericKernel,
    cross_entropy_loss,
    make_numeric_kernel,
    make_numeric_vocab,
    mean_from,
    numeric_mask,
    smmd_loss,
    sum_and_count,
)
from smmd_jax.backbones import Decoder, DecoderConfig, parameter_shardings
from train.data import Batch
from train.objective import make_objective
from train.optimizer import OPTIMIZERS, make_optimizer, make_schedule
from train.partition import batch_sharding, make_mesh, optimizer_shardings, replicated
from train.step import TrainState, init_state, make_step

VOCAB, LENGTH = 64, 40
DIGIT_IDS = np.array([17, 3, 40, 5, 61, 22, 9, 31, 50, 11])  # of 0..9, in no order
NUMBERS_PER_ROW = (0, 1, 2, 3, 5, 8, 13, 21)
CONFIG = DecoderConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2)
# One loss of each way to join cross entropy, with each normalisation that it has.
JOINS = [("smmd", "numeric"), ("smmd", "tokens"), ("ntil", "numeric"), ("gce", "numeric"), ("gce", "tokens")]
SHUFFLED = (5, 2, 7, 0, 3, 6, 1, 4)


def vocab():
    return make_numeric_vocab({str(digit): int(token) for digit, token in enumerate(DIGIT_IDS)})


def kernel_of(loss: str) -> NumericKernel:
    return make_numeric_kernel(vocab(), terms=LOSSES[loss].terms or "smmd")


def sequences():
    """Eight examples (ids, prompt length) with 0 to 21 numeric targets and prompts of unequal length."""
    rng = np.random.default_rng(0)
    text = np.setdiff1d(np.arange(VOCAB), DIGIT_IDS)
    examples = []
    for index, numbers in enumerate(NUMBERS_PER_ROW):
        prompt = rng.choice(text, 2 + 2 * index % 9)
        answer = np.concatenate([rng.choice(DIGIT_IDS, numbers), rng.choice(text, 3)])
        rng.shuffle(answer)
        examples.append((np.concatenate([prompt, answer]).astype(np.int32), len(prompt)))
    return examples


def pack(rows: list[list[int]], length: int = LENGTH, count: int = 8, *, left_padded: bool = False) -> Batch:
    """Lay examples (by index) out in rows; rows beyond `rows` are padding."""
    examples = sequences()
    names = ("input_ids", "targets", "positions", "segment_ids")
    arrays = {name: np.zeros((count, length), np.int32) for name in names}
    arrays["target_mask"] = np.zeros((count, length), bool)
    for row, members in enumerate(rows):
        at = length - sum(len(examples[member][0]) - 1 for member in members) if left_padded else 0
        for segment, member in enumerate(members, 1):
            ids, prompt = examples[member]
            span = slice(at, at + len(ids) - 1)
            arrays["input_ids"][row, span] = ids[:-1]
            arrays["targets"][row, span] = ids[1:]
            arrays["target_mask"][row, span] = np.arange(1, len(ids)) >= prompt
            arrays["positions"][row, span] = np.arange(len(ids) - 1)
            arrays["segment_ids"][row, span] = segment
            at += len(ids) - 1
    return Batch(**arrays)


def one_a_row(order=range(8), **options) -> Batch:
    return pack([[index] for index in order], **options)


@functools.lru_cache
def start(layers=CONFIG.num_layers):
    graphdef, state = nnx.split(Decoder(dataclasses.replace(CONFIG, num_layers=layers), rngs=nnx.Rngs(0)))
    return graphdef, nnx.to_pure_dict(state)


def sgd_that_keeps_its_gradient(rate: float) -> optax.GradientTransformation:
    """SGD whose state is the last gradient, before the sum with the parameters rounds it."""

    def update(gradient, state, parameters=None):
        return jax.tree.map(lambda leaf: -rate * leaf, gradient), gradient

    return optax.GradientTransformation(lambda parameters: jax.tree.map(jnp.zeros_like, parameters), update)


SGD = sgd_that_keeps_its_gradient(0.1)


@functools.lru_cache
def make_run(loss, normalize_by, grad_accum, mesh_sizes, optimizer, layers):
    """Compiled once for all tests that need it: (step, first state, kernel, sharding of the batch)."""
    graphdef, parameters = start(layers)
    mesh = make_mesh(dict(mesh_sizes))
    step = make_step(
        graphdef,
        make_objective(loss, normalize_by=normalize_by),
        optimizer,
        grad_accum=grad_accum,
        micro_batch_sharding=batch_sharding(mesh),
    )
    sharding = parameter_shardings(parameters, mesh)
    everywhere = replicated(mesh)
    state_sharding = TrainState(
        sharding, optimizer_shardings(optimizer, parameters, sharding, mesh), everywhere, everywhere
    )
    state = jax.device_put(init_state(parameters, optimizer), state_sharding)
    kernel = jax.device_put(kernel_of(loss), everywhere)
    return jax.jit(step, out_shardings=(state_sharding, everywhere)), state, kernel, batch_sharding(mesh)


class Outcome(NamedTuple):
    """What steps left behind, on the host; `optimizer` is the gradient with `SGD`."""

    parameters: dict
    optimizer: Any
    metrics: list[dict]


def run_step(
    batch, *, loss="smmd", normalize_by="numeric", grad_accum=1, mesh=None, optimizer=SGD, steps=1, layers=2
) -> Outcome:
    mesh_sizes = tuple((mesh or {}).items())
    step, state, kernel, sharding = make_run(loss, normalize_by, grad_accum, mesh_sizes, optimizer, layers)
    metrics = []
    for _ in range(steps):
        state, row = step(state, jax.device_put(batch, sharding), kernel)
        metrics.append(jax.device_get(row))
    return Outcome(jax.device_get(state.parameters), jax.device_get(state.optimizer), metrics)


def assert_same(one: Outcome, other: Outcome):
    """Losses, counts, the gradient and the parameters after a step of SGD agree within 1e-6, relatively."""
    for row, other_row in zip(one.metrics, other.metrics, strict=True):
        chex.assert_trees_all_close(row, other_row, rtol=1e-6, atol=0)
    near = lambda leaf, match, rtol: np.testing.assert_allclose(leaf, match, rtol=0, atol=rtol * np.abs(leaf).max())
    jax.tree.map(functools.partial(near, rtol=1e-6), one.parameters, other.parameters)
    difference = jax.tree.map(np.subtract, one.optimizer, other.optimizer)
    assert optax.tree.norm(difference) <= 1e-6 * optax.tree.norm(one.optimizer)
    # Array by array: the gradient of a norm's weight adds 320 terms to far less than their size, so a float32 sum in
    # another order differs by up to 2.3e-6 of its largest entry; that of a matrix by 1.3e-6.
    jax.tree.map(functools.partial(near, rtol=4e-6), one.optimizer, other.optimizer)


slow = pytest.mark.slow  # each row compiles one or two training steps
JOINS_BUT_FIRST_SLOW = [JOINS[0], *(pytest.param(*row, marks=slow) for row in JOINS[1:])]


@pytest.mark.parametrize(
    ("grad_accum", "normalize_by"), [(2, "numeric"), (4, "tokens"), pytest.param(8, "numeric", marks=slow)]
)
def test_step_does_not_depend_on_micro_batches(grad_accum, normalize_by):
    whole = run_step(one_a_row(), normalize_by=normalize_by)
    assert_same(whole, run_step(one_a_row(), normalize_by=normalize_by, grad_accum=grad_accum))


@slow
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_step_of_every_loss_does_not_depend_on_cut_or_order(loss):
    whole = run_step(one_a_row(), loss=loss)
    assert_same(whole, run_step(one_a_row(SHUFFLED), loss=loss, grad_accum=4))


@pytest.mark.parametrize(("loss", "normalize_by"), JOINS_BUT_FIRST_SLOW)
def test_step_does_not_depend_on_order_packing_or_the_side_of_the_padding(loss, normalize_by):
    options = {"loss": loss, "normalize_by": normalize_by}
    separate = run_step(one_a_row(), **options)
    assert_same(separate, run_step(one_a_row(SHUFFLED), **options))
    assert_same(separate, run_step(one_a_row(left_padded=True), **options))
    packed = [[3, 6, 0], [7, 2], [1, 5, 4]]
    assert_same(separate, run_step(pack(packed, length=64), **options))
    assert_same(separate, run_step(pack(packed, length=64, left_padded=True), **options))


@pytest.mark.parametrize(
    "mesh",
    [{"data": 8}, {"fsdp": 2, "tensor": 2}, *(pytest.param({"data": count}, marks=slow) for count in (2, 4))],
    ids=str,
)
def test_step_does_not_depend_on_devices(mesh):
    assert_same(run_step(one_a_row()), run_step(one_a_row(), mesh=mesh))


@slow
@pytest.mark.parametrize(("loss", "normalize_by"), JOINS)
def test_sharded_micro_batches_equal_one_device(loss, normalize_by):
    options = {"loss": loss, "normalize_by": normalize_by}
    sharded = run_step(one_a_row(SHUFFLED), mesh={"data": 2, "fsdp": 2}, grad_accum=2, **options)
    assert_same(run_step(one_a_row(), **options), sharded)


def test_adam_curves_agree_over_devices():
    optimizer = make_optimizer("adamw", optax.constant_schedule(1e-3), weight_decay=0.01, clip_norm=1.0)
    *_, one = run_step(one_a_row(), optimizer=optimizer, steps=10, layers=1)
    *_, eight = run_step(one_a_row(), optimizer=optimizer, steps=10, layers=1, mesh={"data": 8})
    # Adam's first update is a sign of the gradient: entries near 0 may differ by the whole learning rate.
    np.testing.assert_allclose([row["loss"] for row in one], [row["loss"] for row in eight], rtol=1e-4)


@pytest.mark.slow
def test_logged_values_are_the_means_of_the_losses():
    batch, graphdef_parameters = one_a_row(), start()
    model = nnx.merge(*graphdef_parameters)
    logits = model(batch.input_ids, positions=batch.positions, segment_ids=batch.segment_ids)
    kernel = kernel_of("smmd")
    mask = jnp.asarray(batch.target_mask)
    ce = cross_entropy_loss(logits, batch.targets, mask=mask)
    numeric = smmd_loss(logits, batch.targets, kernel, mask=mask)
    is_numeric = numeric_mask(batch.targets, kernel, mask=mask)
    mean_ce, mean_numeric = mean_from(*sum_and_count(ce, mask)), mean_from(*sum_and_count(numeric, is_numeric))
    *_, [row] = run_step(batch)
    assert row["ce_count"] == batch.target_mask.sum() and row["numeric_count"] == sum(NUMBERS_PER_ROW)
    assert row["samples"] == 8
    np.testing.assert_allclose(row["ce"], mean_ce, rtol=1e-6)
    np.testing.assert_allclose(row["numeric"], mean_numeric, rtol=1e-6)
    np.testing.assert_allclose(row["loss"], mean_ce + 3.0 * mean_numeric, rtol=1e-6)
    *_, [by_tokens] = run_step(batch, normalize_by="tokens")
    share = sum(NUMBERS_PER_ROW) / batch.target_mask.sum()
    np.testing.assert_allclose(by_tokens["loss"], mean_ce + 3.0 * share * mean_numeric, rtol=1e-6)


def test_ce_reports_plain_cross_entropy_and_no_numeric_term():
    *_, [ce] = run_step(one_a_row(), loss="ce", layers=1)
    *_, [smmd] = run_step(one_a_row(), loss="smmd", layers=1)
    assert "numeric" not in ce and ce["loss"] == ce["ce"]
    np.testing.assert_allclose(ce["ce"], smmd["ce"], rtol=1e-6)


def test_ntil_has_the_value_of_1_3_cross_entropies():
    *_, [row] = run_step(one_a_row(), loss="ntil", grad_accum=2, layers=1)
    np.testing.assert_allclose(row["loss"], 1.3 * row["ce"], rtol=1e-6)


def test_gce_replaces_cross_entropy_at_numbers_only():
    *_, [row] = run_step(one_a_row(), loss="gce", layers=1)
    # ce over all supervised positions is logged whatever the loss.
    *_, [plain] = run_step(one_a_row(), loss="ce", layers=1)
    np.testing.assert_allclose(row["ce"], plain["ce"], rtol=1e-6)
    assert abs(row["loss"] - plain["loss"]) > 1e-3


def test_batch_without_numbers_learns_from_cross_entropy_alone():
    batch = pack([[0]])
    for loss in ("smmd", "ntil", "gce"):
        parameters, _, [row] = run_step(batch, loss=loss, grad_accum=2, layers=1)
        assert row["numeric"] == 0 and row["numeric_count"] == 0
        chex.assert_tree_all_finite(parameters)
        np.testing.assert_allclose(row["loss"], row["ce"], rtol=1e-6)


def test_batch_without_targets_changes_nothing():
    batch = pack([])
    parameters, _, [row] = run_step(batch)
    assert row["loss"] == 0 and row["ce_count"] == 0
    chex.assert_trees_all_equal(parameters, jax.device_get(start()[1]))


def test_padding_may_hold_any_token():
    batch = one_a_row()
    noise = np.random.default_rng(1).integers(0, VOCAB, batch.input_ids.shape, np.int32)
    is_padding = batch.segment_ids == 0
    other = Batch(
        input_ids=np.where(is_padding, noise, batch.input_ids),
        targets=np.where(batch.target_mask, batch.targets, -100),
        target_mask=batch.target_mask,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
    )
    assert_same(run_step(batch), run_step(other))


def test_non_finite_step_updates_nothing_and_stays_stopped():
    graphdef, parameters = start(layers=1)
    optimizer = make_optimizer("adamw", optax.constant_schedule(1e-3), weight_decay=0.0, clip_norm=1.0)
    step = jax.jit(make_step(graphdef, make_objective("smmd"), optimizer))
    state = init_state(parameters, optimizer)
    bad = one_a_row()
    bad.input_ids[0, 0] = VOCAB  # an embedding row that is not there: NaN
    after, metrics = step(state, bad, kernel_of("smmd"))
    assert not metrics["is_finite"] and not after.is_finite and after.step == 0
    chex.assert_trees_all_equal(after.parameters, state.parameters)
    chex.assert_trees_all_equal(after.optimizer, state.optimizer)
    again, metrics = step(after, one_a_row(), kernel_of("smmd"))
    assert not metrics["is_finite"]
    chex.assert_trees_all_equal(again.parameters, state.parameters)


def test_dropout_is_a_function_of_the_step():
    config = dataclasses.replace(CONFIG, num_layers=1, dropout=0.5)
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    optimizer = optax.sgd(0.0)
    step = jax.jit(make_step(graphdef, make_objective("ce"), optimizer, seed=3))
    first = init_state(nnx.to_pure_dict(state), optimizer)
    second, row = step(first, one_a_row(), kernel_of("ce"))
    _, same = step(first, one_a_row(), kernel_of("ce"))
    _, next_row = step(second, one_a_row(), kernel_of("ce"))
    assert row["loss"] == same["loss"] != next_row["loss"]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_lowers_the_loss_on_a_sharded_mesh(name):
    schedule = make_schedule("cosine", learning_rate=3e-3, warmup_steps=2, steps=12)
    optimizer = make_optimizer(name, schedule, weight_decay=0.01, clip_norm=1.0)
    *_, metrics = run_step(one_a_row(), optimizer=optimizer, steps=12, layers=1, mesh={"fsdp": 2, "tensor": 2})
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_moments_are_sharded_like_their_parameters():
    _, parameters = start()
    mesh = make_mesh({"fsdp": 2, "tensor": 4})
    sharding = parameter_shardings(parameters, mesh)
    optimizer = make_optimizer("adamw", optax.constant_schedule(1e-3), weight_decay=0.0, clip_norm=1.0)
    moments = optimizer_shardings(optimizer, parameters, sharding, mesh)
    adam = next(part for part in jax.tree.leaves(moments, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu"))
    chex.assert_trees_all_equal(adam.mu, sharding)
    chex.assert_trees_all_equal(adam.nu, sharding)
    assert adam.count.is_fully_replicated
    assert not sharding["embed_tokens"]["embedding"].is_fully_replicated


def test_own_loss_by_path_and_its_errors():
    objective = make_objective("smmd_jax.losses.ntl:ntl_was_loss", weight=0.3)
    _, [own] = run_step_with(objective)
    *_, [row] = run_step(one_a_row(), loss="ntl_was", layers=1)
    np.testing.assert_allclose(own["loss"], row["loss"], rtol=1e-6)
    with pytest.raises(ValueError, match=r"known: .*smmd.*package\.module:function"):
        make_objective("smd")
    with pytest.raises(ValueError, match="cannot be imported"):
        make_objective("smmd_jax.losses.ntl:no_such_loss")
    with pytest.raises(ValueError, match="wanted a function"):
        make_objective("smmd_jax:__version__")


def run_step_with(objective):
    graphdef, parameters = start(layers=1)
    step = jax.jit(make_step(graphdef, objective, optax.sgd(0.1)))
    state, metrics = step(init_state(parameters, optax.sgd(0.1)), one_a_row(), kernel_of("smmd"))
    return state, [jax.device_get(metrics)]
