"""Generation, greedy or sampled: prefill and a loop over new tokens in one compiled program."""

import functools
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, Int

from train.partition import place_everywhere, place_prompts, replicated


def generate(
    model: nnx.Module,
    input_ids: Int[ArrayLike, "B T"],
    *,
    attention_mask: ArrayLike,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    images: Any = None,
    positions: ArrayLike | None = None,
    pad_id: int = 0,
    temperature: float = 0.0,
    key: Array | None = None,
    mesh: Mesh | None = None,
) -> Int[Array, "B new"]:
    """Return a continuation, token by token: the most likely one, or one drawn at a temperature.

        token = argmax(logits)                     temperature 0
        token ~ softmax(logits / temperature)      otherwise

    A row that has produced one of `eos_ids` is done: its EOS is kept and `pad_id` follows. The loop stops when all
    rows are done. Rows do not see each other, so a row's tokens do not depend on the rows after it; left and right
    padding give the same tokens. One compilation serves every call with the same model structure and shapes.

    Args:
        model: a backbone.
        input_ids: int [B, T] prompts, padded on either side.
        attention_mask: [B, T], non-zero for real tokens.
        max_new_tokens: how many tokens to return.
        eos_ids: tokens that end an answer, each of them.
        images: for the vision families, as their `hidden` takes them.
        positions: of the prompts, where the images were prepared by the caller: [3, B, T] for three axes; None: the
            model counts them.
        pad_id: what follows the EOS.
        temperature: 0 is greedy, 1 samples from the model's own distribution.
        key: of jax.random; needed with a temperature: one, from which row i draws with `fold_in(key, i)`, or [B] keys,
            one for each row, with which a row's draws do not depend on its place in the batch.
        mesh: that the model lies on: the prompts are shared by its axes data and fsdp where these divide their number.
            Several processes pass the same prompts and get the same answer.

    Returns:
        int32 [B, max_new_tokens].

    Raises:
        ValueError, TypeError: arrays that are not [B, T] integers, no row or one without a real token, ids that the
            model does not read (prompts) or write (eos_ids), max_new_tokens below 1, more tokens than the model has
            positions, a temperature that is negative or not finite, a temperature without a key or a key without a
            temperature, or another number of keys than rows.

    Example:
        >>> from smmd_jax.backbones import PRESETS, Decoder
        >>> model = Decoder(PRESETS["tiny"], rngs=nnx.Rngs(0))
        >>> prompts = jnp.array([[5, 6, 7]])
        >>> generate(model, prompts, attention_mask=jnp.ones_like(prompts), max_new_tokens=4).shape
        (1, 4)
    """
    input_ids, attention_mask = np.asarray(input_ids), np.asarray(attention_mask)
    _check(model, input_ids, attention_mask, max_new_tokens, images, positions)
    vision = {}
    if images is not None:
        input_ids, images, positions = model.prepare(input_ids, attention_mask, images, positions)
        vision = {"images": images} | ({} if positions is None else {"positions": jnp.asarray(positions)})
        vision = vision if mesh is None else place_everywhere(vision, mesh)
    keys = _row_keys(temperature, key, rows=len(input_ids))
    _check_ends(model, eos_ids, pad_id)
    graphdef, state = nnx.split(model)
    tokens = _generate(
        graphdef,
        state,
        place_prompts(np.asarray(input_ids, np.int32), mesh),
        place_prompts(attention_mask != 0, mesh),
        np.asarray(eos_ids, np.int32).reshape(-1),
        np.int32(pad_id),
        None if keys is None else (keys, jnp.float32(temperature)),
        vision,
        max_new_tokens=max_new_tokens,
    )
    return tokens if mesh is None else jax.device_put(tokens, replicated(mesh))


def _check(model, input_ids, attention_mask, max_new_tokens, images, positions):
    if images is None and positions is not None:
        raise ValueError("got positions without images, and those of text are counted: leave them out")
    if images is not None and not hasattr(model, "prepare"):
        raise ValueError(f"got images, but {model.config.model_type} is a text backbone: leave images out")
    if input_ids.ndim != 2 or not np.issubdtype(input_ids.dtype, np.integer):
        raise ValueError(f"input_ids is {input_ids.dtype}{list(input_ids.shape)}, wanted integers [B, T]")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}: make them equal"
        )
    if not (np.issubdtype(attention_mask.dtype, np.integer) or attention_mask.dtype == bool):
        raise TypeError(f"attention_mask is {attention_mask.dtype}, wanted integers or booleans, one per token")
    if not _is_whole(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}, wanted at least 1, a whole number")
    if not len(input_ids):
        raise ValueError("input_ids holds no row: give at least one prompt")
    empty = np.flatnonzero(~(attention_mask != 0).any(axis=1))
    if empty.size:
        raise ValueError(f"prompt rows {empty.tolist()} hold no real token: give each at least one, or leave them out")
    known = getattr(model.config, "text", model.config).num_embeddings
    outside = np.unique(input_ids[(attention_mask != 0) & ((input_ids < 0) | (input_ids >= known))])
    if outside.size:
        raise ValueError(
            f"the prompts hold token ids {outside[:5].tolist()}, and the model reads 0 to {known - 1}: encode them "
            "with the model's own tokenizer"
        )
    length = input_ids.shape[1]
    if length + max_new_tokens > model.config.max_positions:
        raise ValueError(
            f"prompts of {length} columns and {max_new_tokens} new tokens exceed the model's "
            f"{model.config.max_positions} positions: shorten the prompts or ask for fewer tokens"
        )


def _row_keys(temperature, key, *, rows):
    is_number = isinstance(temperature, Real) and not isinstance(temperature, bool)
    if not (is_number and np.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature is {temperature!r}, wanted a finite number of at least 0")
    if temperature > 0 and key is None:
        raise ValueError(f"temperature is {temperature} and no key was given: pass key=jax.random.key(seed)")
    if key is not None and not isinstance(key, jax.Array):
        raise TypeError(f"key is {key!r}, wanted a key of jax.random: pass key=jax.random.key(seed)")
    if temperature == 0 and key is not None:
        raise ValueError("got a key with temperature 0, which draws nothing: leave it out, or give a temperature")
    if key is None:
        return None
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):  # jax.random.PRNGKey gives bare numbers
        key = jax.random.wrap_key_data(key)
    if key.shape not in ((), (rows,)):
        raise ValueError(f"got keys of shape {list(key.shape)} for {rows} rows: pass one key, or one for each row")
    return key if key.ndim else jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(rows))


def _check_ends(model, eos_ids, pad_id):
    width = getattr(model.config, "text", model.config).vocab_size
    for token in np.ravel(np.asarray(eos_ids, object)):
        if not _is_whole(token) or not 0 <= token < width:
            raise ValueError(f"eos_ids holds {token!r}, and the model writes tokens 0 to {width - 1}: it never ends so")
    if not _is_whole(pad_id) or not -(2**31) <= pad_id < 2**31:
        raise ValueError(f"pad_id is {pad_id!r}, wanted a whole number of 32 bits")


def _is_whole(value):
    return isinstance(value, Integral) and not isinstance(value, bool)


@functools.partial(jax.jit, static_argnums=0, static_argnames="max_new_tokens")
def _generate(graphdef, state, input_ids, real, eos_ids, pad_id, sampling, vision, *, max_new_tokens):
    model = nnx.merge(graphdef, state)
    batch, length = input_ids.shape
    # The last token is never read back, so it needs no slot.
    hidden, cache = model.prefill(input_ids, attention_mask=real, slots=length + max_new_tokens - 1, **vision)
    last = length - 1 - jnp.argmax(real[:, ::-1], axis=1)
    first = _choose(model.logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]), sampling, 0)
    tokens = jnp.full((batch, max_new_tokens), pad_id, jnp.int32).at[:, 0].set(first)

    def going_on(carry):
        step, _, done, _, _ = carry
        return (step < max_new_tokens) & ~done.all()

    def advance(carry):
        step, token, done, cache, tokens = carry
        hidden, cache = model.extend(token[:, None], cache)
        token = jnp.where(done, pad_id, _choose(model.logits(hidden[:, 0]), sampling, step))
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (0, step))
        return step + 1, token, done | _is_eos(token, eos_ids), cache, tokens

    carry = (jnp.int32(1), first, _is_eos(first, eos_ids), cache, tokens)
    return jax.lax.while_loop(going_on, advance, carry)[-1]


def _choose(logits, sampling, step):
    if sampling is not None:
        keys, temperature = sampling
        noise = lambda key: jax.random.gumbel(jax.random.fold_in(key, step), logits.shape[1:])
        logits = logits / temperature + jax.vmap(noise)(keys)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _is_eos(token, eos_ids):
    return (token[:, None] == eos_ids[None, :]).any(axis=1)
