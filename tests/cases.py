"""Small problems shared by the loss tests: numbers on scattered ids, random logits, targets with text between them."""

import functools
import inspect

import jax
import numpy as np

from smmd_jax import KERNELS, LOSSES, NumericKernel, NumericVocab, make_numeric_kernel, make_numeric_vocab
from tests.reference import REFERENCES, Numbers, make_numbers

TEXT_TOKENS = 6
POSITION_ROWS = [name for name, spec in LOSSES.items() if spec.needs == "position"]
SEQUENCE_ROWS = [name for name, spec in LOSSES.items() if spec.needs == "sequence"]
NUMERIC_ROWS = [name for name in LOSSES if REFERENCES[name].numeric]


def width(vocab: NumericVocab) -> int:
    """V of the logits: every number and six tokens of text, some with ids above the largest number's."""
    return len(vocab.values) + TEXT_TOKENS


@functools.cache
def make_vocab(size: int) -> NumericVocab:
    """The integers 0 ... size - 1 on ids drawn from [0, size + 6) without order."""
    ids = np.random.default_rng(size).permutation(size + TEXT_TOKENS)[:size]
    return make_numeric_vocab({str(value): int(token_id) for value, token_id in enumerate(ids)})


@functools.cache
def make_kernel(row: str = "smmd", size: int = 10) -> NumericKernel:
    """The default kernel of a row of LOSSES over 0 ... size - 1."""
    return make_numeric_kernel(make_vocab(size), terms=terms_of(row))


def terms_of(row: str) -> str:
    return LOSSES[row].terms or "smmd"


def text_ids(vocab: NumericVocab) -> np.ndarray:
    return np.setdiff1d(np.arange(width(vocab)), np.asarray(vocab.token_ids))


def make_numbers_of(kernel: NumericKernel, terms: str, gram=None) -> Numbers:
    """The same numbers for the reference; `gram` in float64 where the test has it, else the kernel's own."""
    gram = np.asarray(kernel.gram, np.float64) if gram is None else gram
    alpha = None if terms == "mmd" else float(kernel.alpha)
    return make_numbers(np.asarray(kernel.token_ids), np.asarray(kernel.values), gram, alpha=alpha, terms=terms)


def make_batch(vocab: NumericVocab, lead: tuple[int, ...] = (2, 5), seed: int = 0, scale: float = 2.0):
    """Float32 logits [*lead, V] and int32 targets [*lead], seven of ten of them numbers."""
    rng = np.random.default_rng(seed)
    logits = (scale * rng.standard_normal((*lead, width(vocab)))).astype(np.float32)
    number = rng.choice(np.asarray(vocab.token_ids), lead)
    text = rng.choice(text_ids(vocab), lead)
    return logits, np.where(rng.random(lead) < 0.7, number, text).astype(np.int32)


def out_shape(row: str, lead: tuple[int, ...]) -> tuple[int, ...]:
    """One value per position, or per sequence."""
    return lead if LOSSES[row].needs == "position" else lead[:-1]


def kernel_options(size: int) -> list[dict]:
    """Every row of KERNELS with each option that it takes: three sigmas, rescaling where K stays definite."""
    found = []
    for name, function in KERNELS.items():
        accepted = inspect.signature(function).parameters
        sigmas = [{"sigma": sigma} for sigma in (2.0, 0.5, (1.0, 4.0))] if "sigma" in accepted else [{}]
        found += [{"kernel": name, **sigma} for sigma in sigmas]
        if "rescale" in accepted and size in (10, 50):
            found.append({"kernel": name, "rescale": 9.0})
        if "seed" in accepted:
            found.append({"kernel": name, "seed": 7})
    return found


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(function, logits, targets, kernel, weights, mask=None):
    """The loss's values and the gradient of sum(weights * values), in one program; the kernel is an argument."""
    value, pull = jax.vjp(lambda scores: function(scores, targets, kernel, mask=mask), logits)
    return value, pull(weights)[0]


def evaluate(row, logits, targets, *, mask=None, kernel=None, weights=None, compiled=True):
    """Values of a row and the gradient of their sum; compiled once for all tests with the same shapes."""
    kernel = make_kernel(row) if kernel is None else kernel
    weights = np.ones(out_shape(row, targets.shape), np.float32) if weights is None else weights
    call = value_and_gradient if compiled else value_and_gradient.__wrapped__
    return call(LOSSES[row].function, logits, targets, kernel, weights, mask)


def certain_logits(targets) -> np.ndarray:
    """Float32 logits over the digits and text that leave a target nothing to learn: exp(-160) is 0 in float32."""
    return np.where(np.arange(width(make_vocab(10))) == np.asarray(targets)[..., None], 80.0, -80.0).astype(np.float32)
