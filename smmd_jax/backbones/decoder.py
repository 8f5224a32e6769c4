"""The decoder that every text family shares: embedding, layers, head, and the cached form of the same pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Float, Int

from smmd_jax.backbones.attention import Tokens, visible_keys
from smmd_jax.backbones.cache import Cache, make_cache
from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.cross_layer import CrossLayer, ImageStates
from smmd_jax.backbones.layer import DecoderLayer
from smmd_jax.backbones.norm import RMSNorm
from smmd_jax.backbones.products import wide_einsum
from smmd_jax.backbones.rope import check_positions, rope_rotation
from smmd_jax.backbones.sharding import keep_rows
from smmd_jax.backbones.stack import REMAT, run_scanned, run_unrolled, stack_modules, unstack_modules
from smmd_jax.backbones.token_ids import as_token_ids


def default_positions(
    attention_mask: ArrayLike | None, segment_ids: ArrayLike | None, shape: tuple[int, int]
) -> tuple[Array, Array]:
    """Return (real bool, positions int32), each [B, T], or [1, T] where every token is real.

    positions = clip(cumsum(attention_mask) - 1, 0), counted from the start of each segment where there are segments;
    segment id 0 is padding.
    """
    real = jnp.ones((1, shape[1]), bool) if attention_mask is None else jnp.asarray(attention_mask) != 0
    if segment_ids is None:
        return real, jnp.clip(jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, 0)
    segment_ids = jnp.asarray(segment_ids)
    real = real & (segment_ids > 0)
    counts = jnp.cumsum(real, axis=1, dtype=jnp.int32)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    before = jax.lax.cummax(jnp.where(starts, counts - real, 0), axis=1)
    return real, jnp.clip(counts - 1 - before, 0)


def _prompt(input_ids, attention_mask, positions, segment_ids) -> tuple[Tokens, Array]:
    """Return the tokens of rows that start at column 0, and their positions."""
    real, counted = default_positions(attention_mask, segment_ids, input_ids.shape)
    tokens = Tokens(
        columns=jnp.arange(input_ids.shape[1], dtype=jnp.int32),
        real=real,
        ranks=jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1,
        segments=None if segment_ids is None else jnp.asarray(segment_ids),
    )
    return tokens, counted if positions is None else jnp.asarray(positions)


def _check_arrays(config: DecoderConfig, input_ids, images, **others):
    if images is not None:
        raise ValueError(f"got images, but {config.model_type} is a text backbone: leave images out or load a VLM")
    for name, array in others.items():
        if array is None:
            continue
        array = jnp.asarray(array)
        if name == "positions" and config.rope.sections is not None and array.shape == (3, *input_ids.shape):
            continue
        if array.shape != input_ids.shape:
            raise ValueError(f"{name} has shape {list(array.shape)}, input_ids {list(input_ids.shape)}: wanted equal")
        if not (jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == bool):
            raise TypeError(f"{name} is {array.dtype}, wanted integers or booleans, one per token")
    if all(array is None for array in others.values()) and input_ids.shape[1] > config.max_positions:
        raise ValueError(f"rows of {input_ids.shape[1]} tokens exceed the model's {config.max_positions} positions")


class Decoder(nnx.Module):
    """Predict the next token: the decoder of every text family, which its config tells apart.

    Inside, activations are flat [B * T, D]: on the CPU, XLA makes a transposed copy of each activation for the weight
    gradients of [B, T, D] products, which costs more than the products. The model holds parameters only: randomness
    (dropout) comes in by the call.

    Args:
        config: sizes and choices.
        rngs: makes the initial parameters.
        dtype, param_dtype: of the products and the residual stream, and of the stored parameters. Norms, rotation,
            softmax and logits are float32 whatever these are.
        scan_layers: False: layers are unrolled, with parameters of their own (layers/0/...). True: they are stacked
            (layers/... with a leading axis of layers) and run in one scan, so that compilation does not grow with
            the depth; `stack_layers` and `unstack_layers` go from one to the other. The results are equal. With a
            cache, layers are taken out of the stack one by one: generation may copy the parameters once a token.
        remat: what each layer keeps for its backward pass: "none": everything; "dots": products with weights; "full":
            its input only. On the CPU XLA undoes this for unrolled layers: scan them to save memory there.
        rows: where the rows of a batch lie. What flows between layers and the logits are kept there: left to itself,
            the compiler splits activations over D as the parameters are and adds up partial sums of whole batches.
            None, and batches that do not divide: the compiler decides.

    Raises:
        ValueError: an unknown `remat`; `scan_layers` for a decoder with layers that read images.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = DecoderConfig(vocab_size=32, hidden_size=16, intermediate_size=48, num_layers=2, num_heads=4)
        >>> Decoder(config, rngs=nnx.Rngs(0))(jnp.ones((2, 5), jnp.int32)).shape
        (2, 5, 32)

    References:
        H. Touvron et al., LLaMA, 2023, section 2.2.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        scan_layers: bool = False,
        remat: str = "none",
        rows: NamedSharding | None = None,
    ):
        if not isinstance(remat, str) or remat not in REMAT:
            raise ValueError(f"remat {remat!r} is unknown, wanted one of {', '.join(REMAT)}")
        if scan_layers and config.cross_layers:
            raise ValueError(
                f"scan_layers needs layers that are all alike, and {config.model_type} has layers of two kinds: leave "
                "scan_layers out"
            )
        self.config, self.dtype, self.scan_layers, self.remat = config, dtype, scan_layers, remat
        self.rows = rows
        std = config.hidden_size**-0.5
        self.embed_tokens = nnx.Embed(
            config.num_embeddings, config.hidden_size, dtype=dtype, param_dtype=param_dtype, rngs=rngs,
            embedding_init=nnx.initializers.normal(std),
        )
        dtypes = dict(dtype=dtype, param_dtype=param_dtype)
        kinds = [CrossLayer if layer in config.cross_layers else DecoderLayer for layer in range(config.num_layers)]
        layers = [kind(config, rngs=rngs, **dtypes) for kind in kinds]
        self.layers = stack_modules(layers) if scan_layers else nnx.List(layers)
        self.norm = RMSNorm(config.hidden_size, config, rngs=rngs, param_dtype=param_dtype)
        if config.tied:
            self.lm_head = None
        else:
            self.lm_head = nnx.Linear(
                config.hidden_size, config.vocab_size, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs,
                kernel_init=nnx.initializers.normal(std),
            )

    @property
    def head(self) -> Float[Array, "D V"]:
        """Return the head [D, V] in the dtype of the products; tied: the embedding transposed."""
        return self.stored_head.astype(self.dtype)

    @property
    def stored_head(self) -> Float[Array, "D V"]:
        """Return the head [D, V] in the dtype it is stored in."""
        return self.embed_tokens.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]

    def __call__(
        self,
        input_ids: Int[ArrayLike, "B T"],
        *,
        attention_mask: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        images: dict | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T V"]:
        """Return float32 logits [B, T, V]; the arguments are those of `hidden`."""
        hidden = self.hidden(
            input_ids, attention_mask=attention_mask, positions=positions, segment_ids=segment_ids, images=images,
            rngs=rngs,
        )
        return self.logits(hidden)

    def hidden(
        self,
        input_ids: Int[ArrayLike, "B T"],
        *,
        attention_mask: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        images: dict | None = None,
        embeddings: Float[Array, "B T D"] | None = None,
        states: ImageStates | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the hidden states after the last norm, what the head reads.

        A token sees the real tokens of its own segment up to itself. Rows of padding give finite numbers that mean
        nothing. A real token with an id outside the vocabulary makes its row NaN.

        Args:
            input_ids: int [B, T].
            attention_mask: [B, T], non-zero for real tokens; None: all are real. Left and right padding give the same.
            positions: int [B, T], below `max_positions`, which is checked outside jit; None: counted over the real
                tokens, from 0 in each segment.
            segment_ids: int [B, T], rows packed with several examples; 0 is padding.
            images: must be None here; the vision families take a dict of arrays.
            embeddings: [B, T, D] what the first layer reads, instead of `embed(input_ids)`.
            states: what the cross-attention layers read; None: these layers are skipped.
            rngs: randomness of the dropout; None: no dropout.

        Returns:
            [B, T, D] in the dtype of the products.

        Raises:
            ValueError, TypeError: arrays that are not [B, T] or not integers, positions that the model does not have,
                images for a text backbone.
        """
        input_ids = as_token_ids(input_ids)
        _check_arrays(
            self.config, input_ids, images, attention_mask=attention_mask, positions=positions, segment_ids=segment_ids
        )
        tokens, positions = _prompt(input_ids, attention_mask, positions, segment_ids)
        check_positions(positions, tokens.real, self.config.max_positions)
        tables, choices, run = self._per_layer(input_ids.shape[0], positions, tokens, tokens, states)
        keys = None
        if rngs is not None and self.config.dropout:
            keys = jax.random.split(rngs.dropout(), self.config.num_layers)

        def without_cache(layer, flat, table, key):
            flat, _ = run(layer, flat, *table, rngs=None if key is None else nnx.Rngs(key))
            return keep_rows(flat, self.rows)

        flat = keep_rows(self._first(input_ids, tokens.real, embeddings), self.rows)
        if self.scan_layers:
            flat = run_scanned(self.layers, flat, tables, choices, keys, without_cache, remat=self.remat)
        else:
            rows = [[table[i] for table, i in zip(tables, row, strict=True)] for row in zip(*choices, strict=True)]
            flat = run_unrolled(self.layers, flat, rows, keys, without_cache, remat=self.remat)
        return self.norm(flat).reshape(*input_ids.shape, -1)

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Return float32 logits of hidden states."""
        return self._project(hidden, self.stored_head)

    def numeric_logits(self, hidden: Float[Array, "*batch D"], kernel) -> Float[Array, "*batch N"]:
        """Return float32 logits of the numeric tokens only: hidden @ numeric_columns(kernel).

        Args:
            hidden: [..., D].
            kernel: a NumericKernel or NumericVocab, for its token_ids.

        Raises:
            ValueError: the numeric vocabulary was made for a head wider than this one.
        """
        return self._project(hidden, self.numeric_columns(kernel))

    def numeric_columns(self, kernel) -> Float[Array, "D N"]:
        """Return the head's columns of the numeric tokens, in their order and in the dtype they are stored in.

        Raises:
            ValueError: as `numeric_logits`.
        """
        needed = getattr(kernel, "vocab", kernel).min_vocab_size
        if needed > self.config.vocab_size:
            raise ValueError(
                f"the numeric vocabulary holds token id {needed - 1}, the head has {self.config.vocab_size} columns: "
                "make the numeric vocabulary from this model's tokenizer"
            )
        if self.lm_head is None:  # rows of the embedding lie together in memory, columns of its transpose do not
            return self.embed_tokens.embedding[kernel.token_ids].T
        return self.lm_head.kernel[:, kernel.token_ids]

    def _project(self, hidden: Float[Array, "*batch D"], columns: Float[Array, "D some"]) -> Array:
        flat = hidden.reshape(-1, hidden.shape[-1]).astype(self.dtype)
        products = keep_rows(wide_einsum("td,dv->tv", flat, columns), self.rows, others=PartitionSpec.UNCONSTRAINED)
        return products.reshape(*hidden.shape[:-1], -1)

    def prefill(
        self,
        input_ids: Int[Array, "B T"],
        *,
        attention_mask: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        embeddings: Float[Array, "B T D"] | None = None,
        states: ImageStates | None = None,
        slots: int,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Return the hidden states of a prompt and a cache of `slots` slots that holds it.

        The tokens that follow go on from the largest of `positions`; the other arguments are those of `hidden`.

        Raises:
            ValueError: fewer slots than columns.
        """
        tokens, counted = _prompt(input_ids, attention_mask, None, None)
        shift = None
        if positions is not None:
            last = jnp.where(tokens.real, positions, 0).reshape(-1, *input_ids.shape).max((0, 2))
            shift = (last - jnp.broadcast_to(tokens.ranks, input_ids.shape)[:, -1]).astype(jnp.int32)
        positions = counted if positions is None else jnp.asarray(positions)
        real = jnp.broadcast_to(tokens.real, input_ids.shape)
        hidden, layers = self._cached(
            input_ids, positions, tokens, tokens, past=None, embeddings=embeddings, states=states
        )
        tiles = None if states is None else states.tiles_after(real)
        return hidden, make_cache(
            layers, real, slots, shift=shift, cross_layers=self.config.cross_layers, tiles=tiles
        )

    def extend(self, input_ids: Int[Array, "B T"], cache: Cache) -> tuple[Float[Array, "B T D"], Cache]:
        """Return the hidden states of the tokens that follow those in the cache, and the cache with them.

        The tokens are real and take the next slots; the caller sees to it that there are enough.
        """
        batch, length = input_ids.shape
        slots = cache.real.shape[1]
        columns = cache.used + jnp.arange(length, dtype=jnp.int32)
        real = jax.lax.dynamic_update_slice(cache.real, jnp.ones((batch, length), bool), (0, cache.used))
        key_ranks = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
        ranks = jax.lax.dynamic_slice(key_ranks, (0, cache.used), (batch, length))
        queries = Tokens(columns=columns, real=jnp.ones((batch, length), bool), ranks=ranks)
        keys = Tokens(columns=jnp.arange(slots, dtype=jnp.int32), real=real, ranks=key_ranks)
        positions = ranks + cache.shift[:, None]
        states = None if cache.tiles is None else ImageStates.cached(cache.tiles, length)
        hidden, layers = self._cached(input_ids, positions, queries, keys, past=cache, states=states)
        new_keys, new_values = zip(*layers, strict=True)
        return hidden, dataclasses.replace(
            cache, keys=new_keys, values=new_values, real=real, used=cache.used + length
        )

    def _cached(
        self, input_ids, positions, queries: Tokens, keys: Tokens, *, past: Cache | None, embeddings=None, states=None
    ):
        """Return the hidden states and what each layer read, its keys and values."""
        tables, choices, run = self._per_layer(input_ids.shape[0], positions, queries, keys, states)
        flat = self._first(input_ids, queries.real, embeddings)
        layers = unstack_modules(self.layers, self.config.num_layers) if self.scan_layers else self.layers
        keys_values = []
        for index, layer in enumerate(layers):
            table = [entries[choice[index]] for entries, choice in zip(tables, choices, strict=True)]
            cached = {} if past is None else dict(past=(past.keys[index], past.values[index]), offset=past.used)
            flat, read = run(layer, flat, *table, **cached)
            keys_values.append(read)
        return self.norm(flat).reshape(*input_ids.shape, -1), keys_values

    def _per_layer(self, batch: int, positions, queries: Tokens, keys: Tokens, states: ImageStates | None):
        """Return the masks and the rotations, each made once, the number of each layer's own, and how a layer runs.

        In place of a mask a layer that reads images gets these.
        """
        config = self.config
        layers = range(config.num_layers)
        windows = list(dict.fromkeys(config.window_of(layer) for layer in layers))
        ropes = list(dict.fromkeys(config.rope_of(layer) for layer in layers))
        masks = [visible_keys(queries, keys, window) for window in windows]
        rotations = [None if rope is None else rope_rotation(rope, config.head_dim, positions) for rope in ropes]
        if self.scan_layers and len(ropes) > 1:  # one program for all layers: a layer without a rotation turns by 0
            like = next(rotation for rotation in rotations if rotation is not None)
            still = jnp.ones_like(like[0]), jnp.zeros_like(like[1])
            rotations = [still if rotation is None else rotation for rotation in rotations]
        query_scale = None
        if config.query_scale_beta:
            steps = (positions // config.query_scale_length).astype(jnp.float32)
            query_scale = 1.0 + config.query_scale_beta * jnp.log1p(steps)

        def run(layer, flat, visible, rotation, **options):
            return layer(flat, visible, rotation, batch=batch, query_scale=query_scale, **options)

        choices = (
            [len(masks) if i in config.cross_layers else windows.index(config.window_of(i)) for i in layers],
            [ropes.index(config.rope_of(layer)) for layer in layers],
        )
        return ([*masks, states] if config.cross_layers else masks, rotations), choices, run

    def embed(
        self, input_ids: Int[Array, "B T"], *, attention_mask: ArrayLike | None = None
    ) -> Float[Array, "B T D"]:
        """Return what the first layer reads [B, T, D]; padding reads token 0."""
        real = True if attention_mask is None else jnp.asarray(attention_mask) != 0
        return self._embed(input_ids, real).reshape(*input_ids.shape, -1)

    def _first(self, input_ids, real, embeddings) -> Float[Array, "tokens D"]:
        if embeddings is None:
            return self._embed(input_ids, real)
        return embeddings.reshape(-1, embeddings.shape[-1]).astype(self.dtype)

    def _embed(self, input_ids: Int[Array, "B T"], real: Array) -> Float[Array, "tokens D"]:
        # What stands in the padding must not matter, not even an id that is none.
        ids = jnp.where(real, input_ids, 0).reshape(-1)
        # NaN for an id outside [0, V): jax would take the nearest row, or count a negative id from the end.
        rows = self.embed_tokens.embedding[...].at[ids].get(
            mode="fill", fill_value=np.nan, wrap_negative_indices=False
        )
        rows = rows.astype(self.dtype)
        if self.config.embedding_scale == 1.0:
            return rows
        return rows * jnp.asarray(self.config.embedding_scale, self.dtype)
