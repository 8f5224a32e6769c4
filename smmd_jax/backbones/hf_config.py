"""Between the fields of a Hugging Face config.json, in both of its dialects, and a DecoderConfig."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.hf_types import check_types
from smmd_jax.backbones.rope import ROPE_KINDS, RopeConfig
from smmd_jax.errors import CheckpointError
from smmd_jax.json_files import read_object

CONFIG_NAME = "config.json"
QWEN_VL_TEXT = "qwen2_5_vl_text"
MLLAMA_TEXT = "mllama_text_model"
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# Entries of a rope dictionary that are fields of RopeConfig under another name.
_ROPE_FIELDS = {
    "rope_theta": "theta",
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "attention_factor",
}


def _no_window(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _window_everywhere(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"window": fields.get("sliding_window", 4096)}


def _window_if_given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"window": fields.get("sliding_window")}


def _sliding(fields: Mapping[str, Any], window: int | None, slides: Callable[[int], bool]) -> dict[str, Any]:
    """The window and its layers: `layer_types` where the file has it, else the family's rule."""
    kinds = fields.get("layer_types")
    count = fields["num_hidden_layers"]
    if kinds is None:
        layers = tuple(window is not None and slides(layer) for layer in range(count))
    else:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise CheckpointError(f"layer_types holds {unknown}, wanted full_attention or sliding_attention")
        layers = tuple(kind == "sliding_attention" for kind in kinds)
    return {"window": window, "sliding_layers": layers} if any(layers) else {}


def _window_if_switched_on(fields: Mapping[str, Any]) -> dict[str, Any]:
    # Qwen's files carry a sliding_window that means nothing until use_sliding_window is true.
    window = fields.get("sliding_window", 4096) if fields.get("use_sliding_window", False) else None
    first = fields.get("max_window_layers", 28)
    return _sliding({**fields, "layer_types": None} if window is None else fields, window, lambda layer: layer >= first)


def _smollm3_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    count, interval = fields["num_hidden_layers"], fields.get("no_rope_layer_interval", 4)
    listed = fields.get("no_rope_layers")
    # Despite its name the list says 1 where a layer has rope.
    rope = tuple(map(bool, listed or [(layer + 1) % interval != 0 for layer in range(count)]))
    window = fields.get("sliding_window") if fields.get("use_sliding_window", False) else None
    windows = _sliding({**fields, "layer_types": None} if window is None else fields, window, lambda i: not rope[i])
    return {"rope_layers": None if all(rope) else rope, **windows}


def _ministral_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    return _sliding(fields, fields.get("sliding_window", 4096), lambda layer: True)


def _ministral3_queries(fields: Mapping[str, Any]) -> dict[str, Any]:
    if not (fields.get("rope_parameters") or fields.get("rope_scaling")):
        raise CheckpointError("the config has neither rope_parameters nor rope_scaling, and ministral3 needs one")
    rope = _rope_entries(fields)
    beta = rope.get("llama_4_scaling_beta") or 0.0
    scaled = {} if not beta else {
        "query_scale_beta": beta, "query_scale_length": rope["original_max_position_embeddings"]
    }
    return {**_window_if_given(fields), **scaled}


def _gemma3_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.get(name) is not None:
            raise CheckpointError(f"{name} is {fields[name]}, and soft caps are not supported: wanted null")
    if fields.get("use_bidirectional_attention"):
        raise CheckpointError("use_bidirectional_attention is true: this is an encoder, wanted a causal decoder")
    pattern = fields.get("sliding_window_pattern", 6)
    ropes = fields.get("rope_parameters") or {}
    nested = ropes if isinstance(ropes.get("sliding_attention", None), Mapping) else {}
    local = dict(nested.get("sliding_attention", {}))
    local.setdefault("rope_theta", fields.get("rope_local_base_freq", 10_000.0))
    return {
        "attention_scale": fields.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": fields["hidden_size"] ** 0.5,
        "local_rope": _rope(local, fields),
        **_sliding(fields, fields.get("sliding_window", 4096), lambda layer: (layer + 1) % pattern != 0),
    }


def _mllama_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    count = fields["num_hidden_layers"]
    listed = fields.get("cross_attention_layers")
    # The embedding has eight rows that the head lacks; the first is the image's.
    return {"cross_layers": tuple(range(3, count, 5) if listed is None else listed), "extra_embeddings": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Family:
    """What a model_type implies where its config.json is silent, and what it has that others lack.

    Attributes:
        layers: the fields of windows, ropes and scales from those of the file.
        always: fields of DecoderConfig that every model of the family has.
        absent: values of the file's fields that are left out.
        biases: whether `attention_bias` and `mlp_bias` of the file are read.
    """

    layers: Callable[[Mapping[str, Any]], dict[str, Any]]
    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    biases: bool = False


_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
FAMILIES = {
    "qwen2": _Family(layers=_window_if_switched_on, always={"qkv_bias": True}, absent=_QWEN),
    QWEN_VL_TEXT: _Family(layers=_window_if_switched_on, always={"qkv_bias": True}, absent=_QWEN),
    "qwen3": _Family(
        layers=_window_if_switched_on, always={"qk_norm": True}, absent={**_QWEN, "head_dim": 128}, biases=True
    ),
    "llama": _Family(layers=_no_window, absent={"max_position_embeddings": 2048}, biases=True),
    "smollm3": _Family(
        layers=_smollm3_layers, biases=True,
        absent={
            "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
        },
    ),
    "mistral": _Family(layers=_window_everywhere, absent=_MISTRAL),
    "ministral": _Family(layers=_ministral_layers, absent=_MISTRAL),
    "ministral3": _Family(
        layers=_ministral3_queries,
        absent={
            "max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
    MLLAMA_TEXT: _Family(
        layers=_mllama_layers,
        absent={
            "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
        },
    ),
    "gemma3_text": _Family(
        layers=_gemma3_fields, biases=True,
        always={"qk_norm": True, "norm_plus_one": True, "post_norms": True},
        absent={
            "max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
            "rope_theta": 1e6, "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
}


def decoder_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """Make the config of a text decoder from the fields of a config.json.

    Both dialects are read: `rope_theta` and `rope_scaling`, or `rope_parameters` with both inside.

    Args:
        fields: the object in the file.

    Raises:
        CheckpointError: a model_type that is not a text decoder of FAMILIES, a missing field, a quantised checkpoint,
            or a choice that the decoder does not have; the message names field and value.

    Example:
        >>> fields = dict(model_type="qwen2", vocab_size=32, hidden_size=16, intermediate_size=48, num_hidden_layers=2,
        ...               num_attention_heads=4, num_key_value_heads=2, rope_theta=1e6, tie_word_embeddings=True)
        >>> config = decoder_config(fields)
        >>> config.qkv_bias, config.rope.theta
        (True, 1000000.0)
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"model_type is {kind!r}, wanted one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    check_not_quantised(fields)
    check_types(fields)
    missing = [name for name in _REQUIRED if fields.get(name) is None]
    if missing:
        raise CheckpointError(f"the config of model_type {kind} lacks {', '.join(missing)}")
    full = {**family.absent, **fields}
    activation = full.get("hidden_activation") or full.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise CheckpointError(f"hidden_act is {activation!r}, wanted one of {', '.join(_ACTIVATIONS)}")
    bias = bool(full.get("attention_bias", False)) and family.biases
    try:
        values = dict(
            model_type=kind,
            vocab_size=full["vocab_size"],
            hidden_size=full["hidden_size"],
            intermediate_size=full["intermediate_size"],
            num_layers=full["num_hidden_layers"],
            num_heads=full["num_attention_heads"],
            num_kv_heads=full.get("num_key_value_heads"),
            head_dim=full.get("head_dim"),
            max_positions=full["max_position_embeddings"],
            norm_eps=full.get("rms_norm_eps", 1e-6),
            tied=bool(full.get("tie_word_embeddings", False)),
            activation=_ACTIVATIONS[activation],
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(full.get("mlp_bias", False)) and family.biases,
            rope=_rope(_rope_entries(full), full),
        )
        return DecoderConfig(**{**values, **family.always, **family.layers(full)})
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the config of model_type {kind} does not describe a decoder: {error}") from error


def check_not_quantised(fields: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose weights are not plain floating point numbers."""
    quantisation = fields.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, Mapping) else quantisation
        raise CheckpointError(
            f"the weights are quantised (quant_method {method!r}), and training needs plain ones: take the BF16 "
            "repository of the model"
        )


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the fields of a folder's config.json.

    Raises:
        CheckpointError: no such folder or file, or not a JSON object.
    """
    path = Path(folder) / CONFIG_NAME
    try:
        fields = read_object(path)
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise CheckpointError(f"{path} {reason}: wanted the folder of a Hugging Face checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not the config of a model: {error}") from error
    if not isinstance(fields.get("model_type"), str | None):
        raise CheckpointError(f"{path} has model_type {fields['model_type']!r}, wanted a text")
    return fields


def _rope_entries(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rope dictionary of the layers with full attention, whichever dialect wrote it."""
    entries = dict(fields.get("rope_scaling") or {}) | dict(fields.get("rope_parameters") or {})
    if isinstance(entries.get("full_attention"), Mapping):
        entries = {**(fields.get("rope_scaling") or {}), **entries["full_attention"]}
    if entries.get("rope_theta") is None:
        entries["rope_theta"] = fields.get("rope_theta") or 10_000.0
    if entries.get("original_max_position_embeddings") is None:
        original = fields.get("original_max_position_embeddings") or fields.get("max_position_embeddings")
        entries["original_max_position_embeddings"] = original
    return entries


def _rope(entries: Mapping[str, Any], fields: Mapping[str, Any]) -> RopeConfig:
    kind = entries.get("rope_type") or entries.get("type") or "default"
    if kind not in (*ROPE_KINDS, "mrope"):
        raise CheckpointError(f"rope_type is {kind!r}, wanted one of {', '.join(ROPE_KINDS)}")
    partial = entries.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise CheckpointError(f"partial_rotary_factor is {partial}, and only whole heads are rotated: wanted 1.0")
    sections = entries.get("mrope_section")
    if (sections is not None) != (fields.get("model_type") == QWEN_VL_TEXT):
        raise CheckpointError(
            "the rope has mrope_section: this is the text part of a vision model, not a text decoder"
            if sections
            else "the rope has no mrope_section, and the text of Qwen2.5-VL needs it"
        )
    if sections is not None:
        # Its type is "mrope" or "default" and says nothing beyond the sections.
        return RopeConfig(theta=float(entries["rope_theta"]), sections=tuple(sections))
    if kind == "default":
        return RopeConfig(theta=float(entries["rope_theta"]))
    if entries.get("factor") is None:
        raise CheckpointError(f"rope_type is {kind!r} and factor is missing: how many times longer the context became")
    given = {ours: entries[theirs] for theirs, ours in _ROPE_FIELDS.items() if entries.get(theirs) is not None}
    if kind == "linear":
        given.pop("original_max_positions", None)
    return RopeConfig(kind=kind, **given)
