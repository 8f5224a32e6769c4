"""Flax NNX ports of the backbones; needs flax."""

from smmd_jax.backbones.cache import Cache
from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.decoder import Decoder
from smmd_jax.backbones.lora import (
    LORA_TARGETS,
    add_lora,
    add_tower_lora,
    is_adapter,
    join_parameters,
    lora_scale,
    merge_lora,
    split_trainable,
)
from smmd_jax.backbones.ports import BACKBONES
from smmd_jax.backbones.presets import PRESETS
from smmd_jax.backbones.rope import RopeConfig
from smmd_jax.backbones.sharding import SHARDING_RULES, parameter_shardings
from smmd_jax.backbones.stack import REMAT, stack_layers, unstack_layers
from smmd_jax.backbones.vlm import VisionLanguageConfig, VisionLanguageModel
from smmd_jax.backbones.weights import load_pretrained, save_pretrained

__all__ = [
    "BACKBONES",
    "LORA_TARGETS",
    "PRESETS",
    "REMAT",
    "SHARDING_RULES",
    "Cache",
    "Decoder",
    "DecoderConfig",
    "RopeConfig",
    "VisionLanguageConfig",
    "VisionLanguageModel",
    "add_lora",
    "add_tower_lora",
    "is_adapter",
    "join_parameters",
    "load_pretrained",
    "lora_scale",
    "merge_lora",
    "parameter_shardings",
    "save_pretrained",
    "split_trainable",
    "stack_layers",
    "unstack_layers",
]


def __dir__() -> list[str]:
    """List the public names alone: the modules that they come from are no part of the interface."""
    return [*__all__]
