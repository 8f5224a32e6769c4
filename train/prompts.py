"""Prompts of an evaluation split, in batches of a few fixed shapes."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from smmd_jax.backbones.image_rows import ImageRows
from train.exits import DataError
from train.pictures import image_run, read_picture
from train.tasks.base import Example, Source
from train.tokenizer import Tokenizer

_SMALLEST_WIDTH = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Prompts to generate from, padded on the left so that every answer begins in the same column.

    Args:
      input_ids: [B, P] int32.
      attention_mask: [B, P] bool, false on padding.
      examples: the real examples, first rows first; rows beyond them repeat the last one to keep the shape.
      rows: how the backbone reads their images; None: they have none.
      room: of the images, see `ImageRows.rooms`.
    """

    input_ids: Int[np.ndarray, "B P"]
    attention_mask: Bool[np.ndarray, "B P"]
    examples: tuple[Example, ...]
    rows: ImageRows | None = None
    room: int = 0

    def vision(self) -> dict[str, Any]:
        """Prepare the images; returns what a model and `train.generate.generate` take for them, {} without images."""
        if self.rows is None:
            return {}
        prepared = [self.rows.prepare(read_picture(example)) for example in self.examples]
        prepared += [prepared[-1]] * (len(self.input_ids) - len(prepared))
        images, positions = self.rows.lay_out(self.input_ids, self.attention_mask, prepared, room=self.room)
        return {"images": images} | ({} if positions is None else {"positions": np.moveaxis(positions, 1, 0)})


def make_prompt_batches(
    source: Source,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    examples: int | None = None,
    max_length: int | None = None,
    images: ImageRows | None = None,
) -> list[PromptBatch]:
    """Encode the prompts of a source's first examples for generation.

    Widths are 16, 32, 64, ... and `max_length`: a prompt goes to the smallest that holds it, so few shapes are
    compiled, and only the last batch of a width has spare rows. Images are prepared batch by batch, when they are
    needed; prompts whose images need different room, or that have none, are in different batches.

    Args:
      source: random access to examples.
      tokenizer: encodes the prompts.
      batch_size: rows of every batch.
      examples: how many; None takes all.
      max_length: the longest prompt, in tokens, that the model can take; None sets no limit.
      images: how the backbone reads images; None: it reads text alone.

    Returns:
      The batches, narrow ones first; within a width in the order of the source.

    Raises:
      DataError: an image that cannot be read or has nobody to read it, an empty prompt, or one longer than
        `max_length`: evaluation leaves nothing out and cuts nothing.
      ValueError: `examples` or `batch_size` below 1, or more examples than the source has.
    """
    count = len(source) if examples is None else examples
    if batch_size < 1 or not 1 <= count <= len(source):
        raise ValueError(
            f"make_prompt_batches: batch_size={batch_size} and examples={count} must be positive, and there are "
            f"{len(source)} examples."
        )
    chosen = [source[index] for index in range(count)]
    sizes, runs = zip(*(image_run(example, images) for example in chosen), strict=True)
    rooms = [0] * count if images is None else images.rooms(np.array(sizes)).tolist()
    encoded = tokenizer.encode_prompts([example.prompt for example in chosen], runs)
    by_shape: dict[tuple[int, int], list[tuple[Example, list[int]]]] = {}
    for example, ids, room in zip(chosen, encoded, rooms, strict=True):
        if not ids or (max_length is not None and len(ids) > max_length):
            raise DataError(f"Example {example.key} has a prompt of {len(ids)} tokens; 1 to {max_length} are possible.")
        width = max(_SMALLEST_WIDTH, 1 << (len(ids) - 1).bit_length())
        width = width if max_length is None else min(width, max_length)
        by_shape.setdefault((width, room), []).append((example, ids))
    return [
        dataclasses.replace(
            _prompt_batch(pairs[first : first + batch_size], batch_size, width, tokenizer.pad_id),
            rows=images if room else None,
            room=room,
        )
        for (width, room), pairs in sorted(by_shape.items())
        for first in range(0, len(pairs), batch_size)
    ]


def _prompt_batch(pairs: list[tuple[Example, list[int]]], batch_size: int, width: int, pad_id: int) -> PromptBatch:
    input_ids = np.full((batch_size, width), pad_id, np.int32)
    attention_mask = np.zeros((batch_size, width), bool)
    for row in range(batch_size):
        ids = pairs[min(row, len(pairs) - 1)][1]
        input_ids[row, width - len(ids) :] = ids
        attention_mask[row, width - len(ids) :] = True
    return PromptBatch(
        input_ids=input_ids, attention_mask=attention_mask, examples=tuple(example for example, _ in pairs)
    )
