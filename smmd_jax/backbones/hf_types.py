"""The types of the values in a Hugging Face config.json, checked under the names of the file before they are used."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from smmd_jax.errors import CheckpointError

# Positions and token ids are int32, and every layer is built before its tensors are looked for.
_LARGEST, _MOST_LAYERS = 2**31 - 1, 1000


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, value))


# kind -> (what is right, how it is said)
_KINDS = {
    "size": (lambda v: _is_whole(v) and 1 <= v <= _LARGEST, f"a whole number from 1 to {_LARGEST:,}"),
    "layers": (lambda v: _is_whole(v) and 1 <= v <= _MOST_LAYERS, f"a whole number from 1 to {_MOST_LAYERS:,}"),
    "count": (lambda v: _is_whole(v) and 0 <= v <= _LARGEST, f"a whole number from 0 to {_LARGEST:,}"),
    "positive": (lambda v: _is_number(v) and v > 0, "a finite number above 0"),
    "number": (lambda v: _is_number(v) and v >= 0, "a finite number of at least 0"),
    "switch": (lambda v: isinstance(v, bool), "true or false"),
    "text": (lambda v: isinstance(v, str), "a text"),
    "object": (lambda v: isinstance(v, dict), "an object"),
    "texts": (lambda v: _is_list(v, lambda entry: isinstance(entry, str)), "a list of texts"),
    "counts": (lambda v: _is_list(v, lambda entry: _is_whole(entry) and entry >= 0), "a list of whole numbers"),
    "flags": (lambda v: _is_list(v, lambda entry: entry in (0, 1)), "a list of 0 and 1, one per layer"),
}
# Fields of the decoder; a ? lets null through, which then means what an absent field does, or "none".
_FIELDS = {
    "vocab_size": "size?", "hidden_size": "size?", "intermediate_size": "size?", "num_hidden_layers": "layers?",
    "num_attention_heads": "size?", "num_key_value_heads": "size?", "head_dim": "size?",
    "max_position_embeddings": "size", "sliding_window": "count?", "max_window_layers": "count?",
    "sliding_window_pattern": "size", "no_rope_layer_interval": "size", "rms_norm_eps": "positive",
    "rope_local_base_freq": "positive", "query_pre_attn_scalar": "positive", "tie_word_embeddings": "switch",
    "attention_bias": "switch?", "mlp_bias": "switch?", "use_sliding_window": "switch?",
    "use_bidirectional_attention": "switch?", "hidden_act": "text?", "hidden_activation": "text?",
    "layer_types": "texts?", "no_rope_layers": "flags?", "cross_attention_layers": "counts?",
    "rope_scaling": "object?", "rope_parameters": "object?", "full_attention": "object?",
    "sliding_attention": "object?",
}  # fmt: skip
# Fields of a rope, which stand in an object of their own or beside the decoder's.
_ROPE_FIELDS = {
    "rope_theta": "positive?", "rope_type": "text?", "type": "text?", "factor": "positive?",
    "original_max_position_embeddings": "size?", "low_freq_factor": "positive?", "high_freq_factor": "positive?",
    "beta_fast": "positive?", "beta_slow": "positive?", "truncate": "switch?", "mscale": "number?",
    "mscale_all_dim": "number?", "attention_factor": "positive?", "partial_rotary_factor": "number?",
    "llama_4_scaling_beta": "number?", "mrope_section": "counts?",
}  # fmt: skip
_ROPES = ("rope_scaling", "rope_parameters", "full_attention", "sliding_attention")
_PER_LAYER = ("layer_types", "no_rope_layers")


def check_types(fields: Mapping[str, Any]) -> None:
    """Refuse values of a decoder's config.json that are not of the type, or in the range, of their field.

    Without this a text, a NaN or a null would reach the arithmetic, and some would only change its results.

    Raises:
        CheckpointError: lists every such field, what it holds and what was wanted.
    """
    faults = _faults(fields, "")
    layers = fields.get("num_hidden_layers")
    if not faults:
        for name in _PER_LAYER:
            if fields.get(name) and len(fields[name]) != layers:
                faults.append(f"{name} has {len(fields[name])} entries for {layers} layers")
    if faults:
        raise CheckpointError(f"the config holds values that no decoder has: {'; '.join(faults)}")


def _faults(fields: Mapping[str, Any], path: str) -> list[str]:
    faults = []
    for name, value in fields.items():
        kind = {**_FIELDS, **_ROPE_FIELDS}.get(name) if path == "" or name not in _FIELDS or name in _ROPES else None
        if kind is None or (value is None and kind.endswith("?")):
            continue
        is_right, words = _KINDS[kind.rstrip("?")]
        if not is_right(value):
            faults.append(f"{path}{name} is {_shown(value)}, wanted {words}")
        elif name in _ROPES:
            faults += _faults(value, f"{path}{name}.")
    return faults


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
