"""The mesh, and where the arrays of a run live on it."""

import math
from collections.abc import Mapping
from typing import Any

import jax
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
        raise ValueError(f"mesh needs {wanted} devices; a run of several processes must use all {len(devices)}.")
    # Auto: under Explicit axes, jax's default, gathers from a sharded vocabulary are type errors.
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices[:wanted])


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


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
