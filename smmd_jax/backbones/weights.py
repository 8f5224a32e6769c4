"""Checkpoints in and out: every tensor of a Hugging Face folder straight to its shards, and back under its own name."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jaxtyping import DTypeLike

from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.decoder import Decoder
from smmd_jax.backbones.hf_config import CONFIG_NAME, read_config
from smmd_jax.backbones.hf_fields import hf_fields
from smmd_jax.backbones.hf_vision_fields import vision_fields
from smmd_jax.backbones.ports import BACKBONES, ModelConfig, model_config
from smmd_jax.backbones.safetensors_files import (
    INDEX_NAME,
    TensorFiles,
    by_file,
    open_folder,
    plan_files,
    write_file,
    write_index,
)
from smmd_jax.backbones.sharding import SHARDING_RULES, parameter_path, parameter_shardings
from smmd_jax.backbones.tensor_names import PREFIXES, Source, find_prefix, match_tensors, source_of
from smmd_jax.backbones.vlm import VisionLanguageModel
from smmd_jax.errors import CheckpointError

_DTYPES = ("float32", "bfloat16", "float16")
# What a folder holds beside its weights and a fine-tuned copy still needs, byte for byte.
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.json",
    "chat_template.jinja", "tekken.json", "preprocessor_config.json", "processor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip


def load_pretrained(
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> Decoder | VisionLanguageModel:
    """Load a Hugging Face checkpoint: its config.json decides what is built.

    Loading is strict: every parameter is filled once, every tensor is used, and all faults come in one error. Nothing
    is unpickled, and neither torch nor transformers is needed.

    Args:
        folder: holds config.json and safetensors files, one or several with their index.
        dtype: of the products; None: float32, which is what the reference logits are made in. Choose bfloat16 on
            accelerators.
        param_dtype: of the stored parameters; None: as each tensor is in the file (float64 becomes float32).
        mesh: each tensor goes straight to its shards by the family's path rules; None: to the default device.

    Returns:
        the model.

    Raises:
        CheckpointError: a folder, config or tensor that is not what it should be, and quantised weights; see
            `match_tensors`.
        TypeError: a dtype that is none of float32, bfloat16 and float16, or a mesh that is none.

    Example:
        >>> import tempfile
        >>> from smmd_jax.backbones import PRESETS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(Decoder(PRESETS["tiny"], rngs=nnx.Rngs(0)), folder)
        ...     load_pretrained(folder).config.num_layers
        4
    """
    dtype = jnp.dtype("float32") if dtype is None else _known_dtype("dtype", dtype)
    param_dtype = None if param_dtype is None else _known_dtype("param_dtype", param_dtype)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is {mesh!r}, wanted a jax.sharding.Mesh: make it with jax.make_mesh")
    config = model_config(read_config(folder))

    def make_model() -> nnx.Module:
        return BACKBONES[config.model_type](config, rngs=nnx.Rngs(0), dtype=dtype)

    graphdef, abstract = nnx.split(nnx.eval_shape(make_model))
    shapes = nnx.to_pure_dict(abstract)
    files = open_folder(folder)
    shapes = _with_dtypes(shapes, files, config, param_dtype)
    rules = SHARDING_RULES[config.model_type]
    shardings = None if mesh is None else parameter_shardings(shapes, mesh, rules=rules)
    return nnx.merge(graphdef, _load(files, shapes, config, shardings))


def load_parameters(
    folder: str | Path,
    shapes: Mapping[str, Any],
    *,
    shardings: Mapping[str, Any] | None = None,
    beside: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Load the parameters of a checkpoint in the dtypes and places asked for.

    Args:
        folder: of the checkpoint.
        shapes: nested dict of jax.ShapeDtypeStruct; layers apart (`layers/0/...`) or stacked (`layers/...`).
        shardings: nested dict of jax.sharding.Sharding of the same structure; None: the default device.
        beside: the other parameters of the model, which the checkpoint must hold too and which are not loaded; None:
            there are none.

    Returns:
        nested dict of arrays.

    Raises:
        CheckpointError: as `load_pretrained`.
    """
    return _load(open_folder(folder), shapes, model_config(read_config(folder)), shardings, beside)


def save_pretrained(
    model: Decoder | VisionLanguageModel, folder: str | Path, *, source: str | Path | None = None
) -> None:
    """Write a model as a Hugging Face checkpoint.

    Args:
        model: what to save.
        folder: is made; must be empty where it exists.
        source: the folder that the model was loaded from. Tensors then keep the names, dtypes and shards they have
            there, and config, tokenizer, chat template and generation config are copied byte for byte. None: a
            config.json is made from the model's, and tensors keep their dtypes.

    Raises:
        CheckpointError: a folder that is not empty; a model that is not the source's.
    """
    save_parameters(nnx.to_pure_dict(nnx.state(model, nnx.Param)), model.config, folder, source=source)


def save_parameters(
    parameters: Mapping[str, Any],
    config: ModelConfig,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write parameters, a nested dict as `load_parameters` returns it, as a Hugging Face checkpoint.

    Shards are written one by one, so the host holds one at a time. The folder appears whole or not at all.

    Args:
        parameters, config, folder, source: as `save_pretrained`.
        fields: what a config.json that is made here says beside the model, such as ids of special tokens.

    Raises: as `save_pretrained`.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not an empty folder: nothing is overwritten, choose another")
    leaves = _by_path(parameters)
    if source is None:
        tensors, planned, companions = _planned(leaves, config, fields or {})
        total = {}
    else:
        tensors, planned, companions, total = _as_source(leaves, config, Path(source))
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        size = 0
        for file, names in by_file(planned):
            arrays = {name: _tensor(leaves, *tensors[name]) for name in names}
            size += sum(array.nbytes for array in arrays.values())
            write_file(partial / file, arrays)
        if len(set(planned.values())) > 1 or total:
            write_index(partial, planned, size, extra=total)
        for name, content in companions.items():
            (partial / name).write_bytes(content)
        partial.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _known_dtype(name: str, dtype: DTypeLike) -> np.dtype:
    try:
        if (found := jnp.dtype(dtype)).name in _DTYPES:
            return found
    except TypeError:
        pass
    raise TypeError(f"{name} is {dtype!r}, wanted one of {', '.join(_DTYPES)}")


def _by_path(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _with_dtypes(
    shapes: Mapping[str, Any], files: TensorFiles, config: ModelConfig, param_dtype: DTypeLike | None
) -> dict[str, Any]:
    sources = match_tensors(_by_path(shapes), files.shapes, num_layers=config.num_layers, tied=config.tied)

    def leaf_of(path, leaf):
        own = files.tensors[sources[parameter_path(path)].names[0]].dtype
        own = jax.dtypes.canonicalize_dtype(own)  # float64 is float32 unless jax is told otherwise
        return jax.ShapeDtypeStruct(leaf.shape, own if param_dtype is None else param_dtype)

    return jax.tree_util.tree_map_with_path(leaf_of, shapes)


def _load(
    files: TensorFiles,
    shapes: Mapping[str, Any],
    config: ModelConfig,
    shardings: Mapping[str, Any] | None,
    beside: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    paths = _by_path(shapes) | _by_path(beside or {})
    sources = match_tensors(paths, files.shapes, num_layers=config.num_layers, tied=config.tied)
    if shardings is None:
        shardings = jax.tree.map(lambda leaf: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)

    def load(path, leaf: jax.ShapeDtypeStruct, sharding: Sharding):
        source = sources[parameter_path(path)]

        def block(index: tuple[slice, ...]) -> np.ndarray:
            return _read_block(files, source, index, leaf.dtype)

        return jax.make_array_from_callback(leaf.shape, sharding, block, dtype=leaf.dtype)

    return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def _read_block(files: TensorFiles, source: Source, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    layers, index = (index[0], index[1:]) if source.stacked else (slice(None), index)
    index = index[::-1] if source.transposed else index
    if len(files.tensors[source.names[0]].shape) > 2:  # a convolution, small: read whole, then flattened
        whole = files.read(source.names[0], (slice(None),))
        return np.ascontiguousarray(whole.reshape(len(whole), -1)[index].T, dtype)
    blocks = [files.read(name, index) for name in source.names[layers]]
    blocks = [np.ascontiguousarray(block.T if source.transposed else block, dtype) for block in blocks]
    return np.stack(blocks) if source.stacked else blocks[0]


def _planned(leaves, config: ModelConfig, more: Mapping[str, Any]):
    """Names, files and companions of a checkpoint that has no source; dtypes are those of the parameters."""
    own = hf_fields(config) if isinstance(config, DecoderConfig) else vision_fields(config)
    tensors = {}
    for path, leaf in leaves.items():
        source = source_of(path, num_layers=config.num_layers)
        shape = leaf.shape[1 if source.stacked else 0 :]
        shape = shape[::-1] if source.transposed else shape
        if path == "visual/patch_embed/proj/kernel":  # in the files a convolution
            vision = config.vision
            shape = (shape[0], vision.channels, vision.temporal_size, vision.patch_size, vision.patch_size)
        for layer, name in enumerate(source.names):
            tensors[name] = (path, source, layer, np.dtype(leaf.dtype), shape)
    sizes = {name: (shape, dtype) for name, (*_, dtype, shape) in tensors.items()}
    kinds = {str(dtype) for _, dtype in sizes.values()}
    fields = {**own, **more, "dtype": kinds.pop() if len(kinds) == 1 else "float32"}
    return tensors, plan_files(sizes), {CONFIG_NAME: (json.dumps(fields, indent=2) + "\n").encode()}


def _as_source(leaves, config: ModelConfig, folder: Path):
    """Names, dtypes, files and companions as the source folder has them."""
    files = open_folder(folder)
    sources = match_tensors(leaves, files.shapes, num_layers=config.num_layers, tied=config.tied)
    tensors = {}
    for path, source in sources.items():
        for layer, name in enumerate(source.names):
            tensors[name] = (path, source, layer, files.tensors[name].dtype, files.tensors[name].shape)
    prefix = find_prefix(files.tensors)
    head = PREFIXES[prefix]
    if config.tied and head in files.tensors:  # the file repeats the embedding
        embedding = next(path for path in sources if path.endswith("embed_tokens/embedding"))
        tensors[head] = (embedding, sources[embedding], 0, files.tensors[head].dtype, files.tensors[head].shape)
    planned = {name: tensor.file for name, tensor in files.tensors.items() if name in tensors}
    companions = {
        path.name: path.read_bytes()
        for pattern in COMPANIONS
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }
    index = folder / INDEX_NAME
    metadata = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}) if index.is_file() else {}
    extra = {name: value for name, value in metadata.items() if name != "total_size"}
    return tensors, planned, companions, extra | ({"total_size": 0} if index.is_file() else {})


def _tensor(leaves, path: str, source: Source, layer: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    leaf = leaves[path][layer] if source.stacked else leaves[path]
    array = np.asarray(jax.device_get(leaf))
    return np.ascontiguousarray(array.T if source.transposed else array, dtype).reshape(shape)
