"""Flax NNX ports of the backbones; needs flax."""

from smmd_jax.backbones.cache import Cache
from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.decoder import Decoder
from smmd_jax.backbones.presets import PRESETS
from smmd_jax.backbones.rope import RopeConfig
from smmd_jax.backbones.sharding import SHARDING_RULES, parameter_shardings

# model_type of config.json -> port
BACKBONES = {
    "qwen2": Decoder,
    "qwen3": Decoder,
    "llama": Decoder,
    "smollm3": Decoder,
    "mistral": Decoder,
    "ministral": Decoder,
    "ministral3": Decoder,
    "gemma3_text": Decoder,
}

__all__ = [
    "BACKBONES",
    "PRESETS",
    "SHARDING_RULES",
    "Cache",
    "Decoder",
    "DecoderConfig",
    "RopeConfig",
    "parameter_shardings",
]
