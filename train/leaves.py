"""The leaves of a state by path: what shape and dtype they have, which are not finite, how two states differ."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.exits import CheckpointMismatchError


def leaf_table(tree: Any) -> dict[str, list[Any]]:
    """Return path -> [shape, dtype] for every leaf, as `params/layer/kernel: [[4, 2], "float32"]`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [list(np.shape(leaf)), str(_dtype(leaf))]
        for path, leaf in leaves
    }


def nonfinite_leaves(tree: Any) -> list[str]:
    """Return the paths of the leaves that hold NaN or infinity."""
    leaves = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if jnp.issubdtype(_dtype(leaf), jnp.inexact)
    ]
    finite = jax.device_get(_all_finite([leaf for _, leaf in leaves])) if leaves else []
    paths = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
    return [path for path, is_finite in zip(paths, finite, strict=True) if not is_finite]


@jax.jit
def _all_finite(leaves: Sequence[Any]) -> list[Any]:
    return [jnp.isfinite(leaf).all() for leaf in leaves]


def check_leaves(saved: Mapping[str, Any], wanted: Mapping[str, Any], *, step: int, partial: bool) -> None:
    """Compare the leaf table of a checkpoint with that of the state wanted; Orbax itself casts dtypes without a word.

    Raises:
        CheckpointMismatchError: leaves, shapes or dtypes differ (with `partial`, `wanted` may lack leaves); lists all.
    """
    lines = []
    for path in sorted({*saved, *wanted}):
        if path not in saved:
            lines.append(f"{path}: not in the checkpoint, wanted {_leaf_words(wanted[path])}")
        elif path not in wanted:
            if not partial:
                lines.append(f"{path}: {_leaf_words(saved[path])} in the checkpoint, not wanted")
        elif saved[path] != wanted[path]:
            lines.append(f"{path}: {_leaf_words(saved[path])} in the checkpoint, wanted {_leaf_words(wanted[path])}")
    if lines:
        raise CheckpointMismatchError(
            f"step {step} was saved by a run with another model or optimizer:\n  " + "\n  ".join(lines) + "\nGive the "
            "flags of that run, or another --workdir."
        )


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _leaf_words(leaf: Sequence[Any]) -> str:
    return f"{leaf[1]}[{','.join(map(str, leaf[0]))}]"
