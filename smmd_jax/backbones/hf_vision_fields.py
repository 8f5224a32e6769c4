"""The fields of a config.json for a VisionLanguageConfig that came from no file."""

import dataclasses
from typing import Any

from smmd_jax.backbones.hf_config import QWEN_VL_TEXT
from smmd_jax.backbones.hf_fields import hf_fields
from smmd_jax.backbones.vlm import VisionLanguageConfig
from smmd_jax.errors import CheckpointError


def vision_fields(config: VisionLanguageConfig) -> dict[str, Any]:
    """Return what a Hugging Face config.json says of this model; only qwen2_5_vl is written without a source.

    Raises:
        CheckpointError: a model that a config.json of its family cannot express, or one of another family.

    Example:
        >>> from smmd_jax.backbones.presets import PRESETS
        >>> vision_fields(PRESETS["tiny-vlm"])["vision_config"]["depth"]
        3
    """
    if config.model_type != "qwen2_5_vl":
        raise CheckpointError(f"a {config.model_type} model is saved with source=, the folder it was loaded from")
    vision, rope = config.vision, config.text.rope
    plain = dataclasses.replace(config.text, model_type="qwen2", rope=dataclasses.replace(rope, sections=None))
    text = {name: value for name, value in hf_fields(plain).items() if name != "architectures"}
    text["model_type"] = QWEN_VL_TEXT
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": list(rope.sections)}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": config.model_type,
        "text_config": text,
        "vision_config": {
            "model_type": config.model_type,
            "depth": vision.num_layers,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.num_heads,
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_size,
            "spatial_merge_size": vision.merge_size,
            "in_channels": vision.channels,
            "window_size": vision.window_size,
            "fullatt_block_indexes": list(vision.full_layers),
            "out_hidden_size": config.text.hidden_size,
            "hidden_act": "silu",
        },
        "image_token_id": config.image_token_id,
        "tie_word_embeddings": config.tied,
        # Special ids belong to a tokenizer; left out, they would be those of the family's released models. Those around
        # an image and a video cannot be null: the caller gives them, see `save_parameters`.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
