"""Batches: Grain's shuffled order, packing into rows, and an exact position to resume from."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from smmd_jax.targets import check_targets
from train.config import differences
from train.encode import MAX_DROPPED_FRACTION, EncodedExamples, encode_source
from train.exits import DataError
from train.tasks.base import Source
from train.tokenizer import Tokenizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows. Segments of a row are numbered from 1 and positions start again in each; segment 0 is padding.

    Args:
      input_ids: [B, T] int32.
      targets: [B, T] int32, already shifted: the token that follows each input within its example.
      target_mask: [B, T] bool, true where the target belongs to an answer or ends it; false for prompts and padding.
      positions: [B, T] int32.
      segment_ids: [B, T] int32.
    """

    input_ids: Int[Array | np.ndarray, "B T"]
    targets: Int[Array | np.ndarray, "B T"]
    target_mask: Bool[Array | np.ndarray, "B T"]
    positions: Int[Array | np.ndarray, "B T"]
    segment_ids: Int[Array | np.ndarray, "B T"]


class Batches(Iterator[Batch]):
    """An endless stream of batches; made by `make_batches`.

    The order is Grain's ``shuffle().repeat()``: every epoch is a new permutation that depends on (seed, epoch) alone.
    A batch takes the next examples of that order, each into the first row with room for it (one a row without packing),
    and is full at the first example that fits nowhere; that one opens the next batch. So a batch is a function of the
    place in the order where it begins, and this place, one integer, is the whole state. Grain's own packing gives the
    same rows at several times the cost a token, and its state holds the rows in the making.

    Attributes:
      encoded: the examples.
      fingerprint: everything that the stream depends on; streams with equal fingerprints and states go on alike.
      examples: [B, T] int32 for the last batch: the index in the source of the example at each place, -1 for padding.
    """

    def __init__(
        self,
        encoded: EncodedExamples,
        *,
        batch_size: int,
        max_length: int,
        seed: int,
        pack: bool,
        pad_id: int,
        vocab_size: int,
        shard: tuple[int, int],
        fingerprint: Mapping[str, Any],
    ) -> None:
        index, count = shard
        if batch_size < 1 or not 0 <= index < count or batch_size % count:
            raise ValueError(
                f"make_batches: batch_size={batch_size} rows cannot be shared by {count} shards (this is shard "
                f"{index}); it must be a positive multiple of their number, and the shards count from 0."
            )
        self.encoded = encoded
        self.fingerprint = dict(fingerprint)
        self.examples = np.full((batch_size // count, max_length), -1, np.int32)
        self._rows = range(index * (batch_size // count), (index + 1) * (batch_size // count))
        self._batch_size, self._max_length, self._pack = batch_size, max_length, pack
        self._pad_id, self._vocab_size = pad_id, vocab_size
        self._lengths = np.diff(encoded.starts).tolist()
        self._shortest = min(self._lengths)
        self._order = grain.MapDataset.range(len(encoded)).seed(seed).shuffle().repeat()
        self._position = 0

    def __next__(self) -> Batch:
        placed = self._place()
        rows, offsets, segments, chosen = np.array(placed, np.int64).reshape(-1, 4).T
        starts = self.encoded.starts[chosen]
        lengths = self.encoded.starts[chosen + 1] - starts
        positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        read = np.repeat(starts, lengths) + positions
        write = np.repeat((rows - self._rows.start) * self._max_length + offsets, lengths) + positions

        def lay_out(values: np.ndarray, padding: int, dtype: type) -> np.ndarray:
            array = np.full((len(self._rows), self._max_length), padding, dtype)
            array.reshape(-1)[write] = values
            return array

        batch = Batch(
            input_ids=lay_out(self.encoded.input_ids[read], self._pad_id, np.int32),
            targets=lay_out(self.encoded.targets[read], self._pad_id, np.int32),
            target_mask=lay_out(self.encoded.target_mask[read], False, np.bool_),
            positions=lay_out(positions, 0, np.int32),
            segment_ids=lay_out(np.repeat(segments, lengths), 0, np.int32),
        )
        check_targets(batch.input_ids, self._vocab_size)
        check_targets(batch.targets, self._vocab_size, mask=batch.target_mask)
        self.examples = lay_out(np.repeat(self.encoded.source_index[chosen], lengths), -1, np.int32)
        return batch

    def get_state(self) -> dict[str, Any]:
        """The place of the next batch, ready for JSON."""
        return {"position": self._position, "fingerprint": _digest(self.fingerprint)}

    def set_state(self, state: Mapping[str, Any], *, allow_change: bool = False) -> None:
        """Go on from a state that an equal stream gave.

        Args:
          state: from `get_state`, also after a round trip through JSON.
          allow_change: take the place from the state of another stream too, as a number of examples to pass over.

        Raises:
          DataError: the state of another stream (other data, seed, batch size, tokenizer, ...).
        """
        if not allow_change and state.get("fingerprint") != _digest(self.fingerprint):
            raise DataError(
                "The saved data position belongs to another data stream (data, seed, batch size, max_length, packing, "
                "tokenizer or Grain version differ); continue with the settings of the saved run or start a new one."
            )
        self._position = int(state["position"])

    @property
    def epoch(self) -> float:
        """Epochs consumed so far."""
        return self._position / len(self.encoded)

    def _place(self) -> list[tuple[int, int, int, int]]:
        """(row, offset, segment, example) of this shard's part of the next batch; moves the position on."""
        rooms = [self._max_length] * self._batch_size
        segments = [0] * self._batch_size
        placed = []
        first_open = 0  # rows before it have no room for any example
        while True:
            example = int(self._order[self._position])
            length = self._lengths[example]
            while first_open < self._batch_size and rooms[first_open] < self._shortest:
                first_open += 1
            row = next((row for row in range(first_open, self._batch_size) if rooms[row] >= length), None)
            if row is None:
                return placed
            self._position += 1
            segments[row] += 1
            if row in self._rows:
                placed.append((row, self._max_length - rooms[row], segments[row], example))
            rooms[row] = rooms[row] - length if self._pack else 0


def make_batches(
    source: Source,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    max_length: int,
    seed: int,
    pack: bool = True,
    shard: tuple[int, int] = (0, 1),
    vocab_size: int | None = None,
    max_dropped_fraction: float = MAX_DROPPED_FRACTION,
    cache_dir: str | None = None,
) -> Batches:
    """Encode a source and stream it as shuffled, packed batches.

    Args:
      source: random access to examples.
      tokenizer: encodes them.
      batch_size: rows of a batch over all shards: the global batch of one optimizer step. A packed row holds several
        examples, so the number of examples varies by a few from batch to batch.
      max_length: positions T of a row.
      seed: of the shuffle.
      pack: several examples a row; otherwise one.
      shard: (index, count): this process gets the index-th of `count` equal blocks of rows. Every process packs the
        whole batch, so the stream does not depend on `count`, and a run may resume with another number of processes.
      vocab_size: width of the model's head, against which every batch is checked; None is the tokenizer's.
      max_dropped_fraction: refuse when a larger share of the examples does not fit into a row.
      cache_dir: see `encode_source`.

    Returns:
      `Batches`.

    Raises:
      DataError: no examples, or too many that are too long.
      ValueError: a batch size that the shards cannot share.
    """
    encoded = encode_source(
        source, tokenizer, max_length=max_length, max_dropped_fraction=max_dropped_fraction, cache_dir=cache_dir
    )
    fingerprint = {
        "version": 1,
        "source": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "encoded": encoded.fingerprint(),
        "seed": seed,
        "batch_size": batch_size,
        "max_length": max_length,
        "pack": pack,
        "grain": grain.__version__,
    }
    return Batches(
        encoded,
        batch_size=batch_size,
        max_length=max_length,
        seed=seed,
        pack=pack,
        pad_id=tokenizer.pad_id,
        vocab_size=tokenizer.vocab_size if vocab_size is None else vocab_size,
        shard=shard,
        fingerprint=fingerprint,
    )


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any], *, allow_change: bool = False) -> list[str]:
    """Compare the fingerprint of the data a checkpoint was made with and the present one.

    Returns:
        One line a difference; empty where they agree. With `allow_change` the caller records the lines.

    Raises:
        DataError: they differ and `allow_change` is off.
    """
    lines = differences(saved, json.loads(json.dumps(current)))
    if lines and not allow_change:
        raise DataError(
            "the data are not those this run was started with (saved -> now):\n  " + "\n  ".join(lines) + "\nBring "
            "back the former data, choose another --workdir for a new run, or pass --allow_data_change."
        )
    return lines


def _digest(fingerprint: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
