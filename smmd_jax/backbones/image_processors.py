"""The table of image processors: from images to what a vision-language model takes, as those of Hugging Face make it.

Needs Pillow. What comes out has the names, shapes and numbers of the processors of transformers, beside the tokens that
each image is in a prompt.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smmd_jax.backbones.image_pixels import ImageProcessor
from smmd_jax.backbones.mllama_images import MllamaImages
from smmd_jax.backbones.pixtral_images import PixtralImages
from smmd_jax.backbones.qwen_images import QwenImages
from smmd_jax.backbones.vision import VisionConfig
from smmd_jax.errors import CheckpointError

# model_type -> processor
IMAGE_PROCESSORS = {"mistral3": PixtralImages, "qwen2_5_vl": QwenImages, "mllama": MllamaImages}


def make_image_processor(model_type: str, fields: Mapping[str, Any], vision: VisionConfig) -> ImageProcessor:
    """Make the processor of a family from the fields of preprocessor_config.json.

    Args:
        model_type: a row of IMAGE_PROCESSORS, as `config.model_type` of a model.
        fields: of the file, see `read_preprocessor`; what it leaves out is as in transformers.
        vision: of the same model; the two must agree.

    Raises:
        ValueError: an unknown family.
        CheckpointError: fields that no processor has or that contradict the tower; the message names field and value.

    Example:
        >>> from PIL import Image
        >>> vision = VisionConfig(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2, patch_size=14)
        >>> process = make_image_processor("mistral3", {"size": {"longest_edge": 56}, "patch_size": 14}, vision)
        >>> images = process([[Image.new("RGB", (100, 50))]])
        >>> images.arrays["image_sizes"].tolist(), images.image_tokens
        ([[28, 56]], ((2,),))
    """
    if model_type not in IMAGE_PROCESSORS:
        raise ValueError(f"model_type is {model_type!r}, wanted one of {', '.join(IMAGE_PROCESSORS)}")
    return IMAGE_PROCESSORS[model_type].from_fields(fields, vision)


def read_preprocessor(folder: str | Path) -> dict[str, Any]:
    """Return what a folder says of its image processor: preprocessor_config.json, or a part of processor_config.json.

    Raises:
        CheckpointError: neither file, or one that does not hold an object.
    """
    for name, inner in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        path = Path(folder) / name
        if not path.is_file():
            continue
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            fields = fields if inner is None else fields[inner]
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path} does not say how images are prepared: {error!r}") from error
        if not isinstance(fields, dict):
            raise CheckpointError(f"{path} holds a {type(fields).__name__}, wanted an object")
        return fields
    raise CheckpointError(f"{folder} has neither preprocessor_config.json nor processor_config.json")
