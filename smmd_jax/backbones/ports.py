"""The table of backbones, and the config of a model from the fields of its config.json."""

from collections.abc import Mapping
from typing import Any

from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.decoder import Decoder
from smmd_jax.backbones.hf_config import MLLAMA_TEXT, QWEN_VL_TEXT, check_not_quantised, decoder_config
from smmd_jax.backbones.mllama import Mllama
from smmd_jax.backbones.mllama_vision import MllamaVisionConfig
from smmd_jax.backbones.vision import VisionConfig
from smmd_jax.backbones.vlm import Mistral3, Qwen2_5VL, VisionLanguageConfig
from smmd_jax.errors import CheckpointError

ModelConfig = DecoderConfig | VisionLanguageConfig

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
    "mistral3": Mistral3,
    "qwen2_5_vl": Qwen2_5VL,
    "mllama": Mllama,
}


def model_config(fields: Mapping[str, Any]) -> ModelConfig:
    """Make the config of a model, text or vision-language, from the fields of a config.json.

    Raises:
        CheckpointError: a model_type without a port, or a choice that the port does not have.

    Example:
        >>> model_config({"model_type": "gpt2"})
        Traceback (most recent call last):
          ...
        smmd_jax.errors.CheckpointError: model_type is 'gpt2', wanted one of qwen2, qwen3, llama, smollm3, mistral, ministral, ministral3, gemma3_text, mistral3, qwen2_5_vl, mllama
    """  # noqa: E501
    kind = fields.get("model_type")
    if kind not in BACKBONES:
        raise CheckpointError(f"model_type is {kind!r}, wanted one of {', '.join(BACKBONES)}")
    if kind not in _VISION_LANGUAGE:
        return decoder_config(fields)
    check_not_quantised(fields)
    if not isinstance(fields.get("vision_config"), Mapping):
        raise CheckpointError(f"the config of model_type {kind} lacks vision_config")
    try:
        return _VISION_LANGUAGE[kind](fields)
    except KeyError as error:
        raise CheckpointError(f"the config of model_type {kind} lacks {error.args[0]}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the config of model_type {kind} does not describe a model: {error}") from error


def _mistral3(fields: Mapping[str, Any]) -> VisionLanguageConfig:
    vision, text = fields["vision_config"], fields["text_config"]
    _wanted(fields, "vision_feature_layer", -1)
    _wanted(fields, "projector_hidden_act", "gelu")
    _wanted(vision, "hidden_act", "silu", absent="gelu")
    return VisionLanguageConfig(
        model_type="mistral3",
        text=_text(fields, text, "ministral3"),
        vision=VisionConfig(
            hidden_size=vision["hidden_size"],
            intermediate_size=vision["intermediate_size"],
            num_layers=vision["num_hidden_layers"],
            num_heads=vision["num_attention_heads"],
            patch_size=vision["patch_size"],
            channels=vision.get("num_channels", 3),
            merge_size=fields.get("spatial_merge_size", 2),
            rope_theta=_vision_theta(vision),
        ),
        image_token_id=fields.get("image_token_id", fields.get("image_token_index", 10)),
        projector_bias=bool(fields.get("multimodal_projector_bias", False)),
    )


def _qwen2_5_vl(fields: Mapping[str, Any]) -> VisionLanguageConfig:
    vision = fields["vision_config"]
    # Hub files have the fields of the text at the top, newer ones nest them.
    text = fields.get("text_config") or {name: value for name, value in fields.items() if name != "vision_config"}
    text = {**text, "model_type": QWEN_VL_TEXT}
    _wanted(vision, "hidden_act", "silu")
    decoder = _text(fields, text, QWEN_VL_TEXT)
    outputs = vision.get("out_hidden_size", decoder.hidden_size)
    if outputs != decoder.hidden_size:
        raise CheckpointError(f"out_hidden_size is {outputs} and the text is {decoder.hidden_size} wide: wanted equal")
    return VisionLanguageConfig(
        model_type="qwen2_5_vl",
        text=decoder,
        vision=VisionConfig(
            hidden_size=vision["hidden_size"],
            intermediate_size=vision["intermediate_size"],
            num_layers=vision["depth"],
            num_heads=vision["num_heads"],
            patch_size=vision.get("patch_size", vision.get("spatial_patch_size", 14)),
            temporal_size=vision.get("temporal_patch_size", 2),
            channels=vision.get("in_channels", vision.get("in_chans", 3)),
            merge_size=vision.get("spatial_merge_size", 2),
            window_size=vision.get("window_size", 112),
            full_layers=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
            rope_theta=_vision_theta(vision),
            norm_eps=1e-6,
            mlp_bias=True,
        ),
        image_token_id=fields.get("image_token_id", 151655),
    )


def _mllama(fields: Mapping[str, Any]) -> VisionLanguageConfig:
    vision, text = fields["vision_config"], fields["text_config"]
    _wanted(vision, "hidden_act", "gelu")
    tower = MllamaVisionConfig(
        hidden_size=vision["hidden_size"],
        intermediate_size=vision["intermediate_size"],
        num_layers=vision["num_hidden_layers"],
        num_heads=vision.get("attention_heads", vision.get("num_attention_heads", 16)),
        patch_size=vision["patch_size"],
        channels=vision.get("num_channels", 3),
        norm_eps=vision.get("norm_eps", 1e-5),
        image_size=vision["image_size"],
        max_tiles=vision.get("max_num_tiles", 4),
        aspect_ratios=len(vision.get("supported_aspect_ratios") or range(8)),
        num_global_layers=vision.get("num_global_layers", 8),
        feature_layers=tuple(vision.get("intermediate_layers_indices") or (3, 7, 15, 23, 30)),
    )
    _wanted(vision, "vision_output_dim", tower.output_size)
    return VisionLanguageConfig(
        model_type="mllama",
        text=_text(fields, text, MLLAMA_TEXT),
        vision=tower,
        image_token_id=fields.get("image_token_index", fields.get("image_token_id", text["vocab_size"])),
    )


# model_type -> the config from the fields
_VISION_LANGUAGE = {"mistral3": _mistral3, "qwen2_5_vl": _qwen2_5_vl, "mllama": _mllama}


def _text(fields: Mapping[str, Any], text: Mapping[str, Any], kind: str) -> DecoderConfig:
    tied = fields.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return decoder_config({**text, "model_type": text.get("model_type", kind), "tie_word_embeddings": tied})


def _vision_theta(vision: Mapping[str, Any]) -> float:
    # The type of a tower's rope has had many names; it is always the same rope.
    rope = vision.get("rope_parameters") or vision.get("rope_scaling") or {}
    return float(rope.get("rope_theta") or vision.get("rope_theta") or 10_000.0)


def _wanted(fields: Mapping[str, Any], name: str, value: Any, *, absent: Any = None) -> None:
    found = fields.get(name, value if absent is None else absent)
    if found != value:
        raise CheckpointError(f"{name} is {found!r}, and the port has {value!r} only")
