"""Small decoders, one per text family, and an independent float64 NumPy decoder that knows neither padding nor batches.

`reference_hidden` takes one plain sequence; padded and packed batches are compared with it row by row.
"""

import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from smmd_jax.backbones import BACKBONES, Decoder, DecoderConfig, RopeConfig, VisionLanguageConfig

V = 37
SIZES = dict(vocab_size=V, hidden_size=24, intermediate_size=40, num_heads=4, num_kv_heads=2, max_positions=128)
YARN = RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_positions=16)
FAMILIES = {
    "tiny": DecoderConfig(**SIZES | {"num_kv_heads": 4}, num_layers=2),
    "qwen2": DecoderConfig(**SIZES, num_layers=2, model_type="qwen2", qkv_bias=True, rope=RopeConfig(theta=1e6)),
    "qwen2-yarn": DecoderConfig(**SIZES, num_layers=2, model_type="qwen2", qkv_bias=True, rope=YARN),
    "qwen3": DecoderConfig(**SIZES, num_layers=2, model_type="qwen3", head_dim=10, qk_norm=True, tied=False),
    "llama3.1": DecoderConfig(
        **SIZES, num_layers=2, rope=RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_positions=32)
    ),
    "biased": DecoderConfig(**SIZES, num_layers=1, qkv_bias=True, output_bias=True, mlp_bias=True, activation="gelu"),
    "smollm3": DecoderConfig(**SIZES, num_layers=3, model_type="smollm3", rope_layers=(True, False, True)),
    "mistral": DecoderConfig(**SIZES, num_layers=2, model_type="mistral", head_dim=8, window=4, tied=False),
    "ministral": DecoderConfig(
        **SIZES, num_layers=3, model_type="ministral", window=3, sliding_layers=(False, True, True)
    ),
    "ministral3": DecoderConfig(
        **SIZES, num_layers=2, model_type="ministral3", head_dim=12, query_scale_beta=0.1, query_scale_length=8,
        rope=RopeConfig(
            theta=1e6, kind="yarn", factor=16.0, original_max_positions=8, mscale=1.0, mscale_all_dim=1.0
        ),
    ),
    "gemma3_text": DecoderConfig(
        **SIZES, num_layers=3, model_type="gemma3_text", head_dim=10, attention_scale=20**-0.5, qk_norm=True,
        norm_plus_one=True, post_norms=True, embedding_scale=24**0.5, activation="gelu_tanh", window=4,
        sliding_layers=(True, True, False), rope=RopeConfig(theta=1e6, kind="linear", factor=8.0),
        local_rope=RopeConfig(theta=1e4),
    ),
}


# Two families of every kind of layer always; the others where slow tests run.
EACH_FAMILY = [
    pytest.param(name, marks=[] if name in ("smollm3", "gemma3_text") else [pytest.mark.slow]) for name in FAMILIES
]


@functools.cache
def make_decoder(family: str, seed: int = 0) -> Decoder:
    """A decoder whose norms and biases are random too: at 1 and 0 a forgotten one would not show."""
    model = Decoder(FAMILIES[family], rngs=nnx.Rngs(seed))
    graphdef, state = nnx.split(model)
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda leaf: leaf + np.float32(0.2) * rng.standard_normal(leaf.shape, np.float32), state)
    return nnx.merge(graphdef, state)


@functools.cache
def abstract_state(config: DecoderConfig | VisionLanguageConfig) -> nnx.State:
    """Shapes and dtypes of the parameters, without memory."""
    return nnx.state(nnx.eval_shape(lambda: BACKBONES[config.model_type](config, rngs=nnx.Rngs(0))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(graphdef, method, state, arguments):
    return getattr(nnx.merge(graphdef, state), method)(**arguments)


def run(model: Decoder, method: str = "__call__", **arguments) -> np.ndarray:
    """Call a method of the model under jit."""
    graphdef, state = nnx.split(model)
    return np.asarray(_run(graphdef, method, state, arguments))


def _norm(x, weight, config):
    weight = 1 + weight if config.norm_plus_one else weight
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weight


def _gate(x, name):
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference_frequencies(rope: RopeConfig, head_dim: int) -> tuple[list[float], float]:
    """Angle per position of each pair, one by one, and the factor on cos and sin."""
    plain = [rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    original, magnitude = rope.original_max_positions, 1.0
    if rope.kind == "default":
        return plain, magnitude
    if rope.kind == "linear":
        return [f / rope.factor for f in plain], magnitude
    if rope.kind == "llama3":
        found = []
        for f in plain:
            wavelength = 2 * math.pi / f
            if wavelength < original / rope.high_freq_factor:
                found.append(f)
            elif wavelength > original / rope.low_freq_factor:
                found.append(f / rope.factor)
            else:
                smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
                found.append((1 - smooth) * f / rope.factor + smooth * f)
        return found, magnitude

    def dimension(turns):  # where a pair makes so many turns over the original context
        return head_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    found = []
    for i, f in enumerate(plain):
        share = min(max((i - low) / (high - low), 0), 1)
        found.append(f * (1 - share) + f / rope.factor * share)
    if rope.mscale is None:
        magnitude = 0.1 * math.log(rope.factor) + 1
    return found, magnitude


def _rotate(heads, rope):
    frequencies, magnitude = reference_frequencies(rope, heads.shape[-1])
    half = heads.shape[-1] // 2
    out = np.empty_like(heads)
    for position in range(heads.shape[0]):
        for pair, frequency in enumerate(frequencies):
            c, s = math.cos(position * frequency) * magnitude, math.sin(position * frequency) * magnitude
            a, b = heads[position, :, pair], heads[position, :, pair + half]
            out[position, :, pair], out[position, :, pair + half] = a * c - b * s, b * c + a * s
    return out


def _linear(x, parameters):
    return x @ parameters["kernel"] + parameters.get("bias", 0)


def reference_hidden(model: Decoder, ids: list[int]) -> np.ndarray:
    """Hidden states [T, D] of one sequence in float64, query by query."""
    config = model.config
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(model)))
    x = tree["embed_tokens"]["embedding"][ids] * config.embedding_scale
    group = config.num_heads // config.num_kv_heads
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    for index in range(config.num_layers):
        layer = tree["layers"][index]
        window, rope = config.window_of(index), config.rope_of(index)
        attention, h = layer["self_attn"], _norm(x, layer["input_layernorm"]["weight"], config)
        projected = (_linear(h, attention[f"{name}_proj"]) for name in "qkv")
        q, k, v = (heads.reshape(len(ids), -1, config.head_dim) for heads in projected)
        if config.qk_norm:
            q, k = (_norm(y, attention[name]["weight"], config) for y, name in ((q, "q_norm"), (k, "k_norm")))
        if rope is not None:
            q, k = _rotate(q, rope), _rotate(k, rope)
        out = np.zeros((len(ids), config.num_heads, config.head_dim))
        for t in range(len(ids)):
            first = 0 if window is None else max(0, t - window + 1)
            longer = 1 + config.query_scale_beta * math.log(1 + t // config.query_scale_length)
            for head in range(config.num_heads):
                scores = k[first : t + 1, head // group] @ q[t, head] * scale * longer
                weights = np.exp(scores - scores.max())
                out[t, head] = weights / weights.sum() @ v[first : t + 1, head // group]
        out = _linear(out.reshape(len(ids), -1), attention["o_proj"])
        if config.post_norms:
            out = _norm(out, layer["post_attention_layernorm"]["weight"], config)
        x = x + out
        before = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        h, mlp = _norm(x, layer[before]["weight"], config), layer["mlp"]
        wide = _gate(_linear(h, mlp["gate_proj"]), config.activation) * _linear(h, mlp["up_proj"])
        out = _linear(wide, mlp["down_proj"])
        if config.post_norms:
            out = _norm(out, layer["post_feedforward_layernorm"]["weight"], config)
        x = x + out
    return _norm(x, tree["norm"]["weight"], config)


def reference_logits(model: Decoder, ids: list[int]) -> np.ndarray:
    """Logits [T, V] of one sequence in float64."""
    tree = nnx.to_pure_dict(nnx.state(model))
    head = tree["embed_tokens"]["embedding"].T if model.config.tied else tree["lm_head"]["kernel"]
    return reference_hidden(model, ids) @ np.asarray(head, np.float64)


def sequences(lengths=(11, 4, 7), seed: int = 0) -> list[list[int]]:
    """Token sequences of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, V, length).tolist() for length in lengths]


def padded(rows: list[list[int]], side: str, pad: int = 0, width: int | None = None) -> dict[str, np.ndarray]:
    """input_ids and attention_mask with the rows against one side."""
    width = width or max(map(len, rows))
    ids, mask = np.full((len(rows), width), pad, np.int32), np.zeros((len(rows), width), np.int32)
    for row, tokens in enumerate(rows):
        where = slice(width - len(tokens), None) if side == "left" else slice(len(tokens))
        ids[row, where], mask[row, where] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}
