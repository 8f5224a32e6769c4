"""Adapters in the format of the PEFT library: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from smmd_jax.backbones.safetensors_files import write_file
from smmd_jax.backbones.sharding import parameter_path
from smmd_jax.backbones.tensor_names import TOWERS, source_of
from smmd_jax.errors import CheckpointError

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_ROOT = "base_model.model."
_PARTS_OF_VLM = ("language_model/", *(f"{tower}/" for tower in TOWERS))
_PARTS = {"lora_a": "lora_A", "lora_b": "lora_B"}


def save_adapter(
    adapters: Mapping[str, Any],
    folder: str | Path,
    *,
    num_layers: int,
    scale: float,
    base: str,
    prefix: str = "model.",
    outer: str = "",
) -> None:
    """Write adapters as PEFT does, in float32: A [rank, in] and B [out, rank] of every matrix.

    Args:
        adapters: nested dict of arrays with the leaves lora_a [in, rank] and lora_b [rank, out] alone, layers apart or
            stacked.
        folder: exists, and is empty.
        num_layers: of the decoder.
        scale: alpha / rank.
        base: name or folder of the model that the adapters belong to.
        prefix: of the decoder's tensors in that model's files.
        outer: of those of a vision tower.

    Raises:
        CheckpointError: there are no adapters, or other leaves among them.
    """
    leaves = {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(adapters)}
    if not leaves or any(path.rsplit("/", 1)[-1] not in _PARTS for path in leaves):
        raise CheckpointError(
            f"these {len(leaves)} parameters are not adapters alone: wanted lora_a and lora_b of every matrix"
        )
    tensors, modules, ranks = {}, set(), set()
    for path, leaf in leaves.items():
        for layer, name in enumerate(_names(path, num_layers, prefix, outer)):
            array = np.asarray(jax.device_get(leaf), np.float32)
            tensors[name] = np.ascontiguousarray((array[layer] if array.ndim == 3 else array).T)
            # Matrices of tower and text may have one name: each is then meant by its whole path.
            module = name.removeprefix(_ROOT).rsplit(".lora_", 1)[0]
            modules.add(module if path.startswith(_PARTS_OF_VLM) else module.rsplit(".", 1)[-1])
        ranks.add(leaf.shape[-1] if path.endswith("lora_a") else leaf.shape[-2])
    (rank,) = ranks
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "revision": None,
        "inference_mode": True, "r": rank, "lora_alpha": scale * rank, "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "init_lora_weights": True, "target_modules": sorted(modules), "use_rslora": False,
        "use_dora": False, "modules_to_save": None, "layers_pattern": None, "layers_to_transform": None,
        "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    folder = Path(folder)
    write_file(folder / WEIGHTS_NAME, tensors)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapter(
    folder: str | Path, like: Mapping[str, Any], *, num_layers: int, prefix: str = "model.", outer: str = ""
) -> tuple[dict[str, Any], float]:
    """Read adapters back.

    Args:
        folder: what `save_adapter` or PEFT wrote.
        like: nested dict of arrays or shapes with the adapters wanted.
        num_layers, prefix, outer: as in `save_adapter`.

    Returns:
        (nested dict of arrays, scale).

    Raises:
        CheckpointError: a missing or broken file, or other tensors and shapes than wanted (all are listed).
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_NAME)
        scale = config["lora_alpha"] / config["r"]
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, SafetensorError) as error:
        raise CheckpointError(f"{folder} does not hold readable adapters: {type(error).__name__}: {error}") from error
    faults, used = [], set()

    def read(path, leaf):
        arrays = []
        stacked = len(leaf.shape) == 3
        for name in _names(parameter_path(path), num_layers, prefix, outer):
            used.add(name)
            array = tensors[name].T if name in tensors else None
            if array is None or array.shape != tuple(leaf.shape[stacked:]):
                found = "missing" if array is None else f"{list(array.shape[::-1])}"
                faults.append(f"{name}: {found}, wanted {list(leaf.shape[stacked:])[::-1]}")
                return leaf
            arrays.append(array)
        return jnp.asarray(np.stack(arrays) if stacked else arrays[0], leaf.dtype)

    adapters = jax.tree_util.tree_map_with_path(read, like)
    faults += [f"{name}: not wanted" for name in tensors if name not in used]
    if faults:
        raise CheckpointError(f"{folder} holds other adapters:\n  " + "\n  ".join(faults))
    return adapters, scale


def _names(path: str, num_layers: int, prefix: str, outer: str) -> list[str]:
    """layers/0/self_attn/q_proj/lora_a -> base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"""
    *_, part = path.split("/")
    kernel = path.removesuffix(part) + "kernel"
    names = source_of(kernel, num_layers=num_layers, prefix=prefix, outer=outer).names
    return [f"{_ROOT}{name.removesuffix('weight')}{_PARTS[part]}.weight" for name in names]
