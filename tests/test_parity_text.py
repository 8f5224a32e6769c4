"""The text decoders against transformers: logits, every layer, gradients, greedy tokens, and files both ways."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from smmd_jax.backbones import load_pretrained, save_pretrained
from smmd_jax.backbones.layer import DecoderLayer
from smmd_jax.backbones.sharding import parameter_path
from smmd_jax.backbones.tensor_names import source_of
from tests import references
from train.generate import generate

pytestmark = pytest.mark.parity

SEEDS = (0, 1)
CASES = [pytest.param((name, seed), id=f"{name}-{seed}") for name in references.TEXT for seed in SEEDS]
ATOL = 1e-4  # measured below 1e-5


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """(reference, port, folder) of one family and seed; made once for all its tests."""
    name, seed = request.param
    reference = references.make_reference(name, seed)
    folder = tmp_path_factory.mktemp(f"{name}-{seed}")
    reference.save_pretrained(folder)
    return reference, load_pretrained(folder), folder


def rows(seed, batch=3, length=21):
    return np.random.default_rng(seed).integers(3, references.SIZES["vocab_size"], (batch, length)).astype(np.int32)


def padded(side):
    """Rows of 21, 13 and 2 real tokens; what stands in the padding is a real id, so that it would show."""
    ids, mask = rows(1), np.zeros((3, 21), np.int32)
    for row, length in enumerate((21, 13, 2)):
        columns = slice(21 - length, None) if side == "left" else slice(None, length)
        mask[row, columns] = 1
    return ids, mask


def test_logits_and_every_layer(pair, monkeypatch):
    reference, port, _ = pair
    ids = rows(0)
    logits, hidden = references.forward(reference, ids)
    seen = []
    layer_call = DecoderLayer.__call__

    def recorded(self, flat, *operands, **options):
        seen.append(flat)
        return layer_call(self, flat, *operands, **options)

    monkeypatch.setattr(DecoderLayer, "__call__", recorded)
    seen.append(port.hidden(ids))
    assert len(seen) == len(hidden)
    for layer, (ours, theirs) in enumerate(zip(seen, hidden, strict=True)):
        np.testing.assert_allclose(np.reshape(ours, theirs.shape), theirs, atol=ATOL, rtol=0, err_msg=f"layer {layer}")
    np.testing.assert_allclose(port(ids), logits, atol=ATOL, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(pair, side):
    reference, port, _ = pair
    ids, mask = padded(side)
    theirs = references.forward(reference, ids, mask)[0]
    ours = np.asarray(port(ids, attention_mask=mask))
    np.testing.assert_allclose(ours[mask == 1], theirs[mask == 1], atol=ATOL, rtol=0)


def test_gradient_of_every_tensor(pair):
    reference, port, _ = pair
    ids = rows(2)
    theirs_loss, theirs = references.gradient_norms(reference, ids)
    graphdef, state = nnx.split(port)

    @jax.jit
    def loss_and_gradient(parameters):
        def loss(parameters):
            logits = nnx.merge(graphdef, parameters)(ids)[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

        return jax.value_and_grad(loss)(parameters)

    ours_loss, gradient = loss_and_gradient(nnx.to_pure_dict(state))
    np.testing.assert_allclose(ours_loss, theirs_loss, rtol=1e-5)
    name_of = lambda path: source_of(parameter_path(path), num_layers=port.config.num_layers).names[0]
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    ours = {name_of(path): float(jnp.linalg.norm(leaf.ravel())) for path, leaf in leaves}
    assert ours.keys() == theirs.keys()
    for name in theirs:
        # Where the true gradient is zero (a bias on the keys moves every score of a query alike) both hold rounding.
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy_tokens_with_the_cache(pair, side):
    """transformers generates from the left-padded rows; ours gives the same tokens for either padding."""
    reference, port, _ = pair
    theirs = references.generate(reference, *padded("left"), new=10)
    ids, mask = padded("left")
    if side == "right":
        ids = np.stack([np.roll(row, int(real.sum()) - 21) for row, real in zip(ids, mask, strict=True)])
        mask = padded("right")[1]
    ours = generate(port, ids, attention_mask=mask, max_new_tokens=10)
    np.testing.assert_array_equal(ours, theirs)


def test_transformers_loads_what_is_saved(pair, tmp_path):
    reference, port, folder = pair
    save_pretrained(port, tmp_path / "as_source", source=folder)
    save_pretrained(port, tmp_path / "of_its_own")
    ids = rows(3)
    theirs = references.forward(reference, ids)[0]
    for saved in ("as_source", "of_its_own"):
        again = references.libraries()[1].AutoModelForCausalLM.from_pretrained(tmp_path / saved)
        np.testing.assert_allclose(references.forward(again, ids)[0], theirs, atol=1e-5, rtol=0, err_msg=saved)
