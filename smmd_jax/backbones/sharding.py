"""Which mesh axis splits which dimension of which parameter: one table of path rules per backbone family."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

# Path pattern -> mesh axis per dimension. Heads, feed-forward and vocabulary lie over `tensor`, the other dimension of
# each matrix over `fsdp`; `data` splits no parameter. Vectors as wide as the model are kept whole: they are small.
_LAYER_RULES = (
    (r"(self|cross)_attn/[qkv]_proj/kernel", ("fsdp", "tensor")),
    (r"(self|cross)_attn/[qkv]_proj/bias", ("tensor",)),
    (r"(self|cross)_attn/o_proj/kernel", ("tensor", "fsdp")),
    (r"(self|cross)_attn/o_proj/bias", (None,)),
    (r"(self|cross)_attn/[qk]_norm/weight", (None,)),
    (r"mlp/(gate|up)_proj/kernel", ("fsdp", "tensor")),
    (r"mlp/(gate|up)_proj/bias", ("tensor",)),
    (r"mlp/down_proj/kernel", ("tensor", "fsdp")),
    (r"mlp/down_proj/bias", (None,)),
    # Adapters are thin: the side that they share with their matrix is split as it is, the rank is not.
    (r"((self|cross)_attn/[qkv]|mlp/(gate|up))_proj/lora_a", ("fsdp", None)),
    (r"((self|cross)_attn/[qkv]|mlp/(gate|up))_proj/lora_b", (None, "tensor")),
    (r"((self|cross)_attn/o|mlp/down)_proj/lora_a", ("tensor", None)),
    (r"((self|cross)_attn/o|mlp/down)_proj/lora_b", (None, "fsdp")),
    (r"(input|post_attention|pre_feedforward|post_feedforward)_layernorm/weight", (None,)),
    (r"cross_attn_(attn|mlp)_gate", (None,)),
)
DECODER_RULES = (
    (r"embed_tokens/embedding", ("tensor", "fsdp")),
    (r"lm_head/kernel", ("fsdp", "tensor")),
    (r"norm/weight", (None,)),
    *((r"layers/\d+/" + pattern, axes) for pattern, axes in _LAYER_RULES),
    # Stacked layers: the axis of layers is not split, every device scans over all of them.
    *((r"layers/" + pattern, (None, *axes)) for pattern, axes in _LAYER_RULES),
)

# Towers are small beside the text: their matrices lie over the same two axes, their vectors are kept whole.
_TOWER_RULES = (
    (r".*(norm\d?|ln_pre|ln_q)/weight", (None,)),
    (r".*/bias", (None,)),
    (r".*/([qkv]_proj|qkv|gate_proj|up_proj|linear_1|mlp_0|patch_conv|patch_embed/proj)/kernel", ("fsdp", "tensor")),
    (r".*/(o_proj|attn/proj|down_proj|linear_2|mlp_2|merging_layer)/kernel", ("tensor", "fsdp")),
    (r".*/([qkv]_proj|qkv|gate_proj|up_proj)/lora_a", ("fsdp", None)),
    (r".*/([qkv]_proj|qkv|gate_proj|up_proj)/lora_b", (None, "tensor")),
    (r".*/(o_proj|attn/proj|down_proj)/lora_a", ("tensor", None)),
    (r".*/(o_proj|attn/proj|down_proj)/lora_b", (None, "fsdp")),
)
VISION_LANGUAGE_RULES = (
    *((r"language_model/" + pattern, axes) for pattern, axes in DECODER_RULES),
    *((r"(vision_tower|multi_modal_projector|visual)(?=/)" + pattern, axes) for pattern, axes in _TOWER_RULES),
)
_MLLAMA_VISION_RULES = (
    (r".*/(scale|bias|gate|gate_attn|gate_ffn|class_embedding)", (None,)),
    (r".*/(embedding/embedding|tile_embedding/embedding|position_embedding)", (None, "fsdp")),
    (r".*/([qkv]_proj|fc1|patch_embedding)/kernel", ("fsdp", "tensor")),
    (r".*/(o_proj|fc2)/kernel", ("tensor", "fsdp")),
    (r".*/([qkv]_proj|fc1)/lora_a", ("fsdp", None)),
    (r".*/([qkv]_proj|fc1)/lora_b", (None, "tensor")),
    (r".*/(o_proj|fc2)/lora_a", ("tensor", None)),
    (r".*/(o_proj|fc2)/lora_b", (None, "fsdp")),
)
MLLAMA_RULES = (
    *((r"language_model/" + pattern, axes) for pattern, axes in DECODER_RULES),
    *((r"vision_model(?=/)" + pattern, axes) for pattern, axes in _MLLAMA_VISION_RULES),
    (r"multi_modal_projector/kernel", ("fsdp", "tensor")),
    (r"multi_modal_projector/bias", (None,)),
)

# model_type -> rules
SHARDING_RULES = {
    **{
        name: DECODER_RULES
        for name in ("qwen2", "qwen3", "llama", "smollm3", "mistral", "ministral", "ministral3", "gemma3_text")
    },
    "mistral3": VISION_LANGUAGE_RULES,
    "qwen2_5_vl": VISION_LANGUAGE_RULES,
    "mllama": MLLAMA_RULES,
}


def parameter_path(path: Sequence) -> str:
    """Return a key path of jax.tree_util as "layers/0/mlp/up_proj/kernel"."""
    return "/".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _spec(shape: tuple[int, ...], axes: Sequence[str | None], mesh: Mesh) -> PartitionSpec:
    sizes = dict(mesh.shape)
    fits = [axis in sizes and length % sizes[axis] == 0 for length, axis in zip(shape, axes, strict=True)]
    return PartitionSpec(*(axis if fit else None for axis, fit in zip(axes, fits, strict=True)))


def parameter_shardings(
    parameters: nnx.State | Mapping, mesh: Mesh, *, rules: Sequence[tuple[str, Sequence[str | None]]] = DECODER_RULES
) -> dict:
    """Return the sharding of every parameter, as a nested dict of NamedSharding.

    A dimension that its mesh axis does not divide, or whose axis the mesh lacks, is not split.

    Args:
        parameters: state of a model or nested dict of arrays or jax.ShapeDtypeStruct (`nnx.eval_shape` makes them
            without using memory).
        mesh: device mesh with any of the axes `data`, `fsdp`, `tensor`.
        rules: the family's row of SHARDING_RULES.

    Returns:
        nested dict with the paths of `parameters` (what `nnx.to_pure_dict` returns).

    Raises:
        ValueError: a parameter that no rule or more than one rule matches, or whose rule has another rank (all are
            listed); a mesh with axes that are not AxisType.Auto.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
        >>> parameters = {"embed_tokens": {"embedding": jax.ShapeDtypeStruct((8, 4), "float32")}}
        >>> spec = parameter_shardings(parameters, mesh)["embed_tokens"]["embedding"].spec
        >>> spec == PartitionSpec(None, "fsdp")
        True
    """
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"the mesh has axis types {[str(kind) for kind in mesh.axis_types]}, wanted AxisType.Auto for each: make "
            "it with jax.make_mesh(..., axis_types=(AxisType.Auto,) * number_of_axes)"
        )
    pure = nnx.to_pure_dict(parameters) if isinstance(parameters, nnx.State) else parameters
    compiled = [(re.compile(pattern), axes) for pattern, axes in rules]
    faults = []

    def sharding(path, leaf):
        name = parameter_path(path)
        matches = [axes for pattern, axes in compiled if pattern.fullmatch(name)]
        if len(matches) != 1:
            faults.append(f"{name} {list(leaf.shape)}: {len(matches)} rules match")
        elif len(matches[0]) != len(leaf.shape):
            faults.append(f"{name} {list(leaf.shape)}: its rule has {len(matches[0])} dimensions")
        else:
            return NamedSharding(mesh, _spec(leaf.shape, matches[0], mesh))
        return NamedSharding(mesh, PartitionSpec())

    shardings = jax.tree_util.tree_map_with_path(sharding, pure)
    if faults:
        raise ValueError("every parameter must match exactly one sharding rule; wanting:\n  " + "\n  ".join(faults))
    return shardings


def keep_rows(
    array: Float[Array, "rows *width"], rows: NamedSharding | None, *, others: Any = None
) -> Float[Array, "rows *width"]:
    """Keep the first axis of an array of activations where the rows of a batch lie.

    Args:
        array: [B * T, ...], rows one after another.
        rows: sharding of the rows, over one or more axes. None leaves the array as it is, and so does a number of rows
            that does not divide.
        others: the axis of the mesh for all other dimensions; None: they are whole on each device,
            `PartitionSpec.UNCONSTRAINED`: the compiler decides.
    """
    if rows is None:
        return array
    axes = rows.spec[0] if isinstance(rows.spec[0], tuple) else (rows.spec[0],)
    if array.shape[0] % math.prod(rows.mesh.shape[axis] for axis in axes):
        return array
    spec = PartitionSpec(axes, *(others,) * (array.ndim - 1))
    return jax.lax.with_sharding_constraint(array, NamedSharding(rows.mesh, spec))
