"""Configs by name: the tiny decoder of the default run and the backbones of the paper."""

from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.mllama_vision import MllamaVisionConfig
from smmd_jax.backbones.rope import RopeConfig
from smmd_jax.backbones.vision import VisionConfig
from smmd_jax.backbones.vlm import VisionLanguageConfig


def _qwen2_5_vl(**text) -> VisionLanguageConfig:
    return VisionLanguageConfig(
        model_type="qwen2_5_vl",
        text=DecoderConfig(
            model_type="qwen2_5_vl_text", head_dim=128, max_positions=128000, qkv_bias=True,
            rope=RopeConfig(theta=1e6, sections=(16, 24, 24)), **text,
        ),
        vision=VisionConfig(
            hidden_size=1280, intermediate_size=3420, num_layers=32, num_heads=16, patch_size=14, temporal_size=2,
            window_size=112, full_layers=(7, 15, 23, 31), norm_eps=1e-6, mlp_bias=True,
        ),
        image_token_id=151655,
    )  # fmt: skip


# vocab_size is the width of the head; `dataclasses.replace(PRESETS["tiny"], vocab_size=...)` fits the tiny one to a
# tokenizer of the task. The tower of tiny-vlm sees a whole image in every layer: small ones are all that it is for.
PRESETS = {
    "tiny": DecoderConfig(
        vocab_size=128, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, max_positions=1024
    ),
    "tiny-vlm": VisionLanguageConfig(
        model_type="qwen2_5_vl",
        text=DecoderConfig(
            model_type="qwen2_5_vl_text", vocab_size=128, hidden_size=128, intermediate_size=256, num_layers=3,
            num_heads=4, max_positions=1024, qkv_bias=True, rope=RopeConfig(sections=(4, 6, 6)),
        ),
        vision=VisionConfig(
            hidden_size=64, intermediate_size=192, num_layers=3, num_heads=4, patch_size=8, window_size=112,
            full_layers=(0, 1, 2), norm_eps=1e-6, mlp_bias=True,
        ),
        image_token_id=127,
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        max_positions=8192, norm_eps=1e-5, rope=RopeConfig(theta=1e5),
    ),
    "qwen2.5-0.5b": DecoderConfig(
        model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
        num_kv_heads=2, max_positions=32768, qkv_bias=True, rope=RopeConfig(theta=1e6),
    ),
    "qwen2.5-1.5b": DecoderConfig(
        model_type="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12,
        num_kv_heads=2, max_positions=131072, qkv_bias=True, rope=RopeConfig(theta=1e6),
    ),
    "llama3-8b": DecoderConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
        max_positions=8192, norm_eps=1e-5, rope=RopeConfig(theta=5e5), tied=False,
    ),
    "smollm3-3b": DecoderConfig(
        model_type="smollm3", vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_layers=36,
        num_heads=16, num_kv_heads=4, max_positions=65536, rope=RopeConfig(theta=5e6),
        rope_layers=tuple((layer + 1) % 4 != 0 for layer in range(36)),
    ),
    "ministral-3-3b": DecoderConfig(
        model_type="ministral3", vocab_size=131072, hidden_size=3072, intermediate_size=9216, num_layers=26,
        num_heads=32, num_kv_heads=8, head_dim=128, max_positions=262144, norm_eps=1e-5,
        rope=RopeConfig(
            theta=1e6, kind="yarn", factor=16.0, original_max_positions=16384, mscale=1.0, mscale_all_dim=1.0
        ),
        query_scale_beta=0.1, query_scale_length=16384,
    ),
    "qwen2.5-vl-3b": _qwen2_5_vl(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_layers=36, num_heads=16, num_kv_heads=2
    ),
    "qwen2.5-vl-7b": _qwen2_5_vl(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4,
        tied=False,
    ),
    "llama-3.2-11b-vision": VisionLanguageConfig(
        model_type="mllama",
        text=DecoderConfig(
            model_type="mllama_text_model", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=40,
            num_heads=32, num_kv_heads=8, max_positions=131072, norm_eps=1e-5, tied=False,
            rope=RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_positions=8192),
            cross_layers=(3, 8, 13, 18, 23, 28, 33, 38), extra_embeddings=8,
        ),
        vision=MllamaVisionConfig(
            hidden_size=1280, intermediate_size=5120, num_layers=32, num_heads=16, patch_size=14, image_size=560,
            max_tiles=4, aspect_ratios=8, num_global_layers=8, feature_layers=(3, 7, 15, 23, 30),
        ),
        image_token_id=128256,
    ),
}
