"""Batches: Grain's shuffled order, packing into rows, and an exact position to resume from."""

import concurrent.futures
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from smmd_jax.backbones.image_rows import ImageRows
from smmd_jax.backbones.images import PatchedImages
from smmd_jax.backbones.mllama_vision import TiledImages
from smmd_jax.targets import check_targets
from train.config import differences
from train.encode import MAX_DROPPED_FRACTION, EncodedExamples, encode_source
from train.exits import DataError
from train.pictures import Pictures
from train.tasks.base import Source
from train.tokenizer import Tokenizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows. Segments of a row are numbered from 1 and positions start again in each; segment 0 is padding.

    Every array has the rows first, those of images too: a row holds one example with its image, or several without.

    Args:
      input_ids: [B, T] int32.
      targets: [B, T] int32, already shifted: the token that follows each input within its example.
      target_mask: [B, T] bool, true where the target belongs to an answer or ends it; false for prompts and padding.
      positions: [B, T] int32; [B, 3, T] for a backbone whose positions have three axes.
      segment_ids: [B, T] int32.
      images: those of the rows; None where the data set has none.
    """

    input_ids: Int[Array | np.ndarray, "B T"]
    targets: Int[Array | np.ndarray, "B T"]
    target_mask: Bool[Array | np.ndarray, "B T"]
    positions: Int[Array | np.ndarray, "B *axes T"]
    segment_ids: Int[Array | np.ndarray, "B T"]
    images: PatchedImages | TiledImages | None = None


class Batches(Iterator[Batch]):
    """An endless stream of batches; made by `make_batches`.

    The order is Grain's ``shuffle().repeat()``: every epoch is a new permutation that depends on (seed, epoch) alone.
    A batch takes the next examples of that order, each into the first row with room for it (one a row without packing),
    and is full at the first example that fits nowhere; that one opens the next batch. So a batch is a function of the
    place in the order where it begins, and this place, one integer, is the whole state. Grain's own packing gives the
    same rows at several times the cost a token, and its state holds the rows in the making.

    Examples with an image stand alone in their row, and while a batch is used a thread of its own makes the next one.

    Attributes:
      encoded: the examples.
      fingerprint: everything that the stream depends on; streams with equal fingerprints and states go on alike.
      examples: [B, T] int32 for the last batch: the index in the source of the example at each place, -1 for padding.
      rooms: the lengths that batches of images have; each is a program of its own.
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
        num_embeddings: int,
        shard: tuple[int, int],
        fingerprint: Mapping[str, Any],
        pictures: Pictures | None = None,
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
        self._pad_id, self._vocab_size, self._num_embeddings = pad_id, vocab_size, num_embeddings
        self._lengths = np.diff(encoded.starts).tolist()
        self._shortest = min(self._lengths)
        self._order = grain.MapDataset.range(len(encoded)).seed(seed).shuffle().repeat()
        self._position = 0
        self._pictures = pictures
        self._alone = np.zeros(len(encoded), bool) if pictures is None else pictures.rooms > 0
        self.rooms = () if pictures is None else tuple(np.unique(pictures.rooms[self._alone]).tolist())
        self._maker = None if pictures is None else concurrent.futures.ThreadPoolExecutor(1)
        self._ahead: tuple[int, concurrent.futures.Future] | None = None

    def __next__(self) -> Batch:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == self._position:
            batch, self.examples, self._position = ahead[1].result()
        else:
            batch, self.examples, self._position = self._make(self._position)
        if self._maker is not None:
            self._ahead = self._position, self._maker.submit(self._make, self._position)
        return batch

    def blank(self, room: int | None = None) -> Batch:
        """Return a batch of padding with the shapes of the stream's.

        Args:
          room: of the images, one of `rooms`; None: the largest.
        """
        shape = (len(self._rows), self._max_length)
        zeros = lambda dtype: np.zeros(shape, dtype)
        batch = Batch(
            input_ids=zeros(np.int32), targets=zeros(np.int32), target_mask=zeros(np.bool_),
            positions=zeros(np.int32), segment_ids=zeros(np.int32),
        )  # fmt: skip
        return self._with_images(batch, [None] * len(self._rows), max(self.rooms, default=0) if room is None else room)

    def _make(self, position: int) -> tuple[Batch, np.ndarray, int]:
        """The batch that begins at a place of the order, its `examples`, and the place where the next one begins."""
        placed, room, position = self._place(position)
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
        check_targets(batch.input_ids, self._num_embeddings)
        check_targets(batch.targets, self._vocab_size, mask=batch.target_mask)
        examples = lay_out(np.repeat(self.encoded.source_index[chosen], lengths), -1, np.int32)
        own: list[int | None] = [None] * len(self._rows)
        for row, example in zip(rows.tolist(), chosen.tolist(), strict=True):
            if self._alone[example]:
                own[row - self._rows.start] = example
        return self._with_images(batch, own, room), examples, position

    def _with_images(self, batch: Batch, own: list[int | None], room: int) -> Batch:
        if self._pictures is None:
            return batch
        images, positions = self._pictures.lay_out(batch.input_ids, batch.segment_ids > 0, own, room=room)
        if positions is not None:
            has_image = np.array([example is not None for example in own])[:, None, None]
            positions = np.where(has_image, positions, batch.positions[:, None])
        return dataclasses.replace(
            batch, images=images, positions=batch.positions if positions is None else positions
        )

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

    def _place(self, position: int) -> tuple[list[tuple[int, int, int, int]], int, int]:
        """(row, offset, segment, example) of this shard's part of a batch, its room, and where the next one begins."""
        rooms = [self._max_length] * self._batch_size
        segments = [0] * self._batch_size
        placed, room = [], 0
        first_open = 0  # rows before it have no room for any example
        while True:
            example = int(self._order[position])
            length, is_alone = self._lengths[example], self._alone[example]
            needed = self._max_length if is_alone else length
            while first_open < self._batch_size and rooms[first_open] < self._shortest:
                first_open += 1
            row = next((row for row in range(first_open, self._batch_size) if rooms[row] >= needed), None)
            if row is None:
                return placed, room, position
            position += 1
            if is_alone:
                room = max(room, int(self._pictures.rooms[example]))
            segments[row] += 1
            if row in self._rows:
                placed.append((row, self._max_length - rooms[row], segments[row], example))
            rooms[row] = rooms[row] - length if self._pack and not is_alone else 0


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
    num_embeddings: int | None = None,
    max_dropped_fraction: float = MAX_DROPPED_FRACTION,
    cache_dir: str | None = None,
    images: ImageRows | None = None,
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
      vocab_size: width of the model's head, against which the targets of every batch are checked; None is the
        tokenizer's.
      num_embeddings: tokens that the model reads, against which its inputs are checked; None is `vocab_size`. mllama
        reads a token for images that its head has no column for.
      max_dropped_fraction: refuse when a larger share of the examples does not fit into a row.
      cache_dir: see `encode_source`.
      images: how the backbone reads images; None: it reads text alone.

    Returns:
      `Batches`.

    Raises:
      DataError: no examples, or too many that are too long.
      ValueError: a batch size that the shards cannot share.
    """
    encoded = encode_source(
        source,
        tokenizer,
        max_length=max_length,
        max_dropped_fraction=max_dropped_fraction,
        cache_dir=cache_dir,
        images=images,
    )
    vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
    pictures = None
    if encoded.has_images:
        pictures = Pictures(source, images, places=encoded.source_index, sizes=encoded.image_sizes)
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
        **({} if pictures is None else {"images": repr(images.process)}),
    }
    return Batches(
        encoded,
        batch_size=batch_size,
        max_length=max_length,
        seed=seed,
        pack=pack,
        pad_id=tokenizer.pad_id,
        vocab_size=vocab_size,
        num_embeddings=vocab_size if num_embeddings is None else num_embeddings,
        shard=shard,
        fingerprint=fingerprint,
        pictures=pictures,
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
