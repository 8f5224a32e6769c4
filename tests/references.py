"""Tiny random Hugging Face checkpoints and what transformers computes with them, for the parity tests."""

import functools
import os

import numpy as np
import pytest


@functools.cache
def libraries():
    """torch and transformers, imported by the first test that needs them: a file is collected without them."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return pytest.importorskip("torch"), pytest.importorskip("transformers")


SIZES = dict(
    vocab_size=199, hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-6,
)  # fmt: skip
_DEFAULT = dict(rope_type="default", rope_theta=1e6)
# The original context lies far below the real one, so that what scales with it shows within a few tokens.
_LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
_YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=8)
_MINISTRAL3 = _YARN | dict(
    factor=16.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.2,
)  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _case(name: str, *, layers: int = 3, rope: dict = _DEFAULT, **fields):
    return f"{name}Config", {**SIZES, "num_hidden_layers": layers, "rope_parameters": dict(rope), **fields}


# Every feature that tells the families apart, each with an odd shape: 3 key-value heads, heads that are wider or
# narrower than hidden_size / heads, tied and untied heads, biases, windows, layers without rope.
TEXT = {
    "qwen2": _case("Qwen2", tie_word_embeddings=True),
    "qwen2-untied": _case("Qwen2", layers=2, tie_word_embeddings=False, num_key_value_heads=1),
    "qwen2-window": _case("Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen2-unused-window": _case("Qwen2", layers=1, use_sliding_window=False, sliding_window=2),
    "qwen2-yarn": _case("Qwen2", rope=_YARN, tie_word_embeddings=True),
    "qwen3": _case("Qwen3", head_dim=22, tie_word_embeddings=True),
    "qwen3-biased": _case("Qwen3", layers=2, head_dim=6, attention_bias=True),
    "llama": _case("Llama", rope=dict(rope_type="default", rope_theta=5e5), rms_norm_eps=1e-5),
    "llama-tied": _case("Llama", layers=2, head_dim=12, tie_word_embeddings=True, num_key_value_heads=6),
    "llama3.1": _case("Llama", rope=_LLAMA3, tie_word_embeddings=True),
    "llama-biased": _case("Llama", layers=2, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama-linear": _case("Llama", layers=2, rope=dict(rope_type="linear", rope_theta=1e4, factor=3.0)),
    "smollm3": _case("SmolLM3", layers=5, tie_word_embeddings=True),
    "smollm3-listed": _case("SmolLM3", layers=3, no_rope_layers=[0, 1, 0], tie_word_embeddings=False),
    "smollm3-window": _case("SmolLM3", layers=4, use_sliding_window=True, sliding_window=4),
    "mistral": _case("Mistral", layers=2, head_dim=10, sliding_window=6),
    "mistral-full": _case("Mistral", layers=2, sliding_window=None, tie_word_embeddings=True),
    "ministral": _case(
        "Ministral", layers=4, head_dim=8, sliding_window=5, layer_types=[_FULL, _SLIDING, _SLIDING, _FULL]
    ),
    "ministral3": _case("Ministral3", rope=_MINISTRAL3, head_dim=14, tie_word_embeddings=True),
    "ministral3-untied": _case("Ministral3", layers=2, rope=_MINISTRAL3 | dict(mscale=0.7), tie_word_embeddings=False),
    "gemma3_text": _case(
        "Gemma3Text", layers=4, head_dim=20, query_pre_attn_scalar=11, sliding_window=5,
        layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING],
        rope={_FULL: dict(rope_type="linear", rope_theta=1e6, factor=8.0), _SLIDING: dict(rope_theta=1e4)},
    ),
}  # fmt: skip


def make_reference(name: str, seed: int):
    """A model whose every weight is random: a norm at 1 or a bias at 0 would hide that it is forgotten."""
    torch, transformers = libraries()
    class_name, fields = TEXT[name]
    config = getattr(transformers, class_name)(**fields)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    plus_one = config.model_type == "gemma3_text"
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if path.endswith("norm.weight"):
                parameter.copy_(0.25 * noise + (0.0 if plus_one else 1.0))
            elif path.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in path:
                # Small, or with a tied head every token would predict itself and the layers would hardly count.
                parameter.copy_(noise * (0.04 if plus_one else 0.15))
            else:
                parameter.copy_(noise * 1.2 / parameter.shape[1] ** 0.5)
    model.tie_weights()
    # What generate is given as None it takes from here, and would stop at token 2.
    model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model


def forward(model, input_ids, attention_mask=None):
    """(logits, [decoder input, output of each layer but the last, output of the last norm]) as NumPy arrays."""
    torch, _ = libraries()
    inputs = {"input_ids": torch.as_tensor(np.array(input_ids)).long()}
    if attention_mask is not None:
        mask = torch.as_tensor(np.array(attention_mask)).long()
        # Positions count real tokens: with padding on the left, transformers would count columns.
        inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        result = model(**inputs, use_cache=False, output_hidden_states=True)
    return result.logits.numpy(), [hidden.numpy() for hidden in result.hidden_states]


def gradient_norms(model, input_ids) -> tuple[float, dict[str, float]]:
    """(mean cross-entropy of the next token, L2 norm of its gradient by tensor name)."""
    torch, _ = libraries()
    ids = torch.as_tensor(np.array(input_ids)).long()
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    loss.backward()
    return loss.item(), {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}


def generate(model, input_ids, attention_mask, new: int) -> np.ndarray:
    """Greedy tokens [B, new], whatever their values."""
    torch, transformers = libraries()
    config = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids, mask = (torch.as_tensor(np.array(array)).long() for array in (input_ids, attention_mask))
    with torch.no_grad():
        return model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, ids.shape[1] :].numpy()
