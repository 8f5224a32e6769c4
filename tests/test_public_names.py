"""The public names are those that DESIGN promises, each is documented, and every example in a docstring is true."""

import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import smmd_jax
import smmd_jax.backbones
import train
from smmd_jax import KERNELS, LOSSES

ROOT = Path(__file__).parents[1]


def _names(text):
    return text.split()


# DESIGN section 3.
PROMISED = _names("""
    NumericVocab make_numeric_vocab numeric_vocab_from_tokenizer
    rbf_kernel laplace_kernel shuffled_kernel random_kernel graph_laplacian default_alpha NumericKernel
    make_numeric_kernel
    smmd_loss smmd_loss_from_hidden smmd_loss_from_numeric_logits smmd_terms
    ntl_was_loss ntl_mse_loss gce_loss dist2_loss ntil_loss ntil_terms cross_entropy_loss
    chunked_cross_entropy_and_numeric chunked_loss_sums
    numeric_mask sum_and_count mean_from shift_targets check_targets digit_distribution
    LOSSES KERNELS
""")
# Beside it: further rows of LOSSES, what functions return and raise.
FURTHER = _names("""
    ntl_mae_loss ntl_huber_loss number_level_loss digit_entropy_loss emo_loss
    LossSpec SmmdTerms NtilTerms TokenizerError TokenRangeError
""")
FUNCTIONS = [name for name in smmd_jax.__all__ if inspect.isfunction(getattr(smmd_jax, name))]


def modules_of(package):
    found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    return [package.__name__, *(module.name for module in found)]


def test_the_package_exports_what_is_promised_and_nothing_else():
    assert sorted(smmd_jax.__all__) == sorted(PROMISED + FURTHER)
    assert len(set(smmd_jax.__all__)) == len(smmd_jax.__all__)
    assert all(hasattr(smmd_jax, name) for name in smmd_jax.__all__)


def test_completion_shows_the_public_names_and_no_module():
    assert set(dir(smmd_jax)) == {*smmd_jax.__all__, "__version__"}
    assert set(dir(smmd_jax.backbones)) == set(smmd_jax.backbones.__all__)
    assert not [name for package in (smmd_jax, smmd_jax.backbones) for name in dir(package)
                if inspect.ismodule(getattr(package, name))]  # fmt: skip


def test_every_row_of_the_tables_is_public():
    functions = {getattr(smmd_jax, name) for name in FUNCTIONS}
    # Plain cross entropy takes a kernel in the table, like the others; in public it does without.
    assert {spec.function for name, spec in LOSSES.items() if name != "ce"} <= functions
    assert set(KERNELS.values()) <= functions


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_are_documented(name):
    function = getattr(smmd_jax, name)
    text = inspect.getdoc(function)
    assert text and re.match(r"[A-Z][^\n]*\.$", text.splitlines()[0]), "one line in the imperative, with a full stop"
    assert "Args" in text and ("Returns" in text or inspect.signature(function).return_annotation is None)
    assert "Example:" in text and ">>>" in text
    if name.endswith(("_loss", "_kernel", "_terms")) or "_loss_" in name:
        assert "References:" in text or "References: as" in text or name == "cross_entropy_loss"
    arrays = [p for p in inspect.signature(function).parameters.values() if p.annotation is inspect.Parameter.empty]
    assert not arrays, "every parameter is annotated"


@pytest.mark.parametrize("name", ["NumericVocab", "NumericKernel", "LossSpec", "SmmdTerms", "NtilTerms"])
def test_public_classes_name_their_attributes(name):
    kind = getattr(smmd_jax, name)
    text = inspect.getdoc(kind)
    fields = getattr(kind, "_fields", None) or tuple(kind.__dataclass_fields__)
    assert "Attributes:" in text and all(re.search(rf"^\s+{field}: ", text, re.MULTILINE) for field in fields)


@pytest.mark.slow
@pytest.mark.parametrize("module", [*modules_of(smmd_jax), *modules_of(train)])
def test_examples_in_docstrings_are_true(module):
    result = doctest.testmod(importlib.import_module(module), verbose=False)
    assert result.failed == 0


@pytest.mark.slow
def test_the_annotations_of_arrays_are_true():
    """Golden numbers and examples once more, with the shapes and types of every signature checked at each call."""
    tests = ["tests/test_golden.py", "tests/test_public_names.py::test_examples_in_docstrings_are_true"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.annotations", *tests,
               "-k", "test_golden or smmd_jax and not backbones", "-m", "not nightly",
               "--jaxtyping-packages=smmd_jax,tests.annotations.checked"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_check_of_annotations_notices_a_false_one():
    code = "import tests.annotations as a\n@a.checked\ndef f(x: float) -> int: return x\nf(1)\nf(1.5)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "BeartypeCallHintReturnViolation" in done.stderr and "line 5" in done.stderr
