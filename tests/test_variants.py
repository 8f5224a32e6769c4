"""Every row of LOSSES under chex's variants: with and without jit, on the device, and mapped over devices."""

import chex
import jax
import numpy as np
import pytest
from absl.testing import parameterized

from smmd_jax import LOSSES, cross_entropy_loss, make_numeric_kernel, make_numeric_vocab

VOCAB = make_numeric_vocab({str(digit): 3 + digit for digit in range(10)})


@pytest.mark.slow
class VariantsTest(chex.TestCase, parameterized.TestCase):
    @chex.all_variants
    @parameterized.parameters(*LOSSES)
    def test_variant_equals_eager(self, row):
        rng = np.random.default_rng(0)
        logits = rng.normal(size=(6, 16)).astype(np.float32)
        targets = np.array([4, 12, 0, 7, 3, 15], np.int32)
        kernel = make_numeric_kernel(VOCAB, terms=LOSSES[row].terms or "smmd")
        wanted = LOSSES[row].function(logits, targets, kernel)
        found = self.variant(LOSSES[row].function)(logits, targets, kernel)
        chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_narrow_and_wide_target_dtypes_mean_the_same_tokens():
    logits = jax.random.normal(jax.random.key(0), (2, 300))
    wanted = cross_entropy_loss(logits, np.array([5, 100], np.int32))
    for dtype in ("uint8", "int8", "int16", "uint16", "uint32", "int64"):
        chex.assert_trees_all_equal(cross_entropy_loss(logits, np.array([5, 100], dtype)), wanted)
    low = logits.astype("bfloat16")
    gradient = jax.grad(lambda x: cross_entropy_loss(x, np.array([5, 100], "uint8")).sum())(low)
    assert ((np.asarray(gradient, np.float32) < 0).sum(1) == 1).all()
    assert np.isnan(cross_entropy_loss(logits, np.array([2**32 + 5, 5]))).tolist() == [True, False]
