"""The chart task: questions about charts of our own in any number, or ChartQA as its authors publish it."""

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

from PIL import Image

from train.exits import UsageError
from train.tasks.base import Example, Task
from train.tasks.chart import CHART_VERSION, Chart, draw_chart, paint_chart
from train.tasks.chart_questions import QUESTIONS_VERSION, ask_questions
from train.tasks.chartqa_files import SOURCES, SPLITS, make_published_source
from train.tasks.painted import paint_for_split
from train.tasks.prepared import Record, RecordBuilder, RecordConfig, RecordSource, prepare_builder

# {} is the question, as published. No words around it: a model that reads letter by letter pays a position for each.
PROMPTS = {"plain": "{}\n", "chat": "{}"}
GENERATED = "generated"
# Variant of the published set -> whose questions, and whether those with a numeric label alone.
_PUBLISHED = {
    "published": (SOURCES, False),
    "human": (("human",), False),
    "augmented": (("augmented",), False),
    "numeric": (SOURCES, True),
}
# Variant -> the data, and the prompt's form.
VARIANTS = {name: (name, "plain") for name in (GENERATED, *_PUBLISHED)}
VARIANTS |= {f"{name}_chat": (name, "chat") for name in (GENERATED, *_PUBLISHED)}
_FILE_VARIANTS = tuple(name for name, (data, _) in VARIANTS.items() if data != GENERATED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChartSet:
    """A set of charts.

    Args:
      size: pixels along each side.
      questions: about each chart, of different kinds.
      charts: split -> number of charts.
    """

    size: int
    questions: int
    charts: Mapping[str, int]


CHARTS = ChartSet(size=96, questions=3, charts={"train": 10_000, "test": 500})


class PaintedCharts(RecordBuilder):
    """Charts painted by this project with their tables, and questions about them with answers from the tables."""

    FIELDS = ("image", "table", "query", "label", "kind")
    BYTES = ("image",)


def generate_questions(charts: ChartSet, *, split: str, seed: int) -> Iterator[Record]:
    """Yield the questions of a split, those about one chart in a row; (seed, split, chart) alone decide them.

    A hash of a chart's pixels says which split it may be in, so no chart is in two of them, under any seed and size.

    Args:
      charts: what is painted.
      split: "train" or "test".
      seed: any integer of at least 0.

    Example:
      >>> charts = ChartSet(size=96, questions=2, charts={"train": 3})
      >>> len(list(generate_questions(charts, split="train", seed=0)))
      6
    """
    for index in range(charts.charts[split]):
        name = f"chart/{CHART_VERSION}/{split}/{seed}/{index}"
        chart, image = paint_for_split(partial(_paint, charts.size), name=name, split=split)
        asked = ask_questions(chart, random.Random(f"{name}/questions/{QUESTIONS_VERSION}"), charts.questions)
        for query, label in asked:
            yield {"image": image, "table": chart.table(), "query": query, "label": label, "kind": chart.kind}


def make_source(
    split: str,
    *,
    data_dir: str | None = None,
    seed: int = 0,
    variant: str = GENERATED,
    examples: Mapping[str, int] | None = None,
    max_bad_lines: int | None = None,
    prepare_in: str | None = None,
) -> RecordSource:
    """Open a split of the painted charts, painting them first if need be, or of the published questions.

    Args:
      split: "train" or "test"; published questions have "val" too.
      data_dir: for "generated" the folder of prepared data, None being `default_data_dir()`; else the published folder,
        see `train.tasks.chartqa_files.find_split`.
      seed: of the charts; without effect on published questions.
      variant: "generated", "published" (both kinds of questions), "human", "augmented", "numeric" (published questions
        whose label is a number); with "_chat" the question is put as a chat.
      examples: other numbers of painted charts for some splits, e.g. ``{"train": 100}``.
      max_bad_lines: of published questions, refuse the folder when more are bad; None leaves out any number, and
        `notes` says which.
      prepare_in: folder of what is prepared from published questions; None is `default_data_dir()`.

    Raises:
      UsageError: an unknown split or variant, with the known ones.
      DataError: no such folder, no good question in it, or too many bad ones.
    """
    if variant not in VARIANTS:
        raise UsageError(f"chartqa: unknown variant {variant!r}; known variants: {', '.join(VARIANTS)}.")
    data, form = VARIANTS[variant]
    splits = tuple(CHARTS.charts) if data == GENERATED else SPLITS
    if split not in splits:
        raise UsageError(f"chartqa: unknown split {split!r}; known splits of variant {variant}: {', '.join(splits)}.")
    prompt, form = PROMPTS[form], f"{form}-prompt1"
    if data != GENERATED:
        sources, numeric = _PUBLISHED[data]
        return make_published_source(
            split, prompt, data_dir=data_dir, sources=sources, numeric=numeric, max_bad=max_bad_lines,
            prepare_in=prepare_in, form=form,
        )  # fmt: skip
    charts = dataclasses.replace(CHARTS, charts={**CHARTS.charts, **(examples or {})})
    parts = (CHART_VERSION, QUESTIONS_VERSION, charts.size, charts.questions, sorted(charts.charts.items()))
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    config = RecordConfig(
        name=f"{GENERATED}-seed{seed}-{digest}",
        records={each: partial(generate_questions, charts, split=each, seed=seed) for each in charts.charts},
    )

    def make_example(index: int, record: Record) -> Example:
        return Example(
            key=f"{split}-{index}",
            prompt=prompt.format(record["query"]),
            answer=record["label"],
            image=record["image"],
        )

    return RecordSource(prepare_builder(PaintedCharts, config, data_dir=data_dir), split, make_example, form=form)


def _paint(size: int, rng: random.Random) -> tuple[Chart, Image.Image]:
    chart = draw_chart(rng)
    return chart, paint_chart(chart, size)


CHARTQA = Task(
    name="chartqa",
    summary="questions about charts painted here, or about those of ChartQA (--data_dir=FOLDER, variant published)",
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
    grader="chartqa",
    max_new_tokens=48,
    defaults=MappingProxyType(
        {
            "backbone": "tiny-vlm",
            "image_size": 96,
            "max_length": 128,
            "batch_size": 32,
            "steps": 2000,
            "optimizer": "muon",
            "learning_rate": 2e-3,
            "log_every": 20,
            "eval_every": 500,
            "eval_examples": 600,
            "checkpoint_every": 500,
        }
    ),
    pretrained_defaults=MappingProxyType(
        {
            "image_size": None,  # as its files say
            "max_length": 1024,
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
