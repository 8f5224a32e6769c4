"""What a traced or compiled program does: its equations, its arrays, its temporaries."""

import jax
from jax.extend.core import jaxprs_in_params


def equations(jaxpr):
    """Every equation of a jaxpr, those of loops, branches and calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def live(jaxpr):
    """The jaxpr without equations whose results nobody reads, which XLA drops; not inside loops and calls."""
    read, kept = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if any(id(out) in read for out in equation.outvars):
            read.update(map(id, equation.invars))
            kept.append(equation)
    return jaxpr.replace(eqns=kept[::-1])


def shapes(function, *operands):
    """The shapes of all arrays that the traced function makes, at any depth."""
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    return {out.aval.shape for equation in equations(jaxpr) for out in equation.outvars if hasattr(out.aval, "shape")}


def products(jaxpr, shape, branch=max):
    """How many matrix products with an operand of this shape one run takes: of branches, the one with the most.

    `branch=min` takes the one with the fewest instead; a loop counts once.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += any(operand.aval.shape == shape for operand in equation.invars)
        inner = [products(each, shape, branch) for each in jaxprs_in_params(equation.params)]
        total += branch(inner, default=0) if equation.primitive.name == "cond" else sum(inner)
    return total


def temporaries(function, *operands) -> int:
    """Bytes of the temporaries of the compiled function; operands may be `jax.ShapeDtypeStruct`."""
    return jax.jit(function).lower(*operands).compile().memory_analysis().temp_size_in_bytes
