"""Layers one after another or as one scan: the two forms of their parameters, and what the backward pass may save."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

# What a layer keeps for its backward pass; the rest is computed again. "none" means no rematerialisation.
REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

# (layer, hidden states, one layer's row of the tables, one layer's dropout key) -> hidden states
RunLayer = Callable[[nnx.Module, Array, Any, Array | None], Array]


def stack_layers(parameters: Mapping) -> dict:
    """Stack the parameters of all layers: layers/0/x [...], layers/1/x [...], ... -> layers/x [L, ...].

    Args:
        parameters: nested dict of arrays (NumPy stays NumPy), as `nnx.to_pure_dict` gives it for a model without
            `scan_layers`, or the trained part of one.

    Returns:
        A nested dict for a model with `scan_layers`; everything outside the layers is the same object.

    Raises:
        ValueError: no numbered layers, or layers that differ in their parameters.

    Example:
        >>> layers = {index: {"norm": np.full(3, index)} for index in range(2)}
        >>> stack_layers({"layers": layers})["layers"]["norm"].shape
        (2, 3)
    """
    layers = parameters.get("layers", {})
    indices = sorted(layers, key=int) if all(str(key).isdecimal() for key in layers) else []
    if [int(index) for index in indices] != list(range(len(layers))) or not layers:
        raise ValueError(f"layers are named {', '.join(map(str, layers)) or '(none)'}: wanted 0, 1, 2, ... to stack")
    first, *others = (layers[index] for index in indices)
    if any(jax.tree.structure(other) != jax.tree.structure(first) for other in others):
        raise ValueError("the layers do not all have the same parameters, so they cannot be stacked")
    return {**parameters, "layers": jax.tree.map(lambda *leaves: _library(leaves[0]).stack(leaves), first, *others)}


def unstack_layers(parameters: Mapping) -> dict:
    """Undo `stack_layers`: layers/x [L, ...] -> layers/0/x [...], layers/1/x [...], ...

    Raises:
        ValueError: layers that are not stacked, or stacks of unequal length.

    Example:
        >>> sorted(unstack_layers({"layers": {"norm": np.zeros((2, 3))}})["layers"])
        [0, 1]
    """
    layers = parameters.get("layers", {})
    if not layers or any(str(key).isdecimal() for key in layers):
        raise ValueError("the layers are not stacked: nothing to unstack")
    counts = {leaf.shape[0] for leaf in jax.tree.leaves(layers)}
    if len(counts) != 1:
        raise ValueError(f"the stacks have {sorted(counts)} layers: wanted one number")
    return {**parameters, "layers": {index: _row(layers, index) for index in range(counts.pop())}}


def stack_modules(layers: Sequence[nnx.Module]) -> nnx.Module:
    """Make one module of equal ones, whose parameters have an axis of layers in front."""
    states = [nnx.to_pure_dict(nnx.state(layer)) for layer in layers]
    return nnx.merge(nnx.graphdef(layers[0]), jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


def unstack_modules(stacked: nnx.Module, count: int) -> list[nnx.Module]:
    """Make one module per layer, each with its slice of the stacked parameters."""
    graphdef, parameters = _split(stacked)
    return [nnx.merge(graphdef, _row(parameters, index)) for index in range(count)]


def run_unrolled(
    layers: Sequence[nnx.Module],
    flat: Float[Array, "tokens D"],
    tables: Sequence[Any],
    keys: Array | None,
    run: RunLayer,
    *,
    remat: str,
) -> Float[Array, "tokens D"]:
    """Run layers with parameters of their own, one after another.

    Args:
        tables: what `run` gets as third argument, one entry a layer.
        keys: dropout keys [L], or None.
        remat: a name in REMAT.
    """
    for index, layer in enumerate(layers):
        key = None if keys is None else keys[index]
        if remat == "none":
            flat = run(layer, flat, tables[index], key)
            continue
        graphdef, parameters = _split(layer)

        def again(parameters, flat, table, key, graphdef=graphdef):
            return run(nnx.merge(graphdef, parameters), flat, table, key)

        flat = jax.checkpoint(again, policy=REMAT[remat])(parameters, flat, tables[index], key)
    return flat


def run_scanned(
    stacked: nnx.Module,
    flat: Float[Array, "tokens D"],
    tables: Sequence[Sequence[Any]],
    choices: Sequence[Sequence[int]],
    keys: Array | None,
    run: RunLayer,
    *,
    remat: str,
) -> Float[Array, "tokens D"]:
    """Run stacked layers as one scan: the program has one layer, whatever their number.

    Layers differ in what they take from the tables (a mask, a rotation): each distinct entry exists once, and a layer
    has the number of its entry.

    Args:
        tables: each a sequence of trees of arrays of equal shapes.
        choices: per table the entry of each layer, L numbers.
        keys, remat: as in `run_unrolled`.
    """
    graphdef, parameters = _split(stacked)
    stacks = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *table) for table in tables]
    columns = [None if len(table) == 1 else np.asarray(choice) for table, choice in zip(tables, choices, strict=True)]

    def body(flat, row):
        parameters, numbers, key = row
        # Inside the layer, so that its backward pass keeps the number of a mask and not the mask.
        picked = [_row(stack, 0 if n is None else n) for stack, n in zip(stacks, numbers, strict=True)]
        return run(nnx.merge(graphdef, parameters), flat, picked, key), None

    if remat != "none":
        # A scan keeps its backward loop apart from the forward one: nothing that XLA could merge.
        body = jax.checkpoint(body, policy=REMAT[remat], prevent_cse=False)
    return jax.lax.scan(body, flat, (parameters, columns, keys))[0]


def _split(module: nnx.Module) -> tuple[nnx.GraphDef, dict]:
    graphdef, state = nnx.split(module)
    return graphdef, nnx.to_pure_dict(state)


def _row(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _library(leaf: Any):
    return np if isinstance(leaf, np.ndarray) else jnp
