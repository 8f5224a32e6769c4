"""Float64 NumPy versions of every loss, written from the papers' formulas and not from smmd_jax.

Shapes as in the package: logits [..., V] (sequences: [..., T, V]), targets [...], one value per position or sequence.
`REFERENCES` gives each row of `smmd_jax.LOSSES` its reference; a row without one fails the common suite.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numeric sub-vocabulary of a test: ids, values and K in one common order, and how M is made of K."""

    token_ids: np.ndarray
    values: np.ndarray
    gram: np.ndarray
    alpha: float
    terms: str = "smmd"

    @property
    def form(self) -> np.ndarray:
        """M: K + alpha Lap, K alone, or alpha Lap alone."""
        lap = laplacian(self.gram)
        return {
            "smmd": self.gram + self.alpha * lap,
            "mmd": self.gram,
            "smoothness": self.alpha * lap,
        }[self.terms]


def make_numbers(token_ids, values, gram=None, *, sigma=2.0, alpha=None, terms="smmd") -> Numbers:
    values = np.asarray(values, np.float64)
    gram = rbf_kernel(values, sigma) if gram is None else np.asarray(gram, np.float64)
    return Numbers(np.asarray(token_ids), values, gram, default_alpha(gram) if alpha is None else alpha, terms)


# softmax, kernels


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(logits))


def distances(values, rescale: float | None = None) -> np.ndarray:
    """|v_i - v_j|; with rescale = s the non-zero ones go linearly from [smallest, largest] onto [1, s]."""
    values = np.asarray(values, np.float64)
    distance = np.abs(np.subtract.outer(values, values))
    apart = distance > 0
    if rescale is None or not apart.any():
        return distance
    low, high = distance[apart].min(), distance.max()
    if high == low:
        return distance
    slope = (rescale - 1.0) / (high - low)
    return np.where(apart, 1.0 + slope * (distance - low), 0.0)


def rbf_kernel(values, sigma=2.0, rescale: float | None = None) -> np.ndarray:
    """K_ij = mean over sigma of exp(-d_ij^2 / (2 sigma^2))."""
    distance = distances(values, rescale)
    return np.mean([np.exp(-0.5 * (distance / one) ** 2) for one in np.atleast_1d(sigma)], axis=0)


def laplace_kernel(values, sigma=2.0, rescale: float | None = None) -> np.ndarray:
    """K_ij = mean over sigma of exp(-d_ij / sigma)."""
    distance = distances(values, rescale)
    return np.mean([np.exp(-distance / one) for one in np.atleast_1d(sigma)], axis=0)


def shuffled_kernel(values, permutation, sigma=2.0) -> np.ndarray:
    """The RBF kernel of the values after a permutation: same spectrum, wrong geometry."""
    return rbf_kernel(np.asarray(values)[np.asarray(permutation)], sigma)


def random_kernel(signs, power: int = 4) -> np.ndarray:
    """K_ij = <z_i, z_j>^power for rows of signs [N, F] normalised to length one."""
    rows = np.asarray(signs, np.float64)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows @ rows.T) ** power


def laplacian(gram: np.ndarray) -> np.ndarray:
    """Lap = D - K, with D the diagonal matrix of the row sums of K (its diagonal included)."""
    return np.diag(gram.sum(axis=1)) - gram


def default_alpha(gram: np.ndarray) -> float:
    """alpha = 1 / (2 * mean degree)."""
    return float(0.5 / gram.sum(axis=1).mean())


# what every loss needs to know of a target


def numeric_index(targets, numbers: Numbers, mask=None) -> tuple[np.ndarray, np.ndarray]:
    """(index of the target among the numbers, 0 where it is none; whether it is one)."""
    hit = np.asarray(targets)[..., None] == numbers.token_ids
    is_numeric = hit.any(axis=-1)
    if mask is not None:
        is_numeric = is_numeric & np.asarray(mask)
    return hit.argmax(axis=-1), is_numeric


def _numeric_case(logits, targets, numbers: Numbers):
    """(z [..., N], p = softmax(z), q = onehot(t), y [..., 1], is_numeric [...])."""
    index, is_numeric = numeric_index(targets, numbers)
    columns = np.asarray(logits, np.float64)[..., numbers.token_ids]
    one_hot = np.eye(len(numbers.values))[index]
    return columns, softmax(columns), one_hot, numbers.values[index][..., None], is_numeric


# position losses


def smmd_parts(logits, targets, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """(r'Kr, r'Lap r = 1/2 sum_ij K_ij (r_i - r_j)^2), 0 where the target is no number."""
    _, p, q, _, is_numeric = _numeric_case(logits, targets, numbers)
    r = p - q
    mmd = ((r @ numbers.gram) * r).sum(axis=-1)
    smoothness = ((r @ laplacian(numbers.gram)) * r).sum(axis=-1)
    return np.where(is_numeric, mmd, 0.0), np.where(is_numeric, smoothness, 0.0)


def smmd(logits, targets, numbers: Numbers) -> np.ndarray:
    """r'Mr with r = softmax(logits of the numbers) - onehot(target)."""
    _, p, q, _, is_numeric = _numeric_case(logits, targets, numbers)
    r = p - q
    return np.where(is_numeric, ((r @ numbers.form) * r).sum(axis=-1), 0.0)


def ntl_was(logits, targets, numbers: Numbers) -> np.ndarray:
    """sum_j p_j |v_j - y|."""
    _, p, _, y, is_numeric = _numeric_case(logits, targets, numbers)
    return np.where(is_numeric, (p * np.abs(numbers.values - y)).sum(axis=-1), 0.0)


def _expected_error(logits, targets, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
    _, p, _, y, is_numeric = _numeric_case(logits, targets, numbers)
    return (p * (numbers.values - y)).sum(axis=-1), is_numeric


def ntl_mse(logits, targets, numbers: Numbers) -> np.ndarray:
    """(sum_j p_j v_j - y)^2."""
    error, is_numeric = _expected_error(logits, targets, numbers)
    return np.where(is_numeric, error**2, 0.0)


def ntl_mae(logits, targets, numbers: Numbers) -> np.ndarray:
    """|sum_j p_j v_j - y|."""
    error, is_numeric = _expected_error(logits, targets, numbers)
    return np.where(is_numeric, np.abs(error), 0.0)


def ntl_huber(logits, targets, numbers: Numbers, delta: float = 1.0) -> np.ndarray:
    """e^2 / 2 for |e| <= delta, delta (|e| - delta / 2) beyond, with e = sum_j p_j v_j - y."""
    error, is_numeric = _expected_error(logits, targets, numbers)
    size = np.abs(error)
    return np.where(is_numeric, np.where(size <= delta, 0.5 * error**2, delta * (size - 0.5 * delta)), 0.0)


def gce(logits, targets, numbers: Numbers, sigma: float = 1.0, boost: float = 1.0) -> np.ndarray:
    """-sum_j w_j log p_j; w ~ exp(-(v_j - y)^2 / (2 sigma^2)), the target's times boost; p over all tokens."""
    _, _, q, y, is_numeric = _numeric_case(logits, targets, numbers)
    weight = np.exp(-0.5 * ((numbers.values - y) / sigma) ** 2) * (1.0 + (boost - 1.0) * q)
    weight = weight / weight.sum(axis=-1, keepdims=True)
    return np.where(is_numeric, -(weight * log_softmax(logits)[..., numbers.token_ids]).sum(axis=-1), 0.0)


def dist2(logits, targets, numbers: Numbers, tau: float = 1.0) -> np.ndarray:
    """KL(p_d || p); p_d = softmax(-(v_j - y)^2 / tau) over the numbers, p over the whole vocabulary."""
    _, _, _, y, is_numeric = _numeric_case(logits, targets, numbers)
    log_wanted = log_softmax(-((numbers.values - y) ** 2) / tau)
    log_ratio = log_wanted - log_softmax(logits)[..., numbers.token_ids]
    return np.where(is_numeric, (np.exp(log_wanted) * log_ratio).sum(axis=-1), 0.0)


def emo(logits, targets, numbers: Numbers) -> np.ndarray:
    """1 - sum_j p_j K[t, j], p over the whole vocabulary: mass on text earns nothing."""
    _, _, q, _, is_numeric = _numeric_case(logits, targets, numbers)
    p = softmax(logits)[..., numbers.token_ids]
    return np.where(is_numeric, 1.0 - (p * (q @ numbers.gram)).sum(axis=-1), 0.0)


def digit_entropy(logits, targets, numbers: Numbers) -> np.ndarray:
    """Mean over the numbers of p_j BCE(sigmoid(z_j), onehot(t)_j), p = softmax over the numbers."""
    z, p, q, _, is_numeric = _numeric_case(logits, targets, numbers)
    binary = q * np.logaddexp(0.0, -z) + (1.0 - q) * np.logaddexp(0.0, z)
    return np.where(is_numeric, (p * binary).mean(axis=-1), 0.0)


def cross_entropy(logits, targets, numbers: Numbers | None = None) -> np.ndarray:
    """-log p[target]."""
    return -np.take_along_axis(log_softmax(logits), np.asarray(targets)[..., None], axis=-1)[..., 0]


# sequence losses: exact integers, so numbers of any length are right


def digit_runs(targets, numbers: Numbers, mask=None) -> list[list[int]]:
    """Positions of each maximal run of digit targets of one sample; a masked position or another token ends a run."""
    _, is_digit = numeric_index(targets, numbers, mask)
    runs: list[list[int]] = []
    for position in np.flatnonzero(is_digit):
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(int(position))
        else:
            runs.append([int(position)])
    return runs


def _samples(segment_ids) -> list[slice]:
    """The stretches of equal segment id of one row; 0 is padding."""
    edges = [0, *(np.flatnonzero(np.diff(segment_ids)) + 1), len(segment_ids)]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if a < b and segment_ids[a] != 0]


def _per_sequence(function: Callable, logits, targets, mask, segment_ids) -> np.ndarray:
    """Call function(logits [T, V], targets [T], mask [T]) -> [K] on every sample; [..., K]: means over samples."""
    logits, targets = np.asarray(logits, np.float64), np.asarray(targets)
    mask = np.ones(targets.shape, bool) if mask is None else np.broadcast_to(mask, targets.shape)
    segment_ids = np.ones(targets.shape, int) if segment_ids is None else np.broadcast_to(segment_ids, targets.shape)

    def of_row(row):
        parts = [function(logits[row][s], targets[row][s], mask[row][s]) for s in _samples(segment_ids[row])]
        return np.mean(parts, axis=0) if parts else None

    lead = targets.shape[:-1]
    rows = [of_row(row) for row in np.ndindex(*lead)]
    size = next((len(row) for row in rows if row is not None), 1)
    return np.asarray([np.zeros(size) if row is None else row for row in rows]).reshape(*lead, size)


def _log_ratio(above: int | Fraction, below: int | Fraction) -> float:
    """log(above / below) for above >= below > 0 of any size, without losing the digits of a ratio near one."""
    ratio = Fraction(above) / Fraction(below)
    if ratio <= 2:
        return math.log1p(float(ratio - 1))
    return math.log(ratio.numerator) - math.log(ratio.denominator)


def ntil_parts(logits, targets, numbers: Numbers, mask=None, segment_ids=None) -> np.ndarray:
    """(emd, rel, mag) [..., 3] as the authors' code computes them, without noise.

    X: integer of the arg-max digits, Y: of the targets.  emd: mean over digits of 1.2^(n-i-1) sum_j p_ij |j - y_i|.
    rel: mean over runs of |X - Y| / (max(X, Y) + 1).  mag: mean over runs of log((max(X, Y) + 1) / (min(X, Y) + 1)).
    """

    def one(logits, targets, mask):
        runs = digit_runs(targets, numbers, mask)
        emd, rel, mag = [], [], []
        for run in runs:
            p = softmax(logits[run][:, numbers.token_ids])
            wanted = numbers.values[numeric_index(targets[run], numbers)[0]]
            growth = 1.2 ** np.arange(len(run) - 1, -1, -1)
            emd.extend(growth * (p * np.abs(numbers.values - wanted[:, None])).sum(axis=-1))
            x = _as_integer(numbers.values[p.argmax(axis=-1)])
            y = _as_integer(wanted)
            rel.append(float(Fraction(abs(x - y), max(x, y) + 1)))
            mag.append(_log_ratio(max(x, y) + 1, min(x, y) + 1))
        return [float(np.mean(part)) if part else 0.0 for part in (emd, rel, mag)]

    return _per_sequence(one, logits, targets, mask, segment_ids)


def _as_integer(digits) -> int:
    return int("".join(str(int(digit)) for digit in digits))


def ntil(logits, targets, numbers: Numbers, mask=None, segment_ids=None) -> np.ndarray:
    """emd + 0.2 rel + 0.2 mag."""
    return ntil_parts(logits, targets, numbers, mask, segment_ids) @ np.array([1.0, 0.2, 0.2])


def ntil_gradient(logits, targets, numbers: Numbers, mask=None) -> np.ndarray:
    """d ntil / d logits [..., T, V], straight through: digit_i moves as sum_j softmax(z_i / 0.1)_j v_j does.

    d rel / dX = (Y + 1) / (X + 1)^2 above the target, -1 / (Y + 1) below; d mag / dX = +-1 / (X + 1); both 0 at X = Y.
    """

    def one(logits, targets, mask):
        gradient = np.zeros_like(logits)
        runs = digit_runs(targets, numbers, mask)
        positions = sum(len(run) for run in runs)
        for run in runs:
            z = logits[run][:, numbers.token_ids]
            p, soft = softmax(z), softmax(z / 0.1)
            wanted = numbers.values[numeric_index(targets[run], numbers)[0]]
            distance = np.abs(numbers.values - wanted[:, None])
            growth = 1.2 ** np.arange(len(run) - 1, -1, -1)[:, None]
            emd = growth * p * (distance - (p * distance).sum(axis=-1, keepdims=True)) / positions
            x = _as_integer(numbers.values[p.argmax(axis=-1)])
            y = _as_integer(wanted)
            slope = Fraction(0)
            if x > y:
                slope = Fraction(y + 1, (x + 1) ** 2) + Fraction(1, x + 1)
            elif x < y:
                slope = -Fraction(1, y + 1) - Fraction(1, x + 1)
            place = np.array([float(slope * 10 ** (len(run) - 1 - i)) for i in range(len(run))])[:, None]
            expected = (soft * numbers.values).sum(axis=-1, keepdims=True)
            through = soft * (numbers.values - expected) / 0.1
            gradient[np.ix_(run, numbers.token_ids)] += emd + 0.2 * place * through / len(runs)
        return gradient.ravel()

    return _per_sequence(one, logits, targets, mask, None).reshape(np.shape(logits))


def number_level(logits, targets, numbers: Numbers, mask=None, segment_ids=None) -> np.ndarray:
    """Mean over runs of |yhat - y| / (|yhat| + |y|), yhat = sum_i 10^(n-i-1) sum_j p_ij v_j; 0 where both are 0."""

    def one(logits, targets, mask):
        losses = []
        for run in digit_runs(targets, numbers, mask):
            expected = (softmax(logits[run][:, numbers.token_ids]) * numbers.values).sum(axis=-1)
            guess = sum(Fraction(float(d)) * 10 ** (len(run) - 1 - i) for i, d in enumerate(expected))
            wanted = _as_integer(numbers.values[numeric_index(targets[run], numbers)[0]])
            losses.append(float(abs(guess - wanted) / (guess + wanted)) if guess + wanted else 0.0)
        return [float(np.mean(losses)) if losses else 0.0]

    return _per_sequence(one, logits, targets, mask, segment_ids)[..., 0]


# gradients


def central_difference(
    function: Callable[[np.ndarray], np.ndarray], logits, axes: int = 1, step=1e-3, where=None
) -> np.ndarray:
    """d function(logits)[...] / d logits[..., own axes] for a function that treats the leading axes one by one.

    Fourth-order stencil: (8 (f(+h) - f(-h)) - (f(+2h) - f(-2h))) / 12h. `axes` trailing axes belong to one value
    (1: a position, 2: a sequence). `where`: flat coordinates of those axes to differentiate; the others stay NaN.
    """
    logits = np.asarray(logits, np.float64)
    own = logits.shape[logits.ndim - axes :]
    size = math.prod(own)
    where = np.arange(size) if where is None else np.asarray(where)
    shifts = np.eye(size)[where].reshape(len(where), *([1] * (logits.ndim - axes)), *own)

    def difference(h):
        return np.asarray(function(logits + h * shifts)) - np.asarray(function(logits - h * shifts))

    slope = (8.0 * difference(step) - difference(2.0 * step)) / (12.0 * step)
    gradient = np.full((*logits.shape[: logits.ndim - axes], size), np.nan)
    gradient[..., where] = np.moveaxis(slope, 0, -1)
    return gradient.reshape(logits.shape)


def hessian(function: Callable[[np.ndarray], np.ndarray], logits, axes: int = 1, step=1e-3) -> np.ndarray:
    """d^2 function(logits)[...] / d logits[..., own axes]^2, flattened to [..., size, size]: the same stencil twice."""
    logits = np.asarray(logits, np.float64)
    lead, own = logits.shape[: logits.ndim - axes], logits.shape[logits.ndim - axes :]
    shifts = np.eye(math.prod(own)).reshape(-1, *([1] * len(lead)), *own)

    def difference(h):
        up, down = (central_difference(function, logits + sign * h * shifts, axes) for sign in (1, -1))
        return (up - down).reshape(len(shifts), *lead, -1)

    return np.moveaxis((8.0 * difference(step) - difference(2.0 * step)) / (12.0 * step), 0, -1)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A row's float64 value(logits, targets, numbers); its `gradient` where that is not the value's derivative.

    numeric: 0 off the numeric targets. sees_text: its softmax runs over the whole vocabulary. uses_gram: depends on the
    kernel. digits_only: defined for the ten digits alone.
    """

    value: Callable[..., np.ndarray]
    gradient: Callable[..., np.ndarray] | None = None
    numeric: bool = True
    sees_text: bool = False
    uses_gram: bool = False
    digits_only: bool = False


REFERENCES: dict[str, Reference] = {
    "smmd": Reference(smmd, uses_gram=True),
    "mmd": Reference(smmd, uses_gram=True),
    "smoothness": Reference(smmd, uses_gram=True),
    "ntl_was": Reference(ntl_was),
    "ntl_mse": Reference(ntl_mse),
    "ntl_mae": Reference(ntl_mae),
    "ntl_huber": Reference(ntl_huber),
    "ntil": Reference(ntil, gradient=ntil_gradient, digits_only=True),
    "number_level": Reference(number_level, digits_only=True),
    "gce": Reference(gce, sees_text=True),
    "dist2": Reference(dist2, sees_text=True),
    "emo": Reference(emo, sees_text=True, uses_gram=True),
    "del": Reference(digit_entropy),
    "ce": Reference(cross_entropy, numeric=False, sees_text=True),
}
