"""What a run would learn from: examples token by token, lengths, numeric targets, duplicates, overlap, and faults."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from smmd_jax import NumericKernel, numeric_vocab_from_tokenizer
from smmd_jax.backbones.image_rows import ImageRows
from smmd_jax.errors import TokenizerError
from train.assembly import make_kernel
from train.backbone import make_backbone
from train.config import TrainConfig
from train.coverage import coverage_table
from train.encode import EncodedExamples, encode_source
from train.exits import StorageError, UsageError
from train.figures import save_figure
from train.files import replace_file
from train.inspection_plots import bar_chart, draw_kernel, draw_lengths
from train.overlap import overlap, prompts_of
from train.preview import MARKS_LEGEND, mark_example
from train.splits import open_split
from train.tasks import TASKS, Source
from train.tasks.base import stream_examples
from train.tasks.questions import name_example, question_hash
from train.tokenizer import Tokenizer

_NO_LIMIT = 2**30
_SHOWN = 3
_READ_AT_ONCE = 4096
_COLUMNS = 116


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """What was found.

    Attributes:
      text: the report.
      faults: one sentence for each reason not to train on these data, its kind before a colon; empty where there is
        none.
      lengths: [n] positions that each example takes, long ones included.
      max_length: positions of a row.
      kernel: of the numeric vocabulary; None: the tokenizer has none.
    """

    text: str
    faults: tuple[str, ...]
    lengths: np.ndarray
    max_length: int
    kernel: NumericKernel | None


def inspect(config: TrainConfig, *, examples: int = 3, check_overlap: bool = False) -> Inspection:
    """Look at the training data of a config as its backbone would read them; nothing is written, nothing is trained.

    Args:
      config: task, backbone, lengths, numeric policy and kernel are read.
      examples: how many to show token by token.
      check_overlap: count the questions that the evaluation split shares with the training split.

    Raises:
      UsageError, DataError, CheckpointError: what cannot even be looked at: no such data, model or kernel.
    """
    task, backbone = TASKS[config.task], make_backbone(config)
    tokenizer, source = backbone.tokenizer, open_split(config, task.train_split)
    encoded = encode_source(
        source,
        tokenizer,
        max_length=_NO_LIMIT,
        max_dropped_fraction=config.max_dropped_fraction,
        images=backbone.images,
    )
    lengths = np.diff(encoded.starts)
    faults = [*_length_faults(source, encoded, config), *_mask_faults(source, encoded, tokenizer)]
    notes = [*backbone.notes, *getattr(source, "notes", ()), *encoded.notes]
    sections = {"data": _describe(config, task.train_split, source, notes)}

    kernel, numeric_ids = None, np.zeros(0, np.int32)
    try:
        vocab = numeric_vocab_from_tokenizer(
            tokenizer.backend, policy=config.numeric_policy, vocab_size=backbone.config.vocab_size
        )
    except TokenizerError as error:
        faults.append(f"no digits in the tokenizer: {error}.")
        report = str(error)
    else:
        numeric_ids = np.asarray(vocab.token_ids)
        kernel = _make_kernel(vocab, config)
        report = f"{vocab.report}\n{_describe_kernel(kernel)}"
        faults += _numeric_faults(encoded, numeric_ids, config)
    shown = [
        mark_example(source[index], tokenizer, numeric_ids, width=_COLUMNS, images=backbone.images)
        for index in range(min(examples, len(source)))
    ]
    sections |= {f"examples ({MARKS_LEGEND})": "\n\n".join(shown)} if shown else {}
    sections |= {
        "lengths": _describe_lengths(lengths, config.max_length),
        "tokens": _describe_tokens(encoded, numeric_ids),
        **({"images": _describe_images(encoded, backbone.images)} if encoded.has_images else {}),
        "numeric vocabulary": report,
        "coverage of digits": coverage_table(encoded, tokenizer.backend, answers_of(source)),
        "questions": _describe_questions(source),
    }
    if check_overlap:
        split = config.eval_split or task.eval_split
        shared = overlap(prompts_of(source), prompts_of(open_split(config, split)))
        sections[f"overlap of {task.train_split} and {split}"] = str(shared)
        if shared.shared_test_rows:
            faults.append(
                f"overlap of train and test: {shared.shared_test_rows:,} of {shared.test_rows:,} questions of split "
                f"{split} are in {task.train_split} too, for example {shared.examples[0][2][:80]!r}: remove them there."
            )
    sections["faults"] = "\n".join(faults) or "none"
    text = "\n\n".join(f"{title}\n" + _indented(body) for title, body in sections.items())
    return Inspection(text=text, faults=tuple(faults), lengths=lengths, max_length=config.max_length, kernel=kernel)


def write_inspection(found: Inspection, folder: str) -> list[Path]:
    """Write `report.txt`, `lengths.png` and, where there is a kernel, `kernel.png`; returns the files.

    Raises:
      StorageError: the folder cannot be written.
    """
    place = Path(folder)
    figures = {"lengths.png": draw_lengths(found.lengths, found.max_length)}
    if found.kernel is not None:
        figures["kernel.png"] = draw_kernel(found.kernel)
    try:
        place.mkdir(parents=True, exist_ok=True)
        replace_file(place / "report.txt", found.text + "\n")
        for name, figure in figures.items():
            save_figure(figure, place / name)
    except OSError as error:
        raise StorageError(f"out={folder} cannot be written: {error}. Choose another --out.") from error
    return [place / "report.txt", *(place / name for name in figures)]


def answers_of(source: Source) -> Iterator[str]:
    """Stream the answers of a source."""
    for example in stream_examples(source):
        yield example.answer


def _length_faults(source: Source, encoded: EncodedExamples, config: TrainConfig) -> list[str]:
    lengths = np.diff(encoded.starts)
    long = np.flatnonzero(lengths > config.max_length)
    if len(long) <= config.max_dropped_fraction * len(lengths) and len(long) < len(lengths):
        return []
    keys = _keys(source, encoded.source_index[long])
    return [
        f"examples that are too long: {len(long):,} of {len(lengths):,} need more than max_length={config.max_length} "
        f"positions (for example {keys}) and would be left out, more than the "
        f"{config.max_dropped_fraction:.1%} that may be; max_length={lengths.max()} keeps all of them."
    ]


def _mask_faults(source: Source, encoded: EncodedExamples, tokenizer: Tokenizer) -> list[str]:
    """The targets of every example must be the tokens of its answer, one at least, and the end of the sequence."""
    supervised = np.add.reduceat(encoded.target_mask.astype(np.int64), encoded.starts[:-1])
    targets = encoded.targets[encoded.target_mask]
    places = np.append(0, np.cumsum(supervised))
    is_other = np.zeros(len(encoded), bool)
    # Examples whose image cannot be read are not among the encoded ones.
    numbers = {place: index for index, place in enumerate(encoded.source_index.tolist())}
    for place, ids in enumerate(_answer_ids(source, tokenizer)):
        if (index := numbers.get(place)) is None:
            continue
        is_other[index] = targets[places[index] : places[index + 1]].tolist() != [*ids, tokenizer.eos_id]
    # An answer without tokens leaves nothing but the end to learn.
    is_empty = supervised - encoded.target_mask[encoded.starts[1:] - 1] < 1
    faults = []
    for bad, words in [
        (is_empty, "no token of the answer is a target"),
        (is_other & ~is_empty, "the targets are not the answer and the end of the sequence"),
    ]:
        if bad.any():
            rows = encoded.source_index[np.flatnonzero(bad)]
            faults.append(
                f"wrong mask: in {len(rows):,} of {len(bad):,} examples {words} (for example {_keys(source, rows)}): "
                "see that every example has an answer and that the tokenizer has tokens for it."
            )
    return faults


def _answer_ids(source: Source, tokenizer: Tokenizer) -> Iterator[list[int]]:
    answers = answers_of(source)
    while some := list(itertools.islice(answers, _READ_AT_ONCE)):
        yield from tokenizer.encode_batch(some)


def _numeric_faults(encoded: EncodedExamples, numeric_ids: np.ndarray, config: TrainConfig) -> list[str]:
    supervised = encoded.targets[encoded.target_mask]
    if np.isin(supervised, numeric_ids).any():
        return []
    return [
        f"no digits in the answers: none of the {len(supervised):,} supervised tokens is a number "
        f"(numeric_policy={config.numeric_policy}), so a numeric loss would learn nothing: choose another "
        "--numeric_policy, or train with --loss=ce."
    ]


def _make_kernel(vocab, config: TrainConfig) -> NumericKernel:
    try:
        return make_kernel(vocab, config)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def _describe(config: TrainConfig, split: str, source: Source, notes: list[str]) -> str:
    lines = [
        f"task {config.task}, variant {config.variant or TASKS[config.task].variants[0]}, split {split}: "
        f"{len(source):,} examples, read by backbone {config.backbone}",
        *(f"note: {note}" for note in notes),
    ]
    return "\n".join(lines)


def _describe_lengths(lengths: np.ndarray, max_length: int) -> str:
    dropped = int((lengths > max_length).sum())
    return (
        f"{lengths.min()} to {lengths.max()} positions, mean {lengths.mean():.1f}; {dropped:,} of {len(lengths):,} "
        f"({dropped / len(lengths):.2%}) need more than max_length={max_length} and would be left out\n"
        + bar_chart(lengths)
    )


def _describe_tokens(encoded: EncodedExamples, numeric_ids: np.ndarray) -> str:
    statistics = encoded.statistics(numeric_ids)
    return (
        f"{statistics.positions:,} positions; {statistics.supervised_tokens:,} supervised "
        f"({statistics.supervised_per_example:.2f} an example), {statistics.numeric_tokens:,} of them numeric targets "
        f"({statistics.numeric_per_example:.2f} an example)"
    )


def _describe_images(encoded: EncodedExamples, images: ImageRows) -> str:
    sizes = encoded.image_sizes[encoded.image_sizes.any(1)]
    kinds, rows = np.unique(sizes, axis=0, return_counts=True)
    tokens = [len(images.run(*size)) for size in kinds.tolist()]
    rooms = np.unique(images.rooms(sizes)).tolist()
    low, high = sizes.min(0), sizes.max(0)
    return (
        f"{len(sizes):,} of {len(encoded):,} examples have one, of {len(kinds):,} sizes: {low[1]} x {low[0]} to "
        f"{high[1]} x {high[0]} pixels, {min(tokens)} to {max(tokens)} tokens, mean "
        f"{np.average(tokens, weights=rows):.1f}; the step is compiled for {len(rooms)} lengths of them"
    )


def _describe_kernel(kernel: NumericKernel) -> str:
    least = {name: np.linalg.eigvalsh(np.asarray(matrix, np.float64))[0] for name, matrix in _matrices(kernel).items()}
    shown = ", ".join(f"{name} {value:.3g}" for name, value in least.items())
    return f"alpha {float(kernel.alpha):.4g}; least eigenvalues: {shown}"


def _matrices(kernel: NumericKernel) -> dict[str, np.ndarray]:
    return {"K": kernel.gram, "M": kernel.form}


def _describe_questions(source: Source) -> str:
    answers: dict[int, set[str]] = collections.defaultdict(set)
    rows: collections.Counter[int] = collections.Counter()
    texts: dict[int, str] = {}
    for example in stream_examples(source):
        code = question_hash(name_example(example))
        rows[code] += 1
        if len(answers[code]) < 2:
            answers[code].add(example.answer)
        if rows[code] == 2 and len(texts) < _SHOWN:
            texts[code] = example.prompt
    repeated = sum(count - 1 for count in rows.values())
    differing = sum(len(found) > 1 for found in answers.values())
    lines = [f"{len(rows):,} different; {repeated:,} rows repeat an earlier one; {differing:,} have several answers"]
    return "\n".join([*lines, *(f"{rows[code]} times: {text[:80]!r}" for code, text in texts.items())])


def _keys(source: Source, rows: np.ndarray) -> str:
    return ", ".join(source[int(row)].key for row in rows[:_SHOWN])


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in text.splitlines())
