"""Golden numbers: the published tables, and values worked out by hand for two and three numbers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smmd_jax import (
    LOSSES,
    cross_entropy_loss,
    default_alpha,
    digit_distribution,
    dist2_loss,
    gce_loss,
    graph_laplacian,
    laplace_kernel,
    make_numeric_kernel,
    make_numeric_vocab,
    ntil_terms,
    ntl_mse_loss,
    ntl_was_loss,
    rbf_kernel,
    smmd_loss,
    smmd_terms,
)

DIGITS = np.arange(10.0)
HUGE = 300.0  # exp(-300) is exactly 0 in float32: the softmax is one-hot to the bit


def digit_kernel(**options):
    """Digits on ids 0 ... 9, so that logits of width ten have no text."""
    return make_numeric_kernel(make_numeric_vocab([str(digit) for digit in range(10)]), **options)


def one_hot_logits(index, size=10):
    return HUGE * jnp.eye(size)[index]


# the kernel of the digits


def test_first_row_of_the_digit_kernel():
    row = [1, 0.882497, 0.606531, 0.324652, 0.135335, 0.043937, 0.011109, 0.002187, 0.000335, 0.000040]
    np.testing.assert_allclose(rbf_kernel(DIGITS)[0], row, atol=5e-7)


def test_degrees_of_the_digit_kernel():
    half = [3.006624, 3.889081, 4.495276, 4.817741, 4.941968]
    np.testing.assert_allclose(np.diag(graph_laplacian(rbf_kernel(DIGITS))) + 1, half + half[::-1], atol=5e-7)


def test_alpha_counts_the_diagonal():
    alpha = default_alpha(rbf_kernel(DIGITS))
    assert alpha == pytest.approx(0.1181994508, abs=5e-11)
    assert alpha != pytest.approx(0.1547921435, abs=1e-3)  # the mean degree without K_ii


ALL_DIGIT_STRINGS = [*range(10), *range(100), *range(1000)]
SPECTRA = {
    # name: values, options, mean degree, alpha, eigenvalues of K [min, max], of M [min, max]
    "digits": (range(10), {}, 4.2301380980, 0.1181994508, (1.333e-05, 4.411634), (0.459206, 4.429276)),
    "sigma 0.5": (range(10), {"sigma": 0.5}, 1.2441402714, 0.4018839447, (7.409e-01, 1.260281), (0.951158, 1.263643)),
    "sigma 1": (range(10), {"sigma": 1}, 2.3242505298, 0.2151231090, (5.162e-02, 2.412307), (0.569424, 2.423694)),
    "sigma 5": (range(10), {"sigma": 5}, 7.6540146904, 0.0653251947, (1.842e-12, 7.734803), (0.451705, 7.740032)),
    "hundred": (range(100), {}, 4.9349446981, 0.1013182580, (2.9e-08, 5.003831), (0.397525, 5.004687)),
    "thousand": (range(1000), {}, 5.0054253641, 0.0998916103, (2.7e-08, 5.013158), (0.392259, 5.013168)),
    "thousand rescaled": (
        *(range(1000), {"rescale": 9.0}, 325.6897654637, 0.0015352033),
        *((1.166e-01, 339.540386), (0.416292, 339.555910)),
    ),
    "digit strings": (ALL_DIGIT_STRINGS, {}, 6.0548731825, 0.0825781127, (-2e-15, 13.524221), (0.327903, 13.566320)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECTRA)
def test_alpha_and_spectra(name):
    values, options, mean_degree, alpha, gram_range, form_range = SPECTRA[name]
    gram = rbf_kernel(np.asarray(values, float), **options)
    assert gram.sum(axis=1).mean() == pytest.approx(mean_degree, abs=1e-10 * len(gram))
    assert default_alpha(gram) == pytest.approx(alpha, abs=1e-10)
    spectrum = np.linalg.eigvalsh(gram)
    # the table gives the smallest eigenvalues to two digits, and round-off moves them by 1e-15 * N
    np.testing.assert_allclose(spectrum[[0, -1]], gram_range, rtol=2e-2, atol=2e-12)
    assert spectrum[-1] == pytest.approx(gram_range[1], abs=1e-6)
    form = gram + default_alpha(gram) * graph_laplacian(gram)
    np.testing.assert_allclose(np.linalg.eigvalsh(form)[[0, -1]], form_range, atol=1e-6)


def test_laplacian_of_the_digits_has_one_zero_eigenvalue():
    spectrum = np.linalg.eigvalsh(graph_laplacian(rbf_kernel(DIGITS)))
    np.testing.assert_allclose(spectrum[[0, 1, -1]], [0, 0.824493, 4.922918], atol=1e-6)


@pytest.mark.slow
def test_repeated_values_make_the_kernel_singular_with_rank_1000_and_the_form_not():
    gram = rbf_kernel(np.asarray(ALL_DIGIT_STRINGS, float))
    assert np.sum(np.linalg.eigvalsh(gram) > 1e-9) == 1000


# mmd of a certain prediction at distance d from the target 500 among 0 ... 999, by plain and by rescaled distance
DISTANCE = [1, 2, 3, 8, 10, 50, 100, 300, 499]
PLAIN = [0.2350, 0.7869, 1.3507, 1.9993, 2.0000, 2.0000, 2.0000, 2.0000, 2.0000]
RESCALED = [0.2350, 0.2386, 0.2421, 0.2603, 0.2677, 0.4306, 0.6622, 1.5272, 1.9112]


@pytest.mark.parametrize(("rescale", "wanted"), [(None, PLAIN), (9.0, RESCALED)], ids=["plain", "rescaled"])
def test_mmd_by_distance_over_a_thousand_numbers(rescale, wanted):
    gram = rbf_kernel(np.arange(1000.0), rescale=rescale)
    np.testing.assert_allclose(2 - 2 * gram[500, 500 + np.array(DISTANCE)], wanted, atol=6e-5)


def test_a_band_of_five_without_rescaling_and_a_wide_one_with_it():
    values = np.arange(1000.0)
    assert rbf_kernel(values)[500, 510] == pytest.approx(4e-6, rel=0.1)
    assert rbf_kernel(values, rescale=9.0)[500, 600] == pytest.approx(0.669, abs=5e-4)


def test_rescaling_to_nine_is_the_identity_on_ten_digits():
    np.testing.assert_allclose(rbf_kernel(DIGITS, rescale=9.0), rbf_kernel(DIGITS), rtol=1e-14)
    np.testing.assert_allclose(laplace_kernel(DIGITS, rescale=9.0), laplace_kernel(DIGITS), rtol=1e-14)


# SMMD over the digits

UNIFORM = {0: (0.821688957382, 2.006624262097, 1.058870843127), 3: (0.459465555259, 3.817741272709, 0.910720476996)}
UNIFORM |= {9: UNIFORM[0], 5: (0.434620297920, 3.941967559408, 0.900558698519)}
CERTAIN = {
    # (target, prediction): mmd, smoothness, total
    (3, 4): (0.235006, 9.524703, 1.360821),
    (3, 7): (1.729329, 7.583688, 2.625717),
    (5, 4): (0.235006, 9.648929, 1.375504),
    (0, 1): (0.235006, 6.660699, 1.022297),
    (0, 6): (1.977782, 5.846584, 2.668845),
    (0, 9): (1.999920, 4.013329, 2.474293),
}
TABLE = [
    *((jnp.zeros(10), target, wanted, 2e-6) for target, wanted in UNIFORM.items()),
    *((one_hot_logits(guess), target, wanted, 2e-6) for (target, guess), wanted in CERTAIN.items()),
    (DIGITS / 2, 7, (0.227001, 3.809723, 0.677308), 2e-6),
    # equal halves on 3 and 5 with target 4: nearly invisible to the mmd alone
    (one_hot_logits(3) + one_hot_logits(5), 4, (0.0383, None, 0.9063), 5e-5),
    # the expected value is the target and yet half the mass is four off on either side
    (one_hot_logits(0) + one_hot_logits(8), 4, (None, None, 1.8721), 5e-5),
]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"target {case[1]}")
def test_published_values_of_the_terms(case):
    logits, target, wanted, tolerance = case
    terms = smmd_terms(jnp.asarray(logits), jnp.asarray(target), digit_kernel())
    for got, number in zip((terms.mmd, terms.smoothness, terms.total), wanted, strict=True):
        if number is not None:
            # the table has six decimals, float32 seven digits
            np.testing.assert_allclose(got, number, atol=tolerance, rtol=1e-6)
    assert terms.is_numeric


def test_modes_are_the_terms_and_smoothness_is_weighed_by_alpha():
    logits, target = one_hot_logits(7), jnp.asarray(3)
    for terms, wanted in {"mmd": 1.729329, "smoothness": 0.1181994508 * 7.583688, "smmd": 2.625717}.items():
        np.testing.assert_allclose(smmd_loss(logits, target, digit_kernel(terms=terms)), wanted, atol=2e-6)


def test_total_is_not_monotone_in_the_distance():
    logits, targets = jnp.stack([one_hot_logits(6), one_hot_logits(9)]), jnp.zeros(2, int)
    six, nine = smmd_loss(logits, targets, digit_kernel())
    assert six > nine


def test_largest_value_over_certain_predictions():
    logits = jnp.broadcast_to(one_hot_logits(jnp.arange(10))[:, None], (10, 10, 10))
    values = smmd_loss(logits, jnp.broadcast_to(jnp.arange(10), (10, 10)), digit_kernel())
    np.testing.assert_allclose(values.max(), 2.748792, atol=1e-6)
    np.testing.assert_allclose(values, values.T, atol=1e-6)
    np.testing.assert_array_equal(np.diag(values), 0)


def test_gradient_at_the_uniform_distribution_beside_cross_entropy():
    target, kernel = jnp.asarray(3), digit_kernel()
    numeric = 3 * jax.grad(smmd_loss)(jnp.zeros(10), target, kernel)
    ce = jax.grad(cross_entropy_loss)(jnp.zeros(10), target)
    assert jnp.linalg.norm(numeric) == pytest.approx(0.728, abs=5e-4)
    assert jnp.linalg.norm(ce) == pytest.approx(0.949, abs=5e-4)
    assert numeric @ ce / jnp.linalg.norm(numeric) / jnp.linalg.norm(ce) == pytest.approx(0.79, abs=5e-3)


@pytest.mark.parametrize(("ahead", "norm"), [(0, 0.278), (2, 0.389), (5, 0.149), (10, 1.2e-3), (15, 8e-6)])
def test_gradient_saturates_for_a_certain_wrong_prediction(ahead, norm):
    logits = jnp.zeros(10).at[9].set(ahead)
    gradient = jax.grad(smmd_loss)(logits, jnp.asarray(0), digit_kernel())
    assert float(jnp.linalg.norm(gradient)) == pytest.approx(norm, rel=0.05)


def test_mass_on_another_spelling_of_the_value_costs_no_mmd_but_much_smoothness():
    spellings = [*(f"{i}" for i in range(10)), *(f"{i:02d}" for i in range(100)), *(f"{i:03d}" for i in range(1000))]
    kernel = make_numeric_kernel(make_numeric_vocab(spellings, policy="all_integers"))
    logits, target = one_hot_logits(spellings.index("7"), 1110), jnp.asarray(spellings.index("007"))
    terms = smmd_terms(logits, target, kernel)
    np.testing.assert_allclose(terms.mmd, 0, atol=1e-6)
    np.testing.assert_allclose(kernel.alpha * terms.smoothness, 2.398, atol=5e-4)


# the baselines, by their published numbers


def test_expected_value_hides_what_the_wasserstein_distance_sees():
    logits, target = one_hot_logits(0) + one_hot_logits(8), jnp.asarray(4)
    np.testing.assert_allclose(ntl_mse_loss(logits, target, digit_kernel()), 0, atol=1e-6)
    np.testing.assert_allclose(ntl_was_loss(logits, target, digit_kernel()), 4, rtol=1e-6)


@pytest.mark.parametrize(("target", "weight", "floor"), [(3, 0.399, 1.4178), (0, 0.570, None)])
def test_gaussian_targets_have_their_minimum_at_the_gaussian_not_at_one_hot(target, weight, floor):
    wanted = rbf_kernel(DIGITS, sigma=1.0)[target]
    wanted = wanted / wanted.sum()
    assert wanted[target] == pytest.approx(weight, abs=5e-4)
    value, gradient = jax.value_and_grad(gce_loss)(jnp.log(jnp.asarray(wanted)), jnp.asarray(target), digit_kernel())
    np.testing.assert_allclose(gradient, 0, atol=1e-6)
    if floor is not None:
        assert float(value) == pytest.approx(floor, abs=5e-5)


def test_dist2_is_gce_at_sigma_root_half_minus_the_entropy_of_its_target():
    logits, target = jnp.asarray(np.cos(DIGITS), jnp.float32), jnp.asarray(6)
    wanted = np.exp(-((DIGITS - 6) ** 2))
    wanted = wanted / wanted.sum()
    entropy = -(wanted * np.log(wanted)).sum()
    gce = gce_loss(logits, target, digit_kernel(), sigma=math.sqrt(0.5))
    np.testing.assert_allclose(dist2_loss(logits, target, digit_kernel()), gce - entropy, atol=1e-6)


# by hand

# N = 2: values 0 and 1, K_01 = k = exp(-1/8). Uniform p and target 0: r = (-1/2, 1/2).
#   mmd = r'Kr = 1/4 - k/2 + 1/4 = (1 - k) / 2           smoothness = k (r_0 - r_1)^2 = k
#   every degree is 1 + k, so alpha = 1 / (2 (1 + k))     gradient: M r = m r with m = mmd / (r'r) + ..., see below
K01 = math.exp(-1 / 8)


def test_two_numbers_by_hand():
    kernel = make_numeric_kernel(make_numeric_vocab(["0", "1"]))
    terms = smmd_terms(jnp.zeros(2), jnp.asarray(0), kernel)
    np.testing.assert_allclose(kernel.alpha, 1 / (2 * (1 + K01)), rtol=1e-6)
    np.testing.assert_allclose(terms.mmd, (1 - K01) / 2, rtol=1e-6)
    np.testing.assert_allclose(terms.smoothness, K01, rtol=1e-6)
    np.testing.assert_allclose(terms.total, (1 - K01) / 2 + K01 / (2 * (1 + K01)), rtol=1e-6)


def test_gradient_of_two_numbers_by_hand():
    # With a = p_1 and target 0, r = (-a, a): loss = a^2 (2 (1 - k) + 4 alpha k) = c a^2; da/dz_1 = a (1 - a) = 1/4, so
    # dloss/dz = c * 2a * 1/4 = c / 4 for z_1 and minus that for z_0.
    kernel = make_numeric_kernel(make_numeric_vocab(["0", "1"]))
    c = 2 * (1 - K01) + 4 * K01 / (2 * (1 + K01))
    gradient = jax.grad(smmd_loss)(jnp.zeros(2), jnp.asarray(0), kernel)
    np.testing.assert_allclose(gradient, [-c / 4, c / 4], rtol=1e-6)


# N = 3: values 0, 1, 2 on ids 0, 1, 2 and one token of text on id 3; logits log(1/2), log(1/4), log(1/4) and log 1.
# Over the numbers p = (1/2, 1/4, 1/4), over everything (1/4, 1/8, 1/8 | 1/2). The target is 1: r = (1/2, -3/4, 1/4).
# With k = K_01 = exp(-1/8) and h = K_02 = exp(-1/2):
#   mmd = 1/4 + 9/16 + 1/16 + 2 (-3/8 k + 1/8 h - 3/16 k) = 7/8 - 9/8 k + 1/4 h
#   smoothness = k (1/2 + 3/4)^2 + h (1/2 - 1/4)^2 + k (3/4 + 1/4)^2 = 41/16 k + 1/16 h
#   degrees 1 + k + h, 1 + 2k, 1 + k + h: alpha = 1 / (2 (3 + 4k + 2h) / 3)
H = math.exp(-1 / 2)
MMD = 7 / 8 - 9 / 8 * K01 + H / 4
SMOOTHNESS = 41 / 16 * K01 + H / 16
ALPHA = 3 / (2 * (3 + 4 * K01 + 2 * H))
#   NTL: the expected value is 1/4 + 2/4 = 3/4, its error -1/4; the expected distance 1/2 + 1/4 = 3/4
#   GCE (sigma 1): w = (h, 1, h) / (1 + 2h), loss = -(w_0 log 1/4 + (w_1 + w_2) log 1/8) = log 8 - w_0 log 2
#   DIST2 (tau 1): g = (e, 1, e) / (1 + 2e), e = exp(-1), loss = sum g log g + log 8 - g_0 log 2
#   EMO: 1 - (k/4 + 1/8 + k/8)
#   digit entropy: (1/2 log(1 + 1/2) + 1/4 (log(1 + 1/4) + log 4) + 1/4 log(1 + 1/4)) / 3
G = np.exp([-1.0, 0.0, -1.0]) / (1 + 2 * math.exp(-1))
THREE = {
    "smmd": MMD + ALPHA * SMOOTHNESS,
    "mmd": MMD,
    "smoothness": ALPHA * SMOOTHNESS,
    "ntl_was": 3 / 4,
    "ntl_mse": 1 / 16,
    "ntl_mae": 1 / 4,
    "ntl_huber": 1 / 32,
    "gce": math.log(8) - H / (1 + 2 * H) * math.log(2),
    "dist2": float((G * np.log(G)).sum()) + math.log(8) - G[0] * math.log(2),
    "emo": 1 - (3 / 8 * K01 + 1 / 8),
    "del": (math.log(1.5) / 2 + math.log(5) / 4 + math.log(1.25) / 4) / 3,
    "ce": math.log(8),
}


@pytest.mark.parametrize("row", THREE)
def test_three_numbers_by_hand(row):
    vocab = make_numeric_vocab({"0": 0, "1": 1, "2": 2, "zero": 3})
    kernel = make_numeric_kernel(vocab, terms=LOSSES[row].terms or "smmd")
    logits = jnp.log(jnp.array([1 / 2, 1 / 4, 1 / 4, 1.0]))
    np.testing.assert_allclose(LOSSES[row].function(logits, jnp.asarray(1), kernel), THREE[row], rtol=2e-6)


def test_boost_weighs_the_target_twice():
    # as above with w = (h, 2, h) / (2 + 2h)
    vocab = make_numeric_vocab({"0": 0, "1": 1, "2": 2, "zero": 3})
    logits = jnp.log(jnp.array([1 / 2, 1 / 4, 1 / 4, 1.0]))
    wanted = math.log(8) - H / (2 + 2 * H) * math.log(2)
    np.testing.assert_allclose(gce_loss(logits, jnp.asarray(1), vocab, boost=2.0), wanted, rtol=2e-6)


# The number 12. At the tens 3/4 of the mass is on 3 and 1/4 on 1, at the ones all of it is on 2.
#   emd: tens 1.2 * (3/4 * 2) = 1.8, ones 0; mean 0.9.   X = 32, Y = 12: rel = 20/33, mag = log(33/13)
#   number level: yhat = 10 * (9/4 + 1/4) + 2 = 27, |27 - 12| / (27 + 12) = 5/13
TENS = jnp.full(11, -HUGE).at[3].set(math.log(3.0)).at[1].set(0.0)
TWELVE = jnp.stack([TENS, jnp.append(one_hot_logits(2), 0.0)])
TWELVE_TARGETS = jnp.array([1, 2])


def test_ntil_of_one_number_by_hand():
    kernel = digit_kernel()
    emd, rel, mag = jax.jit(ntil_terms)(TWELVE, TWELVE_TARGETS, kernel)[:3]
    np.testing.assert_allclose([emd, rel, mag], [0.9, 20 / 33, math.log(33 / 13)], rtol=1e-6)
    total = jax.jit(LOSSES["ntil"].function)(TWELVE, TWELVE_TARGETS, kernel)
    np.testing.assert_allclose(total, 0.9 + 0.2 * 20 / 33 + 0.2 * math.log(33 / 13), rtol=1e-6)


def test_number_level_of_one_number_by_hand():
    np.testing.assert_allclose(
        jax.jit(LOSSES["number_level"].function)(TWELVE, TWELVE_TARGETS, digit_kernel()), 5 / 13, rtol=1e-6
    )


def test_a_full_stop_splits_a_number_in_two():
    # "1.2" with the same predictions: two numbers of one digit. X = 3, Y = 1 and X = Y = 2:
    # emd (1.5 + 0) / 2, rel (2/4 + 0) / 2, mag (log 2 + 0) / 2
    logits = jnp.stack([TWELVE[0], jnp.zeros(11), TWELVE[1]])
    emd, rel, mag = jax.jit(ntil_terms)(logits, jnp.array([1, 10, 2]), digit_kernel())[:3]
    np.testing.assert_allclose([emd, rel, mag], [0.75, 0.25, math.log(2) / 2], rtol=1e-6)


def test_digit_distribution_by_hand():
    # two positions with target 1: certain of 4 and uniform; one of text; none with another target
    logits = jnp.stack([one_hot_logits(4, 11), jnp.zeros(11), one_hot_logits(2, 11)])
    total, count = digit_distribution(logits, jnp.array([1, 1, 10]), digit_kernel())
    wanted = np.zeros((10, 10))
    wanted[1] = 0.1 + np.eye(10)[4]
    np.testing.assert_allclose(total, wanted, atol=1e-6)
    np.testing.assert_array_equal(count, 2 * np.eye(10)[1])
