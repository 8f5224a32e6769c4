"""Kernels: against the float64 reference, positive semi-definite, refused where they would not be."""

import dataclasses
import functools
import inspect

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smmd_jax import (
    KERNELS,
    default_alpha,
    graph_laplacian,
    laplace_kernel,
    make_numeric_kernel,
    make_numeric_vocab,
    random_kernel,
    rbf_kernel,
    shuffled_kernel,
)
from tests import reference
from tests.cases import kernel_options, make_kernel, make_vocab

VALUE_SETS = {
    "one": [7.0],
    "two": [0.0, 1.0],
    "digits": np.arange(10.0),
    "fifty": np.arange(50.0),
    "decimals": [-3.5, 0.0, 0.25, 12.0, 999.0],
    "unordered with repeats": [5.0, 1.0, 5.0, 0.0, 3.0, 1.0],
}
SIGMAS = [2.0, 0.5, (1.0, 4.0), [0.25, 1, 30]]


def call(name, values, **options):
    """A row of KERNELS with those of the options that it takes."""
    accepted = inspect.signature(KERNELS[name]).parameters
    return KERNELS[name](values, **{key: value for key, value in options.items() if key in accepted})


# values


@pytest.mark.parametrize("sigma", SIGMAS, ids=str)
@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
@pytest.mark.parametrize(
    "pair", [(rbf_kernel, reference.rbf_kernel), (laplace_kernel, reference.laplace_kernel)], ids=["rbf", "laplace"]
)
def test_kernel_follows_its_formula(pair, values, sigma):
    function, formula = pair
    np.testing.assert_allclose(function(values, sigma), formula(values, sigma), rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("rescale", [1.5, 4.0, 9.0])
@pytest.mark.parametrize("size", [10, 50, 300])
@pytest.mark.parametrize(
    "pair", [(rbf_kernel, reference.rbf_kernel), (laplace_kernel, reference.laplace_kernel)], ids=["rbf", "laplace"]
)
def test_rescaled_kernel_follows_its_formula(pair, size, rescale):
    function, formula = pair
    values = np.arange(float(size))
    np.testing.assert_allclose(function(values, rescale=rescale), formula(values, 2.0, rescale), rtol=1e-12)


@pytest.mark.parametrize("values", [[4.0], [3.0, 3.0]], ids=["one value", "one value twice"])
def test_rescaling_leaves_values_without_distances_alone(values):
    np.testing.assert_array_equal(rbf_kernel(values, rescale=9.0), np.ones((len(values), len(values))))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_float64_numpy_arrays_whatever_comes_in(name):
    for values in (np.arange(7, dtype=np.int32), np.arange(7, dtype=np.float32), jnp.arange(7.0), list(range(7))):
        gram = call(name, values, seed=3)
        assert type(gram) is np.ndarray and gram.dtype == np.float64 and gram.shape == (7, 7)
        np.testing.assert_array_equal(gram, call(name, np.arange(7.0), seed=3))


@pytest.mark.parametrize("seed", range(4))
def test_shuffled_kernel_is_the_rbf_kernel_of_some_permutation(seed):
    gram = shuffled_kernel(np.arange(10.0), seed=seed)
    # The two least connected tokens carry the end values; the distances from one of them give all the others.
    end = gram.sum(axis=1).argmin()
    recovered = np.rint(np.sqrt(-8.0 * np.log(gram[end])))
    assert sorted(recovered) == list(range(10))
    np.testing.assert_allclose(gram, reference.shuffled_kernel(np.arange(10.0), recovered.astype(int)), rtol=1e-13)


def test_shuffled_kernel_keeps_spectrum_and_alpha_and_depends_on_the_seed_alone():
    plain, first, again, other = (
        rbf_kernel(np.arange(10.0)),
        *(shuffled_kernel(np.arange(10.0), seed=seed) for seed in (0, 0, 1)),
    )
    np.testing.assert_allclose(np.linalg.eigvalsh(first), np.linalg.eigvalsh(plain), atol=1e-12)
    assert default_alpha(first) == pytest.approx(default_alpha(plain), rel=1e-12)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other) and not np.array_equal(first, plain)


@pytest.mark.parametrize("features", [1, 4, 9])
def test_random_kernel_is_a_power_of_the_gram_matrix_of_unit_sign_vectors(features):
    values = np.arange(20.0)
    # An odd power keeps the signs, so the Gram matrix itself can be read off.
    gram = random_kernel(values, seed=5, features=features, power=1)
    np.testing.assert_allclose(np.diag(gram), 1, rtol=1e-14)
    np.testing.assert_allclose(gram * features, np.rint(gram * features), atol=1e-12)
    assert (np.rint(gram * features) % 2 == features % 2).all()
    spectrum, vectors = np.linalg.eigh(gram)
    assert spectrum.min() > -1e-12 and (spectrum > 1e-9).sum() <= features
    rows = vectors[:, -features:] * np.sqrt(np.maximum(spectrum[-features:], 0))
    for power in (2, 4, 5):
        wanted = reference.random_kernel(rows, power)
        np.testing.assert_allclose(random_kernel(values, seed=5, features=features, power=power), wanted, atol=1e-12)


def test_odd_power_of_the_release_has_negative_entries_and_an_indefinite_form():
    gram = random_kernel(np.arange(10.0), seed=0, power=5)
    assert gram.min() < 0
    form = gram + default_alpha(gram) * graph_laplacian(gram)
    assert np.linalg.eigvalsh(form).min() < -1e-3


@pytest.mark.parametrize("options", kernel_options(10), ids=str)
def test_laplacian_and_alpha_follow_their_formulas(options):
    gram = call(options["kernel"], np.arange(10.0), **options)
    lap = graph_laplacian(gram)
    np.testing.assert_allclose(lap, reference.laplacian(gram), atol=1e-15)
    np.testing.assert_allclose(lap.sum(axis=1), 0, atol=1e-14)
    assert lap.dtype == np.float64
    assert default_alpha(gram) == pytest.approx(reference.default_alpha(gram), rel=1e-14)


# NumericKernel


@pytest.mark.parametrize("terms", ["smmd", "mmd", "smoothness"])
@pytest.mark.parametrize("options", kernel_options(10), ids=str)
def test_form_is_k_plus_alpha_laplacian_k_alone_or_alpha_laplacian(options, terms):
    kernel = make_numeric_kernel(make_vocab(10), **options, terms=terms)
    gram = call(options["kernel"], np.arange(10.0), **options)
    wanted = reference.make_numbers(kernel.token_ids, kernel.values, gram, terms=terms)
    np.testing.assert_array_equal(kernel.gram, gram.astype(np.float32))
    # one rounding to float32, of a matrix made in float64
    np.testing.assert_allclose(kernel.form, wanted.form, rtol=1e-7, atol=1e-9)
    assert float(kernel.alpha) == pytest.approx(0.0 if terms == "mmd" else wanted.alpha, rel=1e-7)
    assert {array.dtype for array in (kernel.gram, kernel.alpha, kernel.form)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 2.0])
def test_alpha_can_be_given(alpha):
    kernel = make_numeric_kernel(make_vocab(10), alpha=alpha)
    gram = rbf_kernel(np.arange(10.0))
    assert float(kernel.alpha) == np.float32(alpha)
    np.testing.assert_allclose(kernel.form, gram + alpha * reference.laplacian(gram), rtol=1e-7)


def test_ids_and_values_are_the_vocabularys():
    kernel = make_kernel(size=50)
    np.testing.assert_array_equal(kernel.token_ids, kernel.vocab.token_ids)
    np.testing.assert_array_equal(kernel.values, np.arange(50))


def test_a_function_of_the_values_can_be_the_kernel():
    kernel = make_numeric_kernel(
        make_vocab(10), kernel=lambda values: 1.0 / (1.0 + np.abs(np.subtract.outer(values, values)))
    )
    assert float(kernel.gram[0, 4]) == np.float32(0.2)


def test_kernel_is_a_frozen_pytree_whose_static_part_can_be_hashed():
    kernel = make_kernel()
    leaves, structure = jax.tree.flatten(kernel)
    assert {np.shape(leaf) for leaf in leaves} == {(10,), (10, 10), ()}
    hash(structure)
    again = jax.tree.unflatten(structure, leaves)
    assert again.vocab.min_vocab_size == kernel.vocab.min_vocab_size
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernel.alpha = 1.0


def test_a_thousand_values_stay_distinct():
    kernel = make_kernel(size=1000)
    assert len(np.unique(kernel.values)) == 1000
    # neighbours differ by 0.1175 in K; bfloat16 would have merged 997, 998 and 999
    np.testing.assert_allclose(np.diag(kernel.gram, 1), np.exp(-0.125), rtol=1e-7)


# definite, symmetric

integer_sets = st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True)
float_sets = st.lists(st.floats(-1e3, 1e3, allow_nan=False, width=32), min_size=1, max_size=12)
sigmas = st.one_of(st.floats(1e-2, 1e2), st.lists(st.floats(1e-2, 1e2), min_size=1, max_size=3))


@hypothesis.given(values=st.one_of(integer_sets, float_sets), sigma=sigmas, seed=st.integers(0, 99))
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_and_its_form_are_symmetric_and_positive_semi_definite(name, values, sigma, seed):
    gram = call(name, values, sigma=sigma, seed=seed)
    round_off = 1e-13 * len(gram)
    np.testing.assert_allclose(np.diag(gram), 1, rtol=1e-14)
    np.testing.assert_allclose(gram, gram.T, atol=1e-15)
    assert gram.min() >= 0 and gram.max() <= 1 + 1e-14
    assert np.linalg.eigvalsh(gram).min() >= -round_off
    form = gram + default_alpha(gram) * graph_laplacian(gram)
    assert np.linalg.eigvalsh(form).min() >= -round_off
    # M = (1 - alpha) K + alpha D with every degree at least 1: definite even where K is singular
    assert np.linalg.eigvalsh(form).min() >= default_alpha(gram) - round_off


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("size", [2, 10, 100])
def test_stored_matrices_are_definite_up_to_float32_rounding(name, size):
    rng = np.random.default_rng(0)
    for sigma in (1e-3, 0.3, 2.0, 50.0, 1e3):
        options = {"sigma": sigma} if name in WITH_SIGMA else {}
        kernel = make_numeric_kernel(make_vocab(size), kernel=name, **options)
        residual = rng.dirichlet(np.ones(size), 200) - np.eye(size)[rng.integers(0, size, 200)]
        for matrix in (np.asarray(kernel.gram, np.float64), np.asarray(kernel.form, np.float64)):
            rounding = np.finfo(np.float32).eps * size * matrix.max()
            assert np.linalg.eigvalsh(matrix).min() >= -rounding
            assert np.einsum("si,ij,sj->s", residual, matrix, residual).min() >= -rounding


@pytest.mark.parametrize("name", ["rbf", "laplace"])
def test_a_value_with_two_spellings_makes_k_singular_and_not_m(name):
    vocab = make_numeric_vocab({"5": 3, "05": 9, "7": 1, "005": 4}, policy="all_integers")
    kernel = make_numeric_kernel(vocab, kernel=name)
    np.testing.assert_allclose(np.linalg.eigvalsh(np.asarray(kernel.gram, np.float64))[:2], 0, atol=1e-7)
    assert np.linalg.eigvalsh(np.asarray(kernel.form, np.float64)).min() > 0.1


# refusals


@hypothesis.given(values=integer_sets, rescale=st.floats(1.1, 30.0))
@pytest.mark.parametrize("name", ["rbf", "laplace"])
def test_rescale_is_refused_exactly_where_distances_would_shrink_below_a_shift(name, values, rescale):
    distance = reference.distances(values)
    apart = distance[distance > 0]
    refused = apart.size > 0 and (rescale - 1.0) * apart.min() > apart.max() - apart.min()
    if refused:
        with pytest.raises(ValueError, match="rescale"):
            KERNELS[name](values, rescale=rescale)
    else:
        assert np.linalg.eigvalsh(KERNELS[name](values, rescale=rescale)).min() >= -1e-12


@pytest.mark.parametrize(("size", "smallest"), [(9, -0.0232), (5, -0.3185), (3, -0.2480)])
def test_fewer_than_ten_integers_cannot_be_rescaled_to_nine(size, smallest):
    values = np.arange(float(size))
    assert np.linalg.eigvalsh(reference.rbf_kernel(values, 2.0, 9.0)).min() == pytest.approx(smallest, abs=5e-5)
    with pytest.raises(ValueError, match=r"indefinite|positive semi-definite"):
        rbf_kernel(values, rescale=9.0)
    with pytest.raises(ValueError, match=r"indefinite|positive semi-definite"):
        make_numeric_kernel(make_vocab(size), rescale=9.0)


BAD_SIGMAS = [
    0,
    0.0,
    -2.0,
    float("nan"),
    float("inf"),
    -float("inf"),
    [],
    (),
    [1.0, 0.0],
    [2.0, float("nan")],
    "2",
    "wide",
    None,
    True,
    1j,
    10**400,
    [1, 10**400],
    jnp.array(True),
]
WITH_SIGMA = [name for name, function in KERNELS.items() if "sigma" in inspect.signature(function).parameters]


@pytest.mark.parametrize("sigma", BAD_SIGMAS, ids=lambda sigma: repr(sigma)[:9])
@pytest.mark.parametrize("name", WITH_SIGMA)
def test_bad_sigma_is_refused_by_name_and_value(name, sigma):
    for build in (
        lambda: KERNELS[name](np.arange(3.0), sigma),
        lambda: make_numeric_kernel(make_vocab(3), kernel=name, sigma=sigma),
    ):
        with pytest.raises((ValueError, TypeError), match="sigma") as caught:
            build()
        assert repr(sigma) in str(caught.value) and "too large" not in str(caught.value)


@pytest.mark.parametrize("sigma", [1e-30, 1e-160, 5e-324])
def test_a_tiny_sigma_gives_the_identity_or_is_refused_but_never_nan(sigma):
    try:
        gram = rbf_kernel(np.arange(3.0), sigma)
    except ValueError as error:
        assert "sigma" in str(error)
    else:
        np.testing.assert_array_equal(gram, np.eye(3))


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")], [[1.0, 2.0]], 3.0], ids=repr)
@pytest.mark.parametrize("name", KERNELS)
def test_bad_values_are_refused(name, values):
    with pytest.raises(ValueError, match="values"):
        call(name, values)


@pytest.mark.parametrize("values", [["1", "2"], [1 + 2j]], ids=repr)
def test_values_that_are_no_real_numbers_are_a_type_error(values):
    with pytest.raises(TypeError, match="values"):
        rbf_kernel(values)


@pytest.mark.parametrize(
    "rescale",
    [1.0, 0.5, -3.0, float("nan"), float("inf"), "9", 10**400, jnp.array(9j)],
    ids=lambda rescale: str(rescale)[:9],
)
def test_bad_rescale_is_refused(rescale):
    with pytest.raises((ValueError, TypeError), match="rescale"):
        rbf_kernel(np.arange(20.0), rescale=rescale)


@pytest.mark.parametrize(
    "options", [{"features": 0}, {"features": 2.5}, {"power": 0}, {"power": -2}, {"seed": -1}], ids=str
)
def test_bad_options_of_the_random_kernel_are_refused_by_name(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        random_kernel(np.arange(4.0), **options)


@pytest.mark.parametrize(
    "matrix",
    [np.ones((2, 3)), np.ones(3), np.zeros((0, 0)), [[1.0, np.nan], [np.nan, 1.0]], [[1.0, 0.2], [0.9, 1.0]]],
    ids=str,
)
@pytest.mark.parametrize("function", [graph_laplacian, default_alpha])
def test_a_matrix_that_is_no_kernel_is_refused(function, matrix):
    with pytest.raises(ValueError, match="kernel"):
        function(matrix)


@pytest.mark.parametrize(
    ("options", "known"),
    [({"kernel": "gaussian"}, tuple(KERNELS)), ({"terms": "both"}, ("smmd", "mmd", "smoothness"))],
    ids=str,
)
def test_unknown_names_list_the_known_ones(options, known):
    with pytest.raises(ValueError, match=next(iter(options.values()))) as caught:
        make_numeric_kernel(make_vocab(3), **options)
    assert all(name in str(caught.value) for name in known)


def test_an_unknown_policy_lists_the_known_ones():
    with pytest.raises(ValueError, match="roman") as caught:
        make_numeric_vocab({"1": 0}, policy="roman")
    assert all(name in str(caught.value) for name in ("digits", "integers", "all_integers", "float"))


@pytest.mark.parametrize(
    "alpha", [-0.1, float("nan"), float("inf"), "0.5", True, [0.1], 1j, 10**400], ids=lambda alpha: str(alpha)[:9]
)
@pytest.mark.parametrize("terms", ["smmd", "smoothness"])
def test_bad_alpha_is_refused(terms, alpha):
    with pytest.raises((ValueError, TypeError), match="alpha"):
        make_numeric_kernel(make_vocab(3), alpha=alpha, terms=terms)


def test_alpha_has_no_meaning_for_the_mmd_alone():
    with pytest.raises(ValueError, match="alpha"):
        make_numeric_kernel(make_vocab(3), alpha=0.1, terms="mmd")


def ones_kernel(values):
    return np.ones((len(values), len(values)))


# Named by hand: the text of a function holds its address, which differs from worker to worker.
@pytest.mark.parametrize(
    "kernel", [*KERNELS, ones_kernel, functools.partial(ones_kernel)], ids=[*KERNELS, "function", "partial"]
)
@pytest.mark.parametrize("options", [{"sigma": 1.0}, {"sigma": [2.0]}, {"rescale": 9.0}], ids=str)
def test_an_option_that_the_kernel_does_not_take_is_refused_by_both_names(kernel, options):
    (name,) = options
    function = KERNELS.get(kernel, ones_kernel) if isinstance(kernel, str) else ones_kernel
    if name in inspect.signature(function).parameters:
        make_numeric_kernel(make_vocab(10), kernel=kernel, **options)
        return
    with pytest.raises(ValueError, match=name) as caught:
        make_numeric_kernel(make_vocab(10), kernel=kernel, **options)
    assert (kernel if isinstance(kernel, str) else "ones_kernel") in str(caught.value)


def test_the_default_sigma_is_no_option_given():
    make_numeric_kernel(make_vocab(10), kernel="random", sigma=2.0)
    make_numeric_kernel(make_vocab(10), kernel=ones_kernel, sigma=np.float32(2.0))


def test_a_kernel_function_is_given_the_options_that_it_takes_and_keeps_its_own_defaults():
    vocab = make_vocab(10)
    found = make_numeric_kernel(vocab, kernel=rbf_kernel, sigma=3.0, rescale=5.0)
    np.testing.assert_array_equal(found.gram, make_numeric_kernel(vocab, sigma=3.0, rescale=5.0).gram)
    own = make_numeric_kernel(vocab, kernel=lambda values, sigma=4.0: rbf_kernel(values, sigma))
    np.testing.assert_array_equal(own.gram, make_numeric_kernel(vocab, sigma=4.0).gram)


def test_a_kernel_function_that_is_not_positive_semi_definite_is_refused():
    indefinite = lambda values: np.exp(-np.abs(values[:, None] - values) ** 4 / 1e3)
    with pytest.raises(ValueError, match=r"K of kernel.*positive semi-definite.*eigenvalues"):
        make_numeric_kernel(make_vocab(10), kernel=indefinite)
    # K is definite and has negative entries, so that K + alpha (D - K) is not
    negative = lambda values: np.cos(values[:, None] - values) + 1e-3 * np.eye(len(values))
    for terms in ("smmd", "smoothness"):
        with pytest.raises(ValueError, match=r"M of kernel.*positive semi-definite.*negative"):
            make_numeric_kernel(make_vocab(10), kernel=negative, alpha=2.0, terms=terms)
    make_numeric_kernel(make_vocab(10), kernel=negative, terms="mmd")


@pytest.mark.parametrize("convert", [np.float32, np.float64, jnp.float32, np.ndarray.tolist], ids=str)
def test_a_definite_kernel_function_of_any_precision_is_taken(convert):
    found = make_numeric_kernel(make_vocab(100), kernel=lambda values: convert(rbf_kernel(values)))
    np.testing.assert_allclose(found.gram, make_numeric_kernel(make_vocab(100)).gram, atol=1e-7)


def test_the_odd_power_of_the_release_is_taken_as_it_is():
    kernel = make_numeric_kernel(make_vocab(10), kernel=functools.partial(random_kernel, power=5))
    assert np.linalg.eigvalsh(np.asarray(kernel.form, np.float64)).min() < -1e-3


@pytest.mark.parametrize("matrix", [[["a"]], [[1j]], [[1.0], [1.0, 2.0]], None], ids=str)
def test_a_matrix_of_something_else_is_a_type_error(matrix):
    for call in (graph_laplacian, lambda matrix: make_numeric_kernel(make_vocab(2), kernel=lambda values: matrix)):
        with pytest.raises(TypeError, match="kernel matrix must"):
            call(matrix)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array, jnp.int32, jnp.array], ids=lambda kind: kind.__name__)
def test_integers_of_any_kind_are_integers(kind):
    wanted = random_kernel(np.arange(5.0), seed=3, features=2, power=4)
    found = random_kernel(np.arange(5.0), seed=kind(3), features=kind(2), power=kind(4))
    np.testing.assert_array_equal(found, wanted)


def test_a_kernel_function_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        make_numeric_kernel(make_vocab(3), kernel=lambda values: np.eye(2))


def test_kernels_are_not_built_under_jit():
    with pytest.raises(TypeError, match="jit"):
        jax.jit(rbf_kernel)(jnp.arange(3.0))


def test_a_vocabulary_is_wanted_not_a_dictionary():
    with pytest.raises(TypeError, match="NumericVocab"):
        make_numeric_kernel({"1": 0})


def test_a_kernel_is_shown_in_one_line():
    kernel = make_numeric_kernel(make_numeric_vocab({str(digit): digit for digit in range(10)}))
    assert repr(kernel) == "NumericKernel(N=10, alpha=0.118199, policy='integers', values 0 to 9)"
    shapes = jax.eval_shape(lambda kernel: kernel, kernel)
    assert repr(shapes) == "NumericKernel(N=10, alpha=ShapeDtypeStruct, policy='integers', values 0 to 9)"
    shown = []
    jax.jit(lambda kernel: shown.append(repr(kernel)))(kernel)
    assert shown == ["NumericKernel(N=10, alpha=traced, policy='integers', values 0 to 9)"]
