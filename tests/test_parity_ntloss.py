"""Number Token Loss against the authors' package ntloss 0.3.2: values and gradients on the same logits.

ntloss gets the logits in float64, so that differences are ours; `reweigh=False` is the paper's form (the package's
default mixes in the mass on text tokens, which no row of LOSSES does).
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smmd_jax import LOSSES, mean_from, numeric_mask, numeric_vocab_from_tokenizer, sum_and_count

pytestmark = pytest.mark.parity

TEXT = ("<pad>", "the", "sum", "is", ".", "+", "=", "ten")
# float32 softmax and sums of at most 32 terms, relative to the largest value that a loss can take
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def packages():
    """torch, transformers and ntloss, none of which is needed to collect this file."""
    names = ("torch", "transformers", "ntloss")
    return types.SimpleNamespace(**{name: pytest.importorskip(name) for name in names})


def make_tokenizer(packages, numbers):
    """A Hugging Face fast tokenizer whose words are the numbers, not in order, with text before, between and behind."""
    from tokenizers import Tokenizer, models

    numbers = list(np.random.default_rng(len(numbers)).permutation(numbers))
    words = [*TEXT[:3], *numbers[::2], *TEXT[3:6], *numbers[1::2], *TEXT[6:]]
    model = models.WordLevel({str(word): token_id for token_id, word in enumerate(words)}, unk_token=TEXT[0])
    return packages.transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


def make_case(packages, numbers, seed=0, lead=(4, 12), scale=3.0):
    """(tokenizer, its numeric vocabulary, float32 logits, targets with a text token in a third of the places)."""
    tokenizer = make_tokenizer(packages, numbers)
    vocab = numeric_vocab_from_tokenizer(tokenizer, policy="integers")
    assert len(vocab.values) == len(numbers)
    rng = np.random.default_rng(seed)
    logits = (scale * rng.standard_normal((*lead, len(tokenizer)))).astype(np.float32)
    text = tokenizer.convert_tokens_to_ids(list(TEXT))
    targets = np.where(rng.random(lead) < 2 / 3, rng.choice(np.asarray(vocab.token_ids), lead), rng.choice(text, lead))
    return tokenizer, vocab, logits, targets


def theirs(packages, loss, logits, targets, weights=None, **options):
    """Values of each position and the gradient of their sum, in float64; labels of -100 are ignored."""
    torch = packages.torch
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    weights = None if weights is None else torch.tensor(weights)
    values = loss(logits, torch.tensor(targets, dtype=torch.long), loss_weights=weights, **options)
    if not values.requires_grad:  # without a number ntloss returns a constant
        return values.numpy(), np.zeros(logits.shape)
    values.sum().backward()
    return values.detach().numpy(), logits.grad.numpy()


def ours(row, logits, targets, vocab, mask=None, **options):
    function = functools.partial(LOSSES[row].function, **options)
    values, pull = jax.vjp(lambda logits: function(logits, targets, vocab, mask=mask), jnp.asarray(logits))
    return np.asarray(values), np.asarray(pull(jnp.ones_like(values))[0])


def assert_close(found, wanted, largest=1.0):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE * max(1.0, largest))


def make_theirs(packages, row, tokenizer, digit_level):
    ntloss, functional = packages.ntloss, packages.torch.nn.functional
    options = {"reweigh": False, "digit_level": digit_level}
    if row == "ntl_was":
        return ntloss.NTLoss(tokenizer, **options)
    element = {
        "ntl_mse": functional.mse_loss,
        "ntl_mae": functional.l1_loss,
        # torch differentiates this one only between equal dtypes, and ntloss holds the targets in float32
        "ntl_huber": lambda guess, y, **options: functional.huber_loss(guess, y.to(guess.dtype), **options),
    }[row]
    return ntloss.NTLossDotProduct(tokenizer, loss_function=element, **options)


DIGITS, MORE = [str(digit) for digit in range(10)], [str(number) for number in range(0, 1000, 43)]
every_row = pytest.mark.parametrize("row", ["ntl_was", "ntl_mse", "ntl_mae", "ntl_huber"])


@every_row
@pytest.mark.parametrize("numbers", [DIGITS, MORE], ids=["digits", "0 to 989"])
def test_each_position_has_the_value_and_gradient_of_ntloss(packages, row, numbers):
    largest = float(numbers[-1]) ** (2 if row == "ntl_mse" else 1)
    for seed, scale in ((0, 3.0), (1, 0.1), (2, 12.0)):
        tokenizer, vocab, logits, targets = make_case(packages, numbers, seed, scale=scale)
        loss = make_theirs(packages, row, tokenizer, digit_level=numbers is DIGITS)
        wanted = theirs(packages, loss, logits, targets, reduction="none")
        assert wanted[0].max() > 0
        assert_close(ours(row, logits, targets, vocab), wanted, largest)


@every_row
def test_a_mask_is_their_ignored_label_and_the_mean_is_their_mean(packages, row):
    tokenizer, vocab, logits, targets = make_case(packages, DIGITS, seed=3)
    mask = np.random.default_rng(3).random(targets.shape) < 0.6
    loss = make_theirs(packages, row, tokenizer, digit_level=True)
    ignored = np.where(mask, targets, -100)
    assert_close(ours(row, logits, targets, vocab, mask), theirs(packages, loss, logits, ignored, reduction="none"), 81)
    values = LOSSES[row].function(logits, targets, vocab, mask=mask)
    mean = mean_from(*sum_and_count(values, numeric_mask(targets, vocab, mask=mask)))
    assert_close([mean], [theirs(packages, loss, logits, ignored)[0]], 81)


@every_row
def test_a_batch_without_numbers_is_zero_in_both(packages, row):
    tokenizer, vocab, logits, targets = make_case(packages, DIGITS, seed=4)
    text = np.full_like(targets, tokenizer.convert_tokens_to_ids("the"))
    loss = make_theirs(packages, row, tokenizer, digit_level=True)
    for one, other in zip(ours(row, logits, text, vocab), theirs(packages, loss, logits, text), strict=True):
        assert not one.any() and not other.any()


def test_number_level_is_theirs_per_number_averaged_over_each_sequence(packages):
    """ntloss gives a value at the first digit of each number, ours is their mean over a sequence.

    Where the two differ by design, and this test stays away: ntloss adds 1.2e-7 to |X| + |Y|, stops growing at
    twenty digits, sums the target's digits in float32 (2^24), and with `float_level=True` joins both sides of a dot.
    """
    tokenizer, vocab, logits, targets = make_case(packages, DIGITS, seed=5, lead=(6, 24))
    number = np.asarray(numeric_mask(targets, vocab))
    runs = [np.diff(np.flatnonzero(np.diff(np.pad(row.astype(int), 1))))[::2] for row in number]
    assert max(map(max, runs)) <= 7 and min(map(len, runs)) >= 2
    loss = packages.ntloss.NumberLevelLoss(tokenizer, reweigh=False)
    values, _ = theirs(packages, loss, logits, targets, reduction="none")
    wanted = [row.sum() / len(run) for row, run in zip(values, runs, strict=True)]
    # the gradient of each sequence's mean: their sum with weights 1 / count
    weights = np.stack([np.full(targets.shape[1], 1 / len(run)) for run in runs])
    _, gradient = theirs(packages, loss, logits, targets, weights, reduction="sum")
    assert_close(ours("number_level", logits, targets, vocab), (wanted, gradient))


def test_reweighing_is_theirs_alone(packages):
    """Their default is another loss: it grows with the mass on text, which ours leaves to cross entropy."""
    tokenizer, vocab, logits, targets = make_case(packages, DIGITS, seed=6)
    loss = packages.ntloss.NTLoss(tokenizer)
    reweighed, _ = theirs(packages, loss, logits, targets, reduction="none")
    p = np.asarray(jax.nn.softmax(logits))
    mass = p[..., np.asarray(vocab.token_ids)].sum(axis=-1)
    plain, _ = ours("ntl_was", logits, targets, vocab)
    wanted = np.where(numeric_mask(targets, vocab), mass * plain + 1.01 * 9 * (1 - mass), 0)
    np.testing.assert_allclose(reweighed, wanted, rtol=1e-5, atol=1e-5)
