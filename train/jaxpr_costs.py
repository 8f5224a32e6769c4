"""What a traced program costs before any compiler sees it: its matrix products, loops multiplied out."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params


def product_flops(function: Callable, *operands: Any) -> float:
    """Count the operations of the matrix products of a function, 2 a multiplication and addition, over all devices.

    Of a branch the dearest counts, of a loop without a known length one turn, of a `shard_map` every shard.
    Convolutions count as products of a window's positions.

    Args:
      operands: arrays or ShapeDtypeStruct.

    Example:
      >>> array = jax.ShapeDtypeStruct((2, 3), "float32")
      >>> product_flops(lambda a: a @ a.T, array)
      24.0
    """
    return _flops(jax.make_jaxpr(function)(*operands).jaxpr)


def _flops(jaxpr: Jaxpr) -> float:
    total = 0.0
    for equation in _live(jaxpr):
        name = equation.primitive.name
        inner = [_flops(each) for each in jaxprs_in_params(equation.params)]
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2.0 * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            out_of, kernel = equation.params["dimension_numbers"].rhs_spec[0], equation.invars[1].aval.shape
            total += 2.0 * equation.outvars[0].aval.size * math.prod(kernel) / kernel[out_of]
        elif name == "scan":
            total += equation.params["length"] * sum(inner)
        elif name == "cond":
            total += max(inner)
        elif name == "shard_map":
            sizes = equation.params["mesh"].shape
            total += math.prod(sizes[axis] for axis in equation.params["newly_manual_axes"]) * sum(inner)
        else:
            total += sum(inner)
    return total


def _live(jaxpr: Jaxpr) -> list:
    """The equations whose results are read: a trace also holds what differentiation made and nobody needs."""
    read, kept = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(out) in read for out in equation.outvars):
            read.update(map(id, equation.invars))
            kept.append(equation)
    return kept
