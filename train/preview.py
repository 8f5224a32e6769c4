"""What a run shows before it trains: its header, examples with a mark per token, and the compiled step's memory."""

import time

import numpy as np
from jaxtyping import Int

from smmd_jax.backbones.image_rows import ImageRows
from train.assembly import Run
from train.encode import encode
from train.image_files import ImageError
from train.pictures import image_run
from train.progress import format_seconds
from train.tasks.base import Example
from train.tokenizer import Tokenizer

MARKS = {"prompt": "p", "answer": "a", "number": "N", "ignored": "."}
# Docs have the same words.
MARKS_LEGEND = "p prompt, a answer, N numeric target, . first token: ignored, for nothing predicts it"


def header(run: Run, *, resuming: bool, prepare_seconds: float | None = None) -> str:
    """Say what will be trained on what, in a few lines.

    Args:
      run: what will be trained.
      resuming: whether it goes on from an earlier start.
      prepare_seconds: how long it took to make the run; None: not said.
    """
    statistics, config = run.statistics, run.config
    weight = "" if run.objective.is_plain else f" (weight {run.objective.weight:g}, {run.objective.spec.join})"
    lines = [
        f"task       {config.task}: {statistics.examples:,} training examples"
        + (f", {statistics.dropped:,} too long and left out" if statistics.dropped else "")
        + (f", {statistics.unread:,} with unreadable images and left out" if statistics.unread else ""),
        f"tokens     per example: {statistics.mean_length:.1f}, of them {statistics.supervised_per_example:.2f} "
        f"supervised and {statistics.numeric_per_example:.2f} numeric",
        f"backbone   {config.backbone}: {run.parameter_count:,} parameters"
        + (f", {run.trained_count:,} of them trained" if run.trained_count < run.parameter_count else ""),
        f"loss       {config.loss}{weight}",
        f"numbers    {run.kernel.token_ids.shape[0]} tokens (policy {run.kernel.vocab.policy})",
        f"batch      {config.batch_size} rows of {config.max_length} tokens"
        + (f" in {config.grad_accum} micro-batches" if config.grad_accum > 1 else ""),
        f"devices    {_devices(run)}",
        f"run folder {config.workdir}" + (" (resuming)" if resuming else ""),
    ]
    if prepare_seconds is not None:
        lines.append(f"prepared   in {format_seconds(prepare_seconds)}")
    return "\n".join(lines + [f"note: {note}" for note in run.notes])


def _devices(run: Run) -> str:
    axes = ", ".join(f"{axis}:{size}" for axis, size in run.mesh.shape.items() if size > 1)
    device = run.mesh.devices.flat[0]
    return f"{run.mesh.size} x {device.device_kind}" + (f" ({axes})" if axes else "")


def show_examples(run: Run, count: int = 3) -> str:
    """Show the first training examples, decoded, with a mark under the role of every token."""
    source, numbers = run.source(run.task.train_split), np.asarray(run.kernel.token_ids)
    shown = [
        mark_example(source[index], run.tokenizer, numbers, images=run.images)
        for index in range(min(count, len(source)))
    ]
    return "\n".join([f"examples ({MARKS_LEGEND})", *shown])


def mark_example(
    example: Example,
    tokenizer: Tokenizer,
    numeric_ids: Int[np.ndarray, "N"],
    *,
    width: int | None = None,
    images: ImageRows | None = None,
) -> str:
    """Show one example: a line of its tokens, decoded, and below it a line with the mark of each one's role.

    Of an image its size and tokens stand above, and of equal tokens in a row the first with their number.

    Args:
      example: what is encoded.
      tokenizer: encodes it.
      numeric_ids: token ids of the numeric vocabulary.
      width: columns after which another pair of lines begins; None: never.
      images: how the backbone reads images; None: it reads text alone.

    Example:
      >>> from train.tokenizer import make_task_tokenizer
      >>> print(mark_example(Example(key="0", prompt="2 + 3\\n", answer="5"), make_task_tokenizer(), np.arange(10)))
      2 ·+· 3 \\n 5 <eos>
      . p   p p  N a
    """
    try:
        size, run = image_run(example, images)
        ids, supervised = encode(example, tokenizer, images)
    except ImageError as error:
        return f"{error} It is left out."
    numbers = set(numeric_ids.tolist())
    special_names = {token: name for name, token in tokenizer.special_ids.items()}
    pieces: list[tuple[str, str]] = []
    image_id, repeats = None if images is None else images.config.image_token_id, 0
    for place, (token, is_answer) in enumerate(zip(ids.tolist(), supervised.tolist(), strict=True)):
        role = "ignored" if place == 0 else "prompt"
        if is_answer:
            role = "number" if token in numbers else "answer"
        text = special_names.get(token) or tokenizer.decode([token])
        repeats = repeats + 1 if token == image_id else 0
        if repeats > 1:
            pieces[-1] = (f"{text}x{repeats}", pieces[-1][1])
            continue
        pieces.append((text.replace("\n", "\\n").replace(" ", "\u00b7"), MARKS[role]))
    lines: list[list[str]] = []
    used = 0
    for text, mark in pieces:
        column = max(len(text), 1)
        if not lines or (width is not None and used + column > width):
            lines += [[], []]
            used = 0
        lines[-2].append(text.ljust(column))
        lines[-1].append(mark.ljust(column))
        used += column + 1
    above = [] if example.image is None else [f"image of {size[1]} x {size[0]} pixels, {len(run)} tokens"]
    return "\n".join([*above, *(" ".join(line).rstrip() for line in lines)])


def describe_step(run: Run) -> str:
    """Compile the step and say what memory it takes."""
    began = time.monotonic()
    compiled = run.lower_step().compile()
    seconds = time.monotonic() - began
    memory = compiled.memory_analysis()
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "of them in place": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
    peak = sum(sizes.values()) - 2 * memory.alias_size_in_bytes
    lines = [f"step       compiled in {format_seconds(seconds)}; memory per device:"]
    lines += [f"           {name:<17}{size / 2**20:10.1f} MiB" for name, size in {**sizes, "peak": peak}.items()]
    return "\n".join(lines)
