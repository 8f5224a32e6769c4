"""The mesh, and where the arrays of a run live on it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.config import MESH_AXES


def make_mesh(sizes: Mapping[str, int] | None = None, devices: list[jax.Device] | None = None) -> Mesh:
    """Make the mesh with axes data, fsdp, tensor; axes that are not named have size 1.

    Args:
      sizes: axis -> devices; empty is one device.
      devices: None takes all devices; only as many as the sizes need are used.

    Raises:
      ValueError: an unknown axis, or more devices wanted than there are.

    Example:
      >>> make_mesh({}).shape["data"]
      1
    """
    sizes = dict(sizes or {})
    if unknown := set(sizes) - set(MESH_AXES):
        raise ValueError(f"make_mesh: unknown axes {sorted(unknown)}; known: {', '.join(MESH_AXES)}.")
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    devices = jax.devices() if devices is None else devices
    wanted = math.prod(shape)
    if wanted > len(devices):
        raise ValueError(
            f"mesh {dict(zip(MESH_AXES, shape, strict=True))} needs {wanted} devices and {jax.default_backend()} has "
            f"{len(devices)}; choose smaller sizes."
        )
    if jax.process_count() > 1 and wanted != len(devices):
        raise ValueError(
            f"mesh {dict(zip(MESH_AXES, shape, strict=True))} takes {wanted} devices, and the {jax.process_count()} "
            f"processes have {len(devices)}: a run of several processes must use all, as --mesh=fsdp:{len(devices)}."
        )
    # Auto: under Explicit axes, jax's default, gathers from a sharded vocabulary are type errors.
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices[:wanted])


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def data_shard(mesh: Mesh) -> tuple[int, int]:
    """Say which rows of a batch this process feeds: (index, count), the index-th of `count` equal blocks.

    It is the smallest such block that holds the rows of all its devices. Where the tensor axis crosses processes,
    several of them feed the same rows.

    Example:
      >>> data_shard(make_mesh({}))
      (0, 1)
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    indices = batch_sharding(mesh).addressable_devices_indices_map((shards,))
    return smallest_block([range(shards)[index[0]].start for index in indices.values()], shards)


def smallest_block(own: Sequence[int], shards: int) -> tuple[int, int]:
    """Cut `shards` into equal blocks, as small as one of them still holds all of `own`: (index of it, how many).

    Example:
      >>> smallest_block([2, 3], 8), smallest_block([1, 2], 8)
      ((1, 4), (0, 2))
    """
    for count in range(shards, 0, -1):
        block = shards // count
        if shards % count == 0 and min(own) // block == max(own) // block:
            return min(own) // block, count
    raise ValueError(f"smallest_block: {list(own)} do not lie in 0 to {shards - 1}.")


def place_rows(rows: Any, mesh: Mesh) -> Any:
    """Move rows to the devices, over data and fsdp; each process holds its `data_shard` of them on the host.

    Args:
      rows: tree of host arrays with a leading axis of rows.
    """
    sharding = batch_sharding(mesh)
    if sharding.is_fully_addressable:
        return jax.device_put(rows, sharding)
    index, count = data_shard(mesh)

    def place(array: np.ndarray) -> jax.Array:
        first = index * len(array)

        def block(where: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = where[0].indices(len(array) * count)
            return array[(slice(start - first, stop - first), *where[1:])]

        return jax.make_array_from_callback((len(array) * count, *array.shape[1:]), sharding, block)

    return jax.tree.map(place, rows)


def place_prompts(rows: np.ndarray, mesh: Mesh | None) -> jax.Array | np.ndarray:
    """Move rows that every process has to the devices: over data and fsdp where these divide them, else everywhere."""
    if mesh is None:
        return jnp.asarray(rows)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    return jax.device_put(rows, batch_sharding(mesh) if len(rows) % shards == 0 else replicated(mesh))


def place_everywhere(tree: Any, mesh: Mesh) -> Any:
    """Move values that are the same in every process to all devices."""
    sharding = replicated(mesh)
    if not sharding.is_fully_addressable:
        tree = jax.tree.map(np.asarray, tree)
    return jax.device_put(tree, sharding)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def check_batch_size(mesh: Mesh, batch_size: int, grad_accum: int) -> None:
    """Refuse a batch whose micro-batches do not divide over the devices that hold rows."""
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % (shards * grad_accum):
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of data x fsdp x grad_accum = {shards} x {grad_accum}: every "
            "device holds equally many rows of a micro-batch."
        )


def optimizer_shardings(
    optimizer: optax.GradientTransformation, parameters: Any, shardings: Any, mesh: Mesh
) -> Any:
    """Shard moments like their parameters; counters, and factored moments of another shape, are replicated.

    A leaf of the optimizer's state belongs to the parameter whose path its own path ends with.

    Args:
      parameters: tree of ShapeDtypeStruct.
      shardings: tree of NamedSharding of the same structure.
    """
    by_path = {
        _names(path): (parameter.shape, sharding)
        for (path, parameter), sharding in zip(
            jax.tree_util.tree_leaves_with_path(parameters), jax.tree.leaves(shardings), strict=True
        )
    }
    everywhere = replicated(mesh)

    def sharding_of(path, moment):
        names = _names(path)
        for start in range(len(names)):
            shape, sharding = by_path.get(names[start:], (None, None))
            if shape == moment.shape:
                return sharding
        return everywhere

    # jit(optimizer.init) alone would put the moments on one device: zeros do not depend on the parameters.
    return jax.tree_util.tree_map_with_path(sharding_of, jax.eval_shape(optimizer.init, parameters))


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,)) for key in path)
