"""A loss of one's own: found by its path, counted at numeric targets alone, and tried before a run begins."""

import dataclasses
import functools
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

import smmd_jax
from smmd_jax import LOSSES, LossSpec, numeric_mask
from smmd_jax.operands import live_rows

_SHAPE = (2, 3)  # of the targets that a loss is tried with
_FOLDERS = (*(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")),
            *(str(Path(file).parent) for file in (jax.__file__, smmd_jax.__file__, __file__)))  # fmt: skip
_NOT_THE_USERS = ("<", *(folder + os.sep for folder in _FOLDERS))


def find_own_loss(path: str) -> LossSpec:
    """Import a loss of one's own.

    Args:
      path: "package.module:function" with the call (logits, targets, kernel, *, mask) -> one value per position; the
        module may hold a `LossSpec` of that name instead.

    Returns:
      A row as those of `LOSSES`; for a function with the weight 1.0, added to cross entropy.

    Raises:
      ValueError: not such a path, a module that cannot be imported, or no function there.

    Example:
      >>> find_own_loss("smmd_jax.losses.ntl:ntl_was_loss").default_weight
      1.0
    """
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ValueError(
            f"unknown loss {path!r}; known: {', '.join(LOSSES)}, or package.module:function for a loss of your own."
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        place = _place(error, module_name)
        raise ValueError(
            f"loss {path!r}: {module_name} cannot be imported{place}: {_reason(error)}. Its folder must be the present "
            "one or on PYTHONPATH; --debug shows the trace."
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"loss {path!r} cannot be imported: {module_name} has no {name}.")
    found = getattr(module, name)
    if not isinstance(found, LossSpec):
        if not callable(found):
            raise ValueError(f"loss {path!r} is a {type(found).__name__}; wanted a function or a LossSpec.")
        found = LossSpec(function=found, terms="smmd", default_weight=1.0, source=path)
    return found


def at_numbers(spec: LossSpec) -> LossSpec:
    """Make a loss of positions count where the target is numeric, as those of the table do; sequences stay as they are.

    Elsewhere it is 0 whatever the function gives there, NaN too, in the gradient neither: the step divides the sum by
    the number of numeric targets.
    """
    if spec.needs == "sequence":
        return spec

    @functools.wraps(spec.function)
    def function(logits, targets, kernel, *, mask=None):
        numeric = numeric_mask(targets, kernel, mask=mask)
        losses = spec.function(live_rows(logits, numeric), targets, kernel, mask=mask)
        return jnp.where(numeric, losses, 0.0)

    def columns(scores, match, kernel):
        numeric = match.any(-1)
        return jnp.where(numeric, spec.columns(live_rows(scores, numeric), match, kernel), 0.0)

    return dataclasses.replace(spec, function=function, columns=columns if spec.columns else None)


def check_own_loss(path: str, kernel: Any, vocab_size: int) -> None:
    """Trace a loss of one's own: a mean in the place of one value per position would train, and on something else.

    Args:
      path: as for `find_own_loss`.
      kernel: what the loss is called with.
      vocab_size: V.

    Raises:
      ValueError: it takes other arguments, fails in its own code (file and line are named), or gives another shape.
    """
    spec = find_own_loss(path)
    like = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct((*_SHAPE, *shape), dtype)
    mask, numbers = like(dtype=jnp.bool_), kernel.token_ids.shape[0]
    options = {"segment_ids": like(dtype=jnp.int32)} if spec.needs == "sequence" else {}
    words = ", segment_ids [B, T]" if options else ""
    wanted = _SHAPE[:1] if spec.needs == "sequence" else _SHAPE
    call = f"(logits [B, T, V], targets [B, T], kernel, *, mask [B, T]{words})"
    operands = (like(vocab_size), like(dtype=jnp.int32), kernel)
    _try(path, call, spec.function, operands, {"mask": mask, **options}, wanted)
    if spec.columns is not None:
        operands = (like(numbers), like(numbers, dtype=jnp.bool_), kernel)
        call = f"(scores [B, T, N], match [B, T, N], kernel{words})"
        _try(f"{path}, columns", call, spec.columns, operands, options, wanted)


def _try(
    path: str, call: str, function: Callable[..., Array], operands: tuple, options: dict, wanted: tuple[int, ...]
) -> None:
    what = f"loss {path}"
    try:
        inspect.signature(function).bind(*operands, **options)
    except TypeError as error:
        raise ValueError(f"{what} cannot be called as {call}: {error}.") from error
    except ValueError:  # a function that does not tell its arguments
        pass
    try:
        found = jax.eval_shape(function, *operands, **options)
    except Exception as error:
        place = _place(error, path.partition(":")[0])
        raise ValueError(
            f"{what} fails in its own code{place}: {_reason(error)}. It was tried with targets of shape "
            f"{list(_SHAPE)}; --debug shows the trace."
        ) from error
    if not hasattr(found, "shape"):
        raise ValueError(f"{what} gives a {type(found).__name__}; wanted one array.")
    if found.shape != wanted:
        raise ValueError(
            f"{what} gives shape {list(found.shape)} for targets of shape {list(_SHAPE)}; wanted {list(wanted)}, one "
            f"value per {'position' if wanted == _SHAPE else 'sequence'}, unreduced: the step divides by the counts of "
            "the whole batch."
        )


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'without a message'}"


def _place(error: Exception, module_name: str) -> str:
    """Name the innermost line of the user's own code, as ", FILE, line N"; empty where the error passed none."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    beside = Path(file).parent if file else None
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).parent == beside or not frame.filename.startswith(_NOT_THE_USERS)
    ]
    return f", {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
