"""The clock task: what time a dial shows, on dials of our own in any number, or on a folder of labelled pictures."""

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
from PIL import Image

from train.exits import UsageError
from train.tasks.base import Example, Task
from train.tasks.clock_files import make_photo_source
from train.tasks.dial import DIAL_VERSION, Family, draw_dial, paint_dial
from train.tasks.painted import paint_for_split
from train.tasks.prepared import Record, RecordBuilder, RecordConfig, RecordSource, prepare_builder

SPLITS = ("train", "test")
# A model that reads letter by letter pays a position for each of them; one that chats is told the form of the answer.
PROMPTS = {"plain": "Time?\n", "chat": "What time does the clock show? Answer as H:MM."}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DialSet:
    """A set of dials.

    Args:
      family: of looks, see `train.tasks.dial.draw_dial`.
      step: minutes between two neighbouring times: 5 gives 144 times, 1 gives 720.
      size: pixels along each side.
      examples: split -> number of dials; every time occurs equally often, up to one.
    """

    family: Family
    step: int
    size: int
    examples: Mapping[str, int]


_UPRIGHT = DialSet(family="plain", step=5, size=48, examples={"train": 28_800, "test": 1_440})
DIAL_SETS: Mapping[str, DialSet] = MappingProxyType(
    {
        "upright": _UPRIGHT,
        "hard": DialSet(family="any", step=1, size=48, examples={"train": 57_600, "test": 1_440}),
        # The first dials of "upright", and the same test: few enough that losses differ.
        "scarce": dataclasses.replace(_UPRIGHT, examples={"train": 2_000, "test": 1_440}),
    }
)
FOLDER = "folder"
# Variant -> the set of dials or the folder, and the prompt's form.
VARIANTS = {name: (name, "plain") for name in (*DIAL_SETS, FOLDER)}
VARIANTS |= {f"{name}_chat": (name, "chat") for name in (*DIAL_SETS, FOLDER)}
_FILE_VARIANTS = tuple(name for name, (data, _) in VARIANTS.items() if data == FOLDER)


class RenderedClocks(RecordBuilder):
    """Dials painted by this project, every image with the time it shows as H:MM."""

    FIELDS = ("image", "time")
    BYTES = ("image",)


def generate_dials(dials: DialSet, *, split: str, seed: int) -> Iterator[Record]:
    """Yield the dials of a split as PNG files with their times; (seed, split, index) alone decide each of them.

    The times come in rounds: each round holds every time once, in an order of its own. A hash of a dial's pixels says
    which split it may be in, so no picture is in two of them, under any seed and size; what the test dials have in
    common with the training dials is the times (all occur in both) and the family of looks.

    Args:
      dials: what is painted.
      split: "train" or "test".
      seed: any integer of at least 0.

    Example:
      >>> dials = DialSet(family="plain", step=5, size=48, examples={"train": 2})
      >>> [record["image"][1:4] for record in generate_dials(dials, split="train", seed=0)]
      [b'PNG', b'PNG']
    """
    times = [(hour, minute) for hour in range(1, 13) for minute in range(0, 60, dials.step)]
    order = list(times)
    for index in range(dials.examples[split]):
        place = index % len(times)
        if place == 0:
            order = list(times)
            random.Random(f"clock-times/{split}/{seed}/{index // len(times)}").shuffle(order)
        name = f"clock/{DIAL_VERSION}/{split}/{seed}/{index}"
        _, image = paint_for_split(partial(_paint, dials, *order[place]), name=name, split=split)
        yield {"image": image, "time": format_time(*order[place])}


def format_time(hour: int, minute: int) -> str:
    """Write a time as the answers do.

    Example:
      >>> format_time(9, 5)
      '9:05'
    """
    return f"{hour}:{minute:02d}"


def make_source(
    split: str,
    *,
    data_dir: str | None = None,
    seed: int = 0,
    variant: str = "upright",
    examples: Mapping[str, int] | None = None,
    max_bad_lines: int | None = None,
    prepare_in: str | None = None,
) -> RecordSource:
    """Open a split of a set of dials, painting it first if need be, or of a folder of labelled pictures.

    Args:
      split: "train" or "test".
      data_dir: for dials the folder of prepared data, None being `default_data_dir()`; for "folder" the pictures, see
        `train.tasks.clock_files.find_photos`.
      seed: of the dials; without effect on a folder.
      variant: "upright", "hard", "scarce" or "folder"; with "_chat" the question is put as a chat.
      examples: other numbers of dials for some splits, e.g. ``{"train": 2000}``.
      max_bad_lines: of a folder, refuse it when more pictures are bad; None leaves out any number, and `notes` says
        which.
      prepare_in: folder of what is prepared from a folder of pictures; None is `default_data_dir()`.

    Raises:
      UsageError: an unknown split or variant, with the known ones.
      DataError: no such folder, no good picture in it, or too many bad ones.
    """
    if split not in SPLITS:
        raise UsageError(f"clock: unknown split {split!r}; known splits: {', '.join(SPLITS)}.")
    if variant not in VARIANTS:
        raise UsageError(f"clock: unknown variant {variant!r}; known variants: {', '.join(VARIANTS)}.")
    name, form = VARIANTS[variant]
    prompt = PROMPTS[form]
    if name == FOLDER:
        return make_photo_source(
            split, prompt, data_dir=data_dir, max_bad=max_bad_lines, prepare_in=prepare_in, form=f"{form}-prompt1"
        )
    dials = DIAL_SETS[name]
    dials = dataclasses.replace(dials, examples={**dials.examples, **(examples or {})})
    parts = (DIAL_VERSION, dials.family, dials.step, dials.size, sorted(dials.examples.items()))
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    config = RecordConfig(
        name=f"{name}-seed{seed}-{digest}",
        records={each: partial(generate_dials, dials, split=each, seed=seed) for each in dials.examples},
    )

    def make_example(index: int, record: Record) -> Example:
        return Example(key=f"{split}-{index}", prompt=prompt, answer=record["time"], image=record["image"])

    return RecordSource(
        prepare_builder(RenderedClocks, config, data_dir=data_dir), split, make_example, form=f"{form}-prompt1"
    )


def _paint(dials: DialSet, hour: int, minute: int, rng: random.Random) -> tuple[None, Image.Image]:
    dial = draw_dial(rng, hour, minute, dials.family)
    noise = np.random.default_rng(rng.getrandbits(64)) if dial.noise else None
    return None, paint_dial(dial, dials.size, rng=noise)


CLOCK = Task(
    name="clock",
    summary="what time a dial shows: dials painted here, or --data_dir=FOLDER of labelled pictures (variant folder)",
    train_split="train",
    eval_split="test",
    splits=SPLITS,
    variants=tuple(VARIANTS),
    chat_variants=tuple(name for name, (_, form) in VARIANTS.items() if form == "chat"),
    file_variants=_FILE_VARIANTS,
    options=MappingProxyType(
        {
            "data_seed": tuple(name for name in VARIANTS if name not in _FILE_VARIANTS),
            "max_bad_lines": _FILE_VARIANTS,
        }
    ),
    grader="clock",
    max_new_tokens=8,
    defaults=MappingProxyType(
        {
            "backbone": "tiny-vlm",
            # An image of nine features with its two marks, the prompt and the longest time take 21 positions.
            "max_length": 24,
            "batch_size": 64,
            "steps": 1000,
            "optimizer": "muon",
            "learning_rate": 2e-3,
            "log_every": 20,
            "eval_every": 250,
            "eval_examples": 720,
            "checkpoint_every": 250,
        }
    ),
    pretrained_defaults=MappingProxyType(
        {
            "max_length": 512,
            "batch_size": 8,
            "steps": 300,
            "optimizer": "adamw",
            "learning_rate": 1e-5,
            "log_every": 10,
            "eval_every": 100,
            "eval_examples": 200,
            "checkpoint_every": 100,
        }
    ),
    make_source=make_source,
)
