"""Programs compiled for TPUs that are not there: head and loss as the step takes them, and small steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from smmd_jax import LOSSES
from smmd_jax.backbones import Decoder, DecoderConfig, parameter_shardings
from train.hlo_costs import costs_of
from train.hlo_text import read_program
from train.objective import make_objective
from train.partition import batch_sharding, make_mesh, replicated
from train.planning import kernel_like
from train.program import batch_like
from train.topologies import find_topology

SLICE = "v5e:2x4"


@functools.cache
def devices(name: str = SLICE):
    return find_topology(name).devices()


@dataclasses.dataclass(frozen=True)
class Measured:
    """A compiled program: cost_analysis's own sums, temporaries, and what the reader of its text finds."""

    flops: float
    bytes: float
    temporaries: int
    program: object
    cheapest: object
    dearest: object
    text: str


def measure(function, *operands, donate=()) -> Measured:
    compiled = jax.jit(function, donate_argnums=donate).lower(*operands).compile()
    text, analysis = compiled.as_text(), compiled.cost_analysis()
    program = read_program(text)
    return Measured(
        flops=analysis["flops"],
        bytes=analysis["bytes accessed"],
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
        program=program,
        cheapest=costs_of(program, branch=min),
        dearest=costs_of(program, branch=max),
        text=text,
    )


@functools.cache
def head_and_loss(
    loss: str, *, vocab_size: int, numeric_tokens: int, tied: bool = True, rows: int = 8, length: int = 1024,
    width: int = 2048, mesh_sizes: tuple = (("data", 2), ("tensor", 4)), logits: str = "dense",
) -> Measured:
    """Value and gradients, by hidden states and parameters, of what the step minimises, from the hidden states on."""
    config = DecoderConfig(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=8, num_layers=1, num_heads=1, head_dim=2, tied=tied
    )
    mesh = make_mesh(dict(mesh_sizes), devices())
    make = lambda: Decoder(
        config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rows=batch_sharding(mesh)
    )
    graphdef, state = nnx.split(nnx.eval_shape(make))
    shapes = nnx.to_pure_dict(state)
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    shardings = parameter_shardings(shapes, mesh)
    parameters = jax.tree.map(place, shapes, shardings)
    hidden = jax.ShapeDtypeStruct(
        (rows, length, width), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    )
    kernel = jax.tree.map(
        lambda leaf: place(leaf, replicated(mesh)), kernel_like(numeric_tokens, terms=LOSSES[loss].terms or "smmd")
    )
    objective = dataclasses.replace(make_objective(loss), logits=logits, mesh=mesh)

    def total(parameters, hidden, batch, kernel):
        coefficients = objective.coefficients(objective.counts(batch, kernel))
        return objective.total(nnx.merge(graphdef, parameters), hidden, batch, kernel, coefficients)[0]

    def both(parameters, hidden, batch, kernel):
        value, (by_parameters, by_hidden) = jax.value_and_grad(total, (0, 1))(parameters, hidden, batch, kernel)
        by_parameters = jax.tree.map(jax.lax.with_sharding_constraint, by_parameters, shardings)
        return value, by_parameters, by_hidden

    return measure(both, parameters, hidden, batch_like(rows, length, mesh), kernel)


def arrays_of(measured: Measured):
    """Every array of a program, those inside fusions too."""
    return [
        array for computation in measured.program.computations.values()
        for each in computation.instructions.values() for array in each.arrays
    ]  # fmt: skip
