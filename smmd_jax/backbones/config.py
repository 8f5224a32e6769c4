"""The fields that tell one decoder family from another."""

import math
from dataclasses import dataclass, field
from numbers import Integral, Real

from smmd_jax.backbones.rope import RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Describe a decoder of the Llama kind; every text family is a set of values of these fields.

    Per-layer choices are tuples of one boolean per layer; None means "the same on every layer" as the field says.

    Args:
        vocab_size: rows of the embedding and columns of the head, V (often more than the tokenizer has).
        hidden_size, intermediate_size: D and F.
        num_layers, num_heads, num_kv_heads: the last divides the second; query head i reads key-value head i // group.
        head_dim: C; None means hidden_size / num_heads.
        max_positions: how many positions the model has; longer rows are refused, by `train.generate` too.
        model_type: the Hugging Face name of the family; it chooses nothing but the sharding table and the export.
        rope: rotary embedding of the layers that have one.
        local_rope: rotary embedding of the sliding layers where it differs (gemma3); None means `rope`.
        rope_layers: which layers rotate (smollm3 has layers that do not); None means all.
        window, sliding_layers: a sliding layer sees `window` tokens, itself included; None in `sliding_layers` means
            all layers slide when there is a window.
        attention_scale: factor on query-key products; None means head_dim ** -0.5 (gemma3 has its own).
        query_scale_beta, query_scale_length: queries at position p are multiplied by
            1 + beta * ln(1 + floor(p / length)) (ministral3); beta 0 switches it off.
        qkv_bias, output_bias, mlp_bias: biases on q, k, v; on o; on gate, up, down.
        qk_norm: RMSNorm over each query and key head before the rotation (qwen3, gemma3).
        norm_eps, norm_plus_one: norms multiply by the weight, or by 1 + weight (gemma3).
        post_norms: also norm what attention and the feed-forward return, before they are added (gemma3).
        embedding_scale: factor on the embeddings (gemma3: sqrt(hidden_size)).
        activation: of the gate: "silu", "gelu" (exact) or "gelu_tanh".
        tied: the head is the embedding transposed.
        dropout: on what attention and the feed-forward return; only where the call passes rngs.
        cross_layers: numbers of the layers that read images instead of the text before (mllama).
        extra_embeddings: rows of the embedding beyond the columns of the head: tokens that are read and never
            predicted (mllama: the image token is the first of eight).

    Raises:
        ValueError: sizes that do not fit together, per-layer tuples of the wrong length, an unknown activation.

    Example:
        >>> DecoderConfig(vocab_size=32, hidden_size=16, intermediate_size=48, num_layers=2, num_heads=4).head_dim
        4
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 4096
    model_type: str = "llama"
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    rope_layers: tuple[bool, ...] | None = None
    window: int | None = None
    sliding_layers: tuple[bool, ...] | None = None
    attention_scale: float | None = None
    query_scale_beta: float = 0.0
    query_scale_length: int = 1
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    norm_plus_one: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    activation: str = "silu"
    tied: bool = True
    dropout: float = 0.0
    cross_layers: tuple[int, ...] = ()
    extra_embeddings: int = 0

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_positions", "query_scale_length", "window", "extra_embeddings"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise ValueError(f"{name} is {value!r}, wanted a whole number")
        for name in ("norm_eps", "attention_scale", "embedding_scale"):
            value = getattr(self, name)
            if name == "attention_scale" and value is None:
                continue
            if not (isinstance(value, Real) and 0.0 < value < math.inf):
                raise ValueError(f"{name} is {value!r}, wanted a finite number above 0")
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_dim is None:
            if self.num_heads < 1 or self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}: give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_positions", "query_scale_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, wanted an even number: the rotation turns pairs")
        for name in ("rope_layers", "sliding_layers"):
            layers = getattr(self, name)
            if layers is not None and len(layers) != self.num_layers:
                raise ValueError(f"{name} has {len(layers)} entries for {self.num_layers} layers: give one per layer")
        if self.sliding_layers is not None and any(self.sliding_layers) and self.window is None:
            raise ValueError("sliding_layers names sliding layers but window is None: give the window in tokens")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}, wanted at least 1 (the token itself), or None for full")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is unknown, wanted one of {', '.join(ACTIVATIONS)}")
        if self.rope.sections is not None and sum(self.rope.sections) != self.head_dim // 2:
            raise ValueError(
                f"rope sections {self.rope.sections} add up to {sum(self.rope.sections)}, wanted head_dim / 2 = "
                f"{self.head_dim // 2}"
            )
        if any(not 0 <= layer < self.num_layers for layer in self.cross_layers):
            raise ValueError(f"cross_layers are {self.cross_layers}, wanted numbers from 0 to {self.num_layers - 1}")
        if self.extra_embeddings < 0 or (self.extra_embeddings and self.tied):
            raise ValueError(
                f"extra_embeddings is {self.extra_embeddings} and tied is {self.tied}: wanted 0 or more, and 0 where "
                "the head is the embedding"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}, wanted 0 <= dropout < 1")

    @property
    def num_embeddings(self) -> int:
        """How many tokens can be read."""
        return self.vocab_size + self.extra_embeddings

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens this layer sees, itself included; None means all."""
        slides = self.sliding_layers is None or self.sliding_layers[layer]
        return self.window if slides else None

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return this layer's rotary embedding; None for a layer without one."""
        if self.rope_layers is not None and not self.rope_layers[layer]:
            return None
        local = self.local_rope is not None and self.window_of(layer) is not None
        return self.local_rope if local else self.rope
