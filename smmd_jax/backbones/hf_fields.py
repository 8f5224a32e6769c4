"""The fields of a config.json for a DecoderConfig that came from no file."""

import dataclasses
from typing import Any

from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.hf_config import decoder_config
from smmd_jax.backbones.rope import RopeConfig
from smmd_jax.errors import CheckpointError

_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def hf_fields(config: DecoderConfig) -> dict[str, Any]:
    """Return what a Hugging Face config.json says of this decoder.

    Raises:
        CheckpointError: a decoder that its `model_type` cannot express; the message lists the fields.

    Example:
        >>> fields = hf_fields(DecoderConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=48, num_layers=2, num_heads=4))
        >>> fields["architectures"], fields["num_hidden_layers"]
        (['LlamaForCausalLM'], 2)
    """
    if config.model_type not in _ARCHITECTURES:
        raise CheckpointError(
            f"model_type {config.model_type} is part of a vision-language model, and no checkpoint of its own: save "
            "the whole model with source=, the folder it was loaded from"
        )
    layers = range(config.num_layers)
    sliding = [config.window_of(layer) is not None for layer in layers]
    rope: dict[str, Any] = _rope_entries(config.rope, config.max_positions)
    if config.query_scale_beta:
        rope |= {
            "llama_4_scaling_beta": config.query_scale_beta,
            "original_max_position_embeddings": config.query_scale_length,
        }
    if config.local_rope is not None:
        rope = {"full_attention": rope, "sliding_attention": _rope_entries(config.local_rope, config.max_positions)}
    fields = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "hidden_act": _ACTIVATIONS[config.activation],
        "rope_parameters": rope,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.window,
        # Special ids belong to a tokenizer; left out, they would be those of the family's released models.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.model_type in ("qwen2", "qwen3", "smollm3"):
        fields["use_sliding_window"] = any(sliding)
    if config.model_type not in ("llama", "mistral", "ministral3"):
        fields["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    if config.model_type == "smollm3":
        fields["no_rope_layers"] = [int(config.rope_of(layer) is not None) for layer in layers]
    if config.model_type == "gemma3_text":
        fields["hidden_activation"] = fields.pop("hidden_act")
        fields["query_pre_attn_scalar"] = _as_whole((config.attention_scale or config.head_dim**-0.5) ** -2)
    _check_same(config, decoder_config(fields))
    return fields


def _rope_entries(rope: RopeConfig, max_positions: int) -> dict[str, Any]:
    entries: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "default":
        return entries
    entries |= {"factor": rope.factor, "original_max_position_embeddings": rope.original_max_positions}
    if rope.kind == "llama3":
        entries |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        entries |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
            "attention_factor": rope.attention_factor,
        }
    return {name: value for name, value in entries.items() if value is not None}


def _as_whole(number: float) -> float | int:
    return round(number) if abs(number - round(number)) < 1e-6 else number


def _layerwise(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config with every choice per layer spelled out, so that equal decoders compare equal."""
    values = dataclasses.asdict(config)
    for name in ("rope", "local_rope", "rope_layers", "window", "sliding_layers"):
        del values[name]
    layers = range(config.num_layers)
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return values | {
        "dropout": 0.0,
        "attention_scale": round(scale, 9),
        "windows": [config.window_of(layer) for layer in layers],
        "ropes": [config.rope_of(layer) for layer in layers],
        "query_scale_length": config.query_scale_length if config.query_scale_beta else 1,
    }


def _check_same(config: DecoderConfig, written: DecoderConfig) -> None:
    wanted, found = _layerwise(config), _layerwise(written)
    lost = [f"{name}={wanted[name]!r}" for name in wanted if wanted[name] != found[name]]
    if lost:
        raise CheckpointError(
            f"a config.json of model_type {config.model_type} cannot say {', '.join(lost)}: save with source=, the "
            "folder the model was loaded from"
        )
