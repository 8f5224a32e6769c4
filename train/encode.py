"""Examples to token ids: prompt and answer apart, supervision from lengths, one shift, and the pre-flight counts."""

import collections
import dataclasses
import hashlib
import os
import uuid
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from smmd_jax.backbones.image_rows import ImageRows
from smmd_jax.targets import shift_targets
from train.exits import DataError
from train.image_files import ImageError
from train.pictures import image_run
from train.tasks.base import Example, Source
from train.tokenizer import Tokenizer

# Part of the cache's file name: raised whenever the same examples would encode to other arrays, or not at all.
_ENCODING_VERSION = 3
_READ_AT_ONCE = 4096
_TEXTS = ("dropped_keys", "unread_keys", "unread_reasons")
MAX_DROPPED_FRACTION = 0.01


def encode(
    example: Example, tokenizer: Tokenizer, images: ImageRows | None = None
) -> tuple[Int[np.ndarray, "L"], Bool[np.ndarray, "L"]]:
    """Turn one example into token ids and say which of them are to be learnt.

        ids = tokens(prompt) + tokens(answer) + [eos];   supervised = no for the prompt, yes for the answer and eos

    The prompt of an example with an image begins with the tokens that the image is, as many as its size asks for.

    Prompt and answer are tokenised apart, so no token can straddle the seam and no length is guessed from a joint
    encoding; which tokens are supervised follows from these lengths and never from a token's value.

    Args:
      example: with an image where the backbone reads images.
      tokenizer: gives the ids and `eos_id`.
      images: how the backbone reads images; None: it reads text alone.

    Returns:
      (ids [L] int32, supervised [L] bool), not shifted.

    Raises:
      DataError: a prompt without tokens, since then nothing predicts the first token of the answer, or an image that
        cannot be read or has nobody to read it.

    Example:
      >>> from train.tokenizer import make_task_tokenizer
      >>> ids, supervised = encode(Example(key="0", prompt="2 + 3\\n", answer="5"), make_task_tokenizer())
      >>> supervised
      array([False, False, False, False,  True,  True])
    """
    _, run = image_run(example, images)
    (prompt,), answer = tokenizer.encode_prompts([example.prompt], [run]), tokenizer.encode(example.answer)
    ids, prompt_length = _join(example.key, prompt, answer, tokenizer)
    return np.array(ids, np.int32), np.arange(len(ids)) >= prompt_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """What the pre-flight counts; lengths are in positions (an example of L tokens takes L - 1).

    `dropped` examples are longer than a row, `unread` ones have an image that cannot be read.
    """

    examples: int
    dropped: int
    unread: int
    positions: int
    supervised_tokens: int
    numeric_tokens: int | None
    mean_length: float
    longest: int

    @property
    def supervised_per_example(self) -> float:
        return self.supervised_tokens / self.examples

    @property
    def numeric_per_example(self) -> float | None:
        return None if self.numeric_tokens is None else self.numeric_tokens / self.examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedExamples:
    """All examples of a split, encoded, shifted and laid end to end: example i is ``starts[i]:starts[i + 1]``.

    Args:
      input_ids: [P] int32, the tokens of every example but its last.
      targets: [P] int32, the token that follows each of them.
      target_mask: [P] bool, true where that token belongs to the answer or is its end.
      starts: [n + 1] int64.
      source_index: [n] int32, where each example stands in its source (dropped ones are missing).
      image_sizes: [n, 2] int32, height and width of the image of each example; 0 and 0 where it has none.
      dropped_keys: keys of the examples that are longer than a row.
      unread_keys, unread_reasons: keys of the examples whose image cannot be read, and why.
      longest: positions that the longest example takes, dropped ones included.
    """

    input_ids: Int[np.ndarray, "P"]
    targets: Int[np.ndarray, "P"]
    target_mask: Bool[np.ndarray, "P"]
    starts: Int[np.ndarray, "n+1"]
    source_index: Int[np.ndarray, "n"]
    image_sizes: Int[np.ndarray, "n 2"]
    dropped_keys: tuple[str, ...]
    unread_keys: tuple[str, ...]
    unread_reasons: tuple[str, ...]
    longest: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def statistics(self, numeric_ids: Int[np.ndarray, "N"] | None = None) -> Statistics:
        """Count the examples and their tokens; `numeric_ids` are the token ids of the numeric vocabulary."""
        supervised = self.targets[self.target_mask]
        return Statistics(
            examples=len(self),
            dropped=len(self.dropped_keys),
            unread=len(self.unread_keys),
            positions=len(self.input_ids),
            supervised_tokens=len(supervised),
            numeric_tokens=None if numeric_ids is None else int(np.isin(supervised, np.asarray(numeric_ids)).sum()),
            mean_length=len(self.input_ids) / len(self),
            longest=self.longest,
        )

    @property
    def has_images(self) -> bool:
        return bool(self.image_sizes.any())

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the header of a run."""
        if not self.unread_keys:
            return ()
        return (
            f"{len(self.unread_keys):,} examples are left out because their images cannot be read: "
            f"{_reasons(self.unread_reasons)} (for example {', '.join(self.unread_keys[:3])}).",
        )

    def fingerprint(self) -> str:
        """SHA-256 of every array: the content that a run saw, whatever it was made from."""
        digest = hashlib.sha256()
        arrays = (self.input_ids, self.targets, self.target_mask, self.starts, self.source_index)
        for array in (*arrays, self.image_sizes) if self.has_images else arrays:
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        return digest.hexdigest()


def encode_source(
    source: Source,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    max_dropped_fraction: float = MAX_DROPPED_FRACTION,
    cache_dir: str | None = None,
    images: ImageRows | None = None,
) -> EncodedExamples:
    """Encode every example of a source once; those that need more than `max_length` positions are left out, never cut.

    So are those whose image is no whole picture. Of the images only the sizes are kept.

    Args:
      source: random access to examples.
      tokenizer: its fingerprint is part of the cache's name.
      max_length: positions of a row; an example of L tokens takes L - 1.
      max_dropped_fraction: refuse when a larger share of the examples is left out.
      cache_dir: folder where the arrays are kept for the next run; None keeps nothing.
      images: how the backbone reads images; None: it reads text alone.

    Raises:
      DataError: an image that nobody reads, no examples, or too many that are left out: with their number, three keys
        and the least sufficient `max_length`, or what is wrong with the images.
    """
    if max_length < 1:
        raise ValueError(f"encode_source: max_length must be at least 1, got {max_length}.")
    path = None
    if cache_dir is not None:
        name = f"{_ENCODING_VERSION}\n{source.fingerprint}\n{tokenizer.fingerprint}\n{max_length}"
        name += "" if images is None else f"\n{images.process}"
        path = Path(cache_dir) / f"encoded-{hashlib.sha256(name.encode()).hexdigest()[:32]}.npz"
    if path is not None and path.is_file():
        encoded = _load(path)
    else:
        encoded = _encode_all(source, tokenizer, max_length, images)
        if path is not None:
            _save(encoded, path)
    dropped, unread = len(encoded.dropped_keys), len(encoded.unread_keys)
    if dropped + unread > max_dropped_fraction * len(source) or not len(encoded):
        if not len(source):
            raise DataError(f"The data set {source.fingerprint} has no examples.")
        if unread:
            raise DataError(
                f"{unread:,} of {len(source):,} images cannot be read: {_reasons(encoded.unread_reasons)} (for example "
                f"{', '.join(encoded.unread_keys[:3])}); with {dropped:,} examples that are too long this is more than "
                f"the {max_dropped_fraction:.1%} that may be left out: mend the images, or raise "
                "--max_dropped_fraction."
            )
        raise DataError(
            f"{dropped:,} of {len(source):,} examples need more than max_length={max_length} positions (for example "
            f"{', '.join(encoded.dropped_keys[:3])}), more than the {max_dropped_fraction:.1%} that may be left out. "
            f"max_length={encoded.longest} is the smallest that keeps all of them."
        )
    return encoded


def _reasons(reasons: tuple[str, ...]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in collections.Counter(reasons).most_common())


def _join(key: str, prompt: list[int], answer: list[int], tokenizer: Tokenizer) -> tuple[list[int], int]:
    if not prompt:
        raise DataError(f"Example {key} has an empty prompt, so nothing could predict its answer; give it a prompt.")
    return [*prompt, *answer, tokenizer.eos_id], len(prompt)


def _encode_all(
    source: Source, tokenizer: Tokenizer, max_length: int, images: ImageRows | None
) -> EncodedExamples:
    ids: list[np.ndarray] = []
    lengths: list[int] = []
    prompt_lengths: list[int] = []
    kept: list[int] = []
    sizes: list[tuple[int, int]] = []
    dropped: list[str] = []
    unread: list[tuple[str, str]] = []
    longest = 0
    read_many = getattr(source, "__getitems__", None) or (lambda indices: [source[index] for index in indices])
    for first in range(0, len(source), _READ_AT_ONCE):
        indices = range(first, min(first + _READ_AT_ONCE, len(source)))
        examples, places, runs, measured = [], [], [], []
        for index, example in zip(indices, read_many(indices), strict=True):
            try:
                size, run = image_run(example, images)
            except ImageError as error:
                unread.append((example.key, error.reason))
                continue
            # Its pixels are read again when a batch needs them.
            examples.append(dataclasses.replace(example, image=None))
            places.append(index)
            runs.append(run)
            measured.append(size)
        prompts = tokenizer.encode_prompts([example.prompt for example in examples], runs)
        answers = tokenizer.encode_batch([example.answer for example in examples])
        chunk: list[int] = []
        for index, example, size, prompt, answer in zip(places, examples, measured, prompts, answers, strict=True):
            joined, prompt_length = _join(example.key, prompt, answer, tokenizer)
            longest = max(longest, len(joined) - 1)
            if len(joined) - 1 > max_length:
                dropped.append(example.key)
                continue
            chunk += joined
            lengths.append(len(joined))
            prompt_lengths.append(prompt_length)
            kept.append(index)
            sizes.append(size)
        ids.append(np.array(chunk, np.int32))
    flat = np.concatenate([*ids, np.zeros(1, np.int32)])
    ends = np.cumsum(np.array(lengths, np.int64))
    place = np.arange(len(flat)) - np.append(np.repeat(ends - lengths, lengths), len(flat) - 1)
    supervised = place >= np.append(np.repeat(np.array(prompt_lengths, np.int64), lengths), 1)
    targets, target_mask = shift_targets(flat, supervised)
    within = np.ones(len(targets), bool)
    # The last token of an example is a target only: what follows it belongs to the next example.
    within[ends - 1] = False
    return EncodedExamples(
        input_ids=flat[:-1][within],
        targets=targets[within],
        target_mask=target_mask[within],
        starts=np.append(0, np.cumsum(np.array(lengths, np.int64) - 1)).astype(np.int64),
        source_index=np.array(kept, np.int32),
        image_sizes=np.array(sizes, np.int32).reshape(-1, 2),
        dropped_keys=tuple(dropped),
        unread_keys=tuple(key for key, _ in unread),
        unread_reasons=tuple(reason for _, reason in unread),
        longest=longest,
    )


def _save(encoded: EncodedExamples, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that a reader never sees half a file and two writers do no harm.
    aside = path.with_name(f".{path.stem}-{os.getpid()}-{uuid.uuid4().hex}.npz")
    arrays = {field.name: getattr(encoded, field.name) for field in dataclasses.fields(encoded)}
    np.savez(aside, **arrays | {name: np.array(arrays[name], np.str_) for name in _TEXTS})
    os.replace(aside, path)


def _load(path: Path) -> EncodedExamples:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    texts = {name: tuple(map(str, arrays[name])) for name in _TEXTS}
    return EncodedExamples(**arrays | texts | {"longest": int(arrays["longest"])})
