"""The predicted distributions at the numeric targets of gold answers, by one pass over prompt and answer."""

from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

from smmd_jax import NumericVocab
from train.distribution_metrics import DistributionMetrics, measure_parts
from train.encode import EncodedExamples
from train.pictures import Pictures

_SMALLEST_WIDTH = 16
# Positions whose logits, as wide as the vocabulary, are in memory at once.
_POSITIONS = 256


def measure_targets(
    model: nnx.Module,
    encoded: EncodedExamples,
    vocab: NumericVocab,
    *,
    batch_size: int,
    pictures: Pictures | None = None,
) -> DistributionMetrics:
    """Measure the distribution that a model predicts at every supervised target that is a numeric token.

    The model reads the gold answer up to each target (teacher forcing). Probabilities are those of the softmax over the
    whole vocabulary, computed in float32 as logarithms.

    Args:
      model: a backbone: `hidden` and `logits`.
      encoded: prompts with their gold answers.
      vocab: the numeric tokens.
      batch_size: rows of a pass; the result depends on it by rounding alone.
      pictures: the images of the examples; None: they have none.
    """
    order = np.argsort(np.asarray(vocab.token_ids))
    ids, values = np.asarray(vocab.token_ids)[order], np.asarray(vocab.values, np.float64)[order]
    read = nnx.jit(lambda model, ids, mask, vision: model.hidden(ids, attention_mask=mask, **vision))
    logs = nnx.jit(lambda model, hidden: jax.nn.log_softmax(model.logits(hidden), axis=-1)[:, ids])

    def parts() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for hidden, targets in _blocks(model, read, encoded, ids, batch_size, pictures):
            filled = np.zeros((_POSITIONS, *hidden.shape[1:]), hidden.dtype)
            filled[: len(hidden)] = hidden
            log_p = np.asarray(logs(model, filled), np.float64)[: len(hidden)]
            yield np.exp(log_p), np.searchsorted(ids, targets)

    return measure_parts(parts(), values)


def _blocks(
    model, read, encoded: EncodedExamples, ids: np.ndarray, batch_size: int, pictures: Pictures | None
):
    """(hidden states [n, D], targets [n]) of the numeric targets, at most _POSITIONS at a time."""
    waiting: list[tuple[np.ndarray, np.ndarray]] = []
    rooms = np.zeros(len(encoded), np.int32) if pictures is None else pictures.rooms
    for rows, lengths, width in _batches(encoded, ids, batch_size, rooms):
        starts = encoded.starts[rows]
        columns = np.arange(width)
        mask = columns[None] < lengths[:, None]
        place = np.minimum(starts[:, None] + columns, len(encoded.targets) - 1)
        targets = encoded.targets[place]
        chosen = mask & encoded.target_mask[place] & np.isin(targets, ids)
        inputs, vision = np.where(mask, encoded.input_ids[place], 0), {}
        if rooms[rows[0]]:
            own = [row if length else None for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)]
            images, positions = pictures.lay_out(inputs, mask, own, room=int(rooms[rows[0]]))
            vision = {"images": images}
            if positions is not None:
                vision["positions"] = np.moveaxis(positions, 1, 0)
        hidden = np.asarray(read(model, inputs, mask, vision))[chosen]
        waiting.append((hidden, targets[chosen]))
        while sum(len(part) for part, _ in waiting) >= _POSITIONS:
            hidden, targets = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
            yield hidden[:_POSITIONS], targets[:_POSITIONS]
            waiting = [(hidden[_POSITIONS:], targets[_POSITIONS:])]
    if waiting:
        hidden, targets = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
        if len(hidden):
            yield hidden, targets


def _batches(encoded: EncodedExamples, ids: np.ndarray, batch_size: int, rooms: np.ndarray):
    """(examples [B], lengths [B], width): those of one width, and one room of their images, together; spare rows
    repeat the last one with length 0."""
    lengths = np.diff(encoded.starts)
    is_numeric = encoded.target_mask & np.isin(encoded.targets, ids)
    has_numbers = np.add.reduceat(is_numeric, encoded.starts[:-1]) > 0
    widths = np.maximum(_SMALLEST_WIDTH, 1 << np.ceil(np.log2(np.maximum(lengths, 1))).astype(int))
    shapes = np.stack([widths, rooms], axis=1)
    for width, room in np.unique(shapes[has_numbers], axis=0).tolist():
        rows = np.flatnonzero(has_numbers & (widths == width) & (rooms == room))
        for first in range(0, len(rows), batch_size):
            some = rows[first : first + batch_size]
            spare = batch_size - len(some)
            yield (
                np.pad(some, (0, spare), mode="edge"),
                np.pad(lengths[some], (0, spare), constant_values=0),
                width,
            )
