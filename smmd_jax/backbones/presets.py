"""Configs by name: the tiny decoder of the default run and the text decoders of the paper."""

from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.rope import RopeConfig

# vocab_size is the width of the head; `dataclasses.replace(PRESETS["tiny"], vocab_size=...)` fits the tiny one to a
# tokenizer of the task.
PRESETS = {
    "tiny": DecoderConfig(
        vocab_size=128, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, max_positions=1024
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
}
