"""What must hold on whatever device jax runs on; `benchmarks/device.sh` runs it there first."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.loss_cost import make_kernel
from benchmarks.step import Setting, make_batch
from smmd_jax import smmd_loss
from smmd_jax.backbones import Decoder
from tests import reference
from train.generate import generate
from train.objective import make_objective
from train.optimizer import make_optimizer
from train.step import init_state, make_step

SETTING = Setting(preset="tiny", rows=4, length=32)
CONFIG = SETTING.config(quick=True)


def test_smmd_is_that_of_the_float64_reference_on_this_device():
    kernel = make_kernel(10, 64 + 100, contiguous=True)
    logits = 3 * np.random.default_rng(0).normal(size=(32, 164))
    targets = np.asarray(kernel.token_ids)[np.arange(32) % 10]
    found = jax.jit(smmd_loss)(jnp.asarray(logits, jnp.float32), jnp.asarray(targets), kernel)
    numbers = reference.make_numbers(np.asarray(kernel.token_ids), np.asarray(kernel.values))
    wanted = reference.smmd(logits, targets, numbers)
    # The quadratic form asks for the highest precision whatever the device's default is.
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


def test_a_step_lowers_the_loss_and_gives_the_same_losses_again():
    kernel = make_kernel(10, CONFIG.vocab_size, contiguous=True)
    batch = jax.device_put(make_batch(SETTING, CONFIG, kernel))
    graphdef, parameters = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    optimizer = make_optimizer("adamw", optax.constant_schedule(1e-2), weight_decay=0.0, clip_norm=1.0)
    step = jax.jit(make_step(graphdef, make_objective("smmd"), optimizer))

    def run() -> list[float]:
        state, losses = init_state(nnx.to_pure_dict(parameters), optimizer), []
        for _ in range(6):
            state, metrics = step(state, batch, kernel, {})
            losses.append(float(metrics["loss"]))
        return losses

    first, again = run(), run()
    assert np.isfinite(first).all() and first[-1] < 0.9 * first[0]
    np.testing.assert_allclose(first, again, rtol=1e-4)  # atomics of a GPU may add in another order


def test_generation_with_a_cache_is_the_argmax_of_the_plain_pass():
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    prompts = np.random.default_rng(0).integers(3, CONFIG.vocab_size, (2, 8))
    tokens = np.asarray(generate(model, prompts, attention_mask=np.ones_like(prompts), max_new_tokens=6))
    rows = np.concatenate([prompts, tokens], axis=1)
    logits = np.asarray(model(rows))[:, 7:-1]
    chosen = np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    # Within what rounding of the products can turn around.
    assert (chosen >= logits.max(-1) - 0.05).all()
