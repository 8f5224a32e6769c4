"""Mixed precision: what is narrow stays narrow on both ways, what is summed is float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from smmd_jax.backbones import Decoder
from smmd_jax.backbones.products import wide_einsum
from tests.decoders import FAMILIES
from tests.programs import equations

SPECS = [("td,dv->tv", (5, 4), (4, 3)), ("bgrtc,bgsc->bgrts", (2, 2, 3, 4, 6), (2, 2, 5, 6))]


@pytest.mark.parametrize("spec, left, right", SPECS)
@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16])
def test_narrow_products_have_float32_sums_and_gradients_near_the_exact_ones(spec, left, right, stored):
    rng = np.random.default_rng(0)
    left, right = jnp.asarray(rng.normal(size=left), jnp.bfloat16), jnp.asarray(rng.normal(size=right), stored)
    exact = tuple(array.astype(jnp.bfloat16).astype(jnp.float32) for array in (left, right))
    found, pull = jax.vjp(lambda a, b: wide_einsum(spec, a, b), left, right)
    wanted, exact_pull = jax.vjp(lambda a, b: jnp.einsum(spec, a, b), *exact)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    gradient = jnp.asarray(rng.normal(size=found.shape), jnp.bfloat16).astype(jnp.float32)
    for one, other, dtype in zip(pull(gradient), exact_pull(gradient), (jnp.bfloat16, stored), strict=True):
        assert one.dtype == dtype
        tolerance = 1e-6 if dtype == jnp.float32 else 2**-8  # rounded once, to the dtype that is stored
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=tolerance, atol=tolerance)


def test_float32_operands_are_a_plain_einsum():
    left, right = jnp.ones((2, 3)), jnp.ones((3, 4), jnp.bfloat16)
    assert "custom_vjp" not in str(jax.make_jaxpr(lambda a, b: wide_einsum("td,dv->tv", a, b))(left, right))


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_every_product_of_a_bfloat16_model_has_bfloat16_operands_on_both_ways(param_dtype, scan_layers):
    make = lambda: Decoder(
        FAMILIES["gemma3_text"], rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=param_dtype, scan_layers=scan_layers
    )
    graphdef, state = nnx.split(nnx.eval_shape(make))
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def loss(parameters, ids):
        model = nnx.merge(graphdef, parameters)
        hidden = model.hidden(ids)
        assert hidden.dtype == jnp.bfloat16
        return jax.nn.logsumexp(model.logits(hidden), axis=-1).mean()

    parameters = nnx.to_pure_dict(state)
    program = jax.make_jaxpr(jax.value_and_grad(loss))(parameters, ids)
    operands = {
        operand.aval.dtype.name
        for equation in equations(program.jaxpr)
        if equation.primitive.name == "dot_general"
        for operand in equation.invars
    }
    assert operands == {"bfloat16"}
    assert program.out_avals[0].dtype == jnp.float32
    assert {aval.dtype for aval in program.out_avals[1:]} == {jnp.dtype(param_dtype)}
