"""The arithmetic task: a builder of add/subtract questions, and the row that joins it with modules and files."""

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import tensorflow_datasets as tfds

from train.exits import UsageError
from train.tasks.base import Example, Task
from train.tasks.expressions import GENERATOR_VERSION, Difficulty, evaluate, sample_expression, split_of
from train.tasks.math_data import MODULE_VARIANTS, SIZES, make_module_source
from train.tasks.math_files import RELEASED_VARIANTS, make_released_source
from train.tasks.prepared import Record, RecordSource, default_data_dir, prepare_builder

__all__ = [
    "ARITH",
    "VARIANTS",
    "Arith",
    "ArithConfig",
    "ArithSource",
    "SplitSpec",
    "default_data_dir",
    "generate_questions",
    "make_source",
    "prepare",
]

TEMPLATES = ("{}", "What is {}?", "What is the value of {}?", "Evaluate {}.", "Calculate {}.")
MAX_QUESTION_CHARACTERS, MAX_ANSWER_CHARACTERS = 160, 30
# One in sixteen draws belongs to an evaluation split, so this many in vain mean that there is nothing left to find.
_MAX_TRIES_PER_EXAMPLE = 50_000
# The bare template ends in a digit and the answer may begin with one, so a prompt needs an end of its own.
ANSWER_SEPARATOR = "\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitSpec:
    """How many examples a split has, of which difficulties (each equally likely), and if questions are distinct."""

    examples: int
    difficulties: tuple[Difficulty, ...]
    unique: bool


def _small(entropy: tuple[float, float], operands: tuple[int, ...]) -> tuple[Difficulty, ...]:
    return (Difficulty(entropy=entropy, operands=operands, value_share=0.5, tree_offset=0.0, max_operand=50),)


# "small" is learnt by a tiny model in minutes: two or three operands up to 50. "deepmind" follows
# arithmetic__add_sub_multiple: three training levels that cut entropy 3-10 into thirds, interpolation at 8, and the
# extrapolation set with 10 to 12 operands.
VARIANTS: Mapping[str, Mapping[str, SplitSpec]] = MappingProxyType(
    {
        "small": {
            "train": SplitSpec(examples=200_000, difficulties=_small((3.0, 4.0), (2, 2, 3)), unique=False),
            "interpolate": SplitSpec(examples=2_000, difficulties=_small((3.0, 4.0), (2, 2, 3)), unique=True),
            "longer": SplitSpec(examples=2_000, difficulties=_small((3.0, 4.0), (4,)), unique=True),
        },
        "deepmind": {
            "train": SplitSpec(
                examples=100_000,
                difficulties=(
                    Difficulty(entropy=(3.0, 16 / 3), operands=(4, 5)),
                    Difficulty(entropy=(16 / 3, 23 / 3), operands=(4, 5, 6)),
                    Difficulty(entropy=(23 / 3, 10.0), operands=(4, 5, 6, 7)),
                ),
                unique=False,
            ),
            "interpolate": SplitSpec(
                examples=2_000, difficulties=(Difficulty(entropy=(8.0, 8.0), operands=(4, 5, 6, 7)),), unique=True
            ),
            "longer": SplitSpec(
                examples=2_000, difficulties=(Difficulty(entropy=(10.0, 12.0), operands=(10, 11, 12)),), unique=True
            ),
        },
    }
)


ALL_VARIANTS = (*VARIANTS, *MODULE_VARIANTS, *RELEASED_VARIANTS)


def generate_questions(spec: SplitSpec, *, split: str, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the (question, answer) pairs of one split, in order; the arguments alone decide them.

    Args:
      spec: number, difficulties and uniqueness of the examples.
      split: only expressions that `split_of` assigns to this split are kept.
      seed: any integer; other seeds give other questions of the same split.

    Raises:
      ValueError: the split has fewer (distinct) questions than ``spec.examples``.

    Example:
      >>> spec = SplitSpec(examples=2, difficulties=(Difficulty(entropy=(3, 4), operands=(2, 3)),), unique=True)
      >>> len(list(generate_questions(spec, split="train", seed=0)))
      2
    """
    rng = random.Random(f"arith/{GENERATOR_VERSION}/{split}/{seed}")
    seen: set[str] = set()
    yielded = tries = 0
    while yielded < spec.examples:
        tries += 1
        if tries > _MAX_TRIES_PER_EXAMPLE:
            raise ValueError(
                f"generate_questions: split {split!r} gave only {yielded:,} of the {spec.examples:,} questions asked "
                f"for; ask for fewer or raise the difficulty."
            )
        expression = sample_expression(rng, rng.choice(spec.difficulties))
        question = rng.choice(TEMPLATES).format(expression)
        if split_of(expression) != split or (spec.unique and question in seen):
            continue
        answer = str(evaluate(expression))
        if len(question) > MAX_QUESTION_CHARACTERS or len(answer) > MAX_ANSWER_CHARACTERS:
            continue
        if spec.unique:
            seen.add(question)
        yielded, tries = yielded + 1, 0
        yield question, answer


@dataclasses.dataclass(kw_only=True, eq=False)
class ArithConfig(tfds.core.BuilderConfig):
    """Builder configuration whose name holds the variant, the seed and a hash of every generator parameter.

    TFDS reuses prepared files by name alone, so a changed parameter must be a changed name.
    """

    seed: int = 0
    splits: Mapping[str, SplitSpec] = dataclasses.field(default_factory=dict)

    @classmethod
    def make(cls, variant: str, *, seed: int = 0, splits: Mapping[str, SplitSpec] | None = None) -> "ArithConfig":
        if variant not in VARIANTS and splits is None:
            raise UsageError(f"arith: unknown variant {variant!r}; known variants: {', '.join(VARIANTS)}.")
        splits = VARIANTS[variant] if splits is None else splits
        parameters = repr((GENERATOR_VERSION, TEMPLATES, sorted(splits.items())))
        digest = hashlib.sha256(parameters.encode()).hexdigest()[:12]
        return cls(name=f"{variant}-seed{seed}-{digest}", seed=seed, splits=splits)


# Not registered by name: TFDS refuses a second class of one name, and a notebook may load this module again.
class Arith(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Integer sums and differences with brackets and signs, as questions and answers in words and digits."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"question": tfds.features.Text(), "answer": tfds.features.Text()}),
            supervised_keys=("question", "answer"),
            disable_shuffling=True,  # the generator's draws are independent already; Grain shuffles each epoch
            metadata=tfds.core.MetadataDict(),
        )

    def _split_generators(self, dl_manager: object) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        return {split: self._generate_examples(split, spec) for split, spec in self.builder_config.splits.items()}

    def _generate_examples(self, split: str, spec: SplitSpec) -> Iterator[tuple[int, dict[str, str]]]:
        content = hashlib.sha256()
        for key, (question, answer) in enumerate(generate_questions(spec, split=split, seed=self.builder_config.seed)):
            content.update(f"{question}\n{answer}\n".encode())
            yield key, {"question": question, "answer": answer}
        self.info.metadata[split] = content.hexdigest()


class ArithSource(RecordSource):
    """One prepared split in random access; examples are read from array_record files when asked for.

    Args:
      builder: a prepared `Arith` builder.
      split: one of its splits.
    """

    def __init__(self, builder: Arith, split: str) -> None:
        super().__init__(builder, split, self._question)

    def _question(self, index: int, record: Record) -> Example:
        return Example(
            key=f"{self.split}-{index}", prompt=record["question"] + ANSWER_SEPARATOR, answer=record["answer"]
        )


def prepare(config: ArithConfig, *, data_dir: str | None = None) -> Arith:
    """Generate the data set unless it is there already; see `train.tasks.prepared.prepare_builder`."""
    return prepare_builder(Arith, config, data_dir=data_dir)


def make_source(
    split: str,
    *,
    data_dir: str | None = None,
    seed: int = 0,
    variant: str = "small",
    examples: Mapping[str, int] | None = None,
) -> RecordSource:
    """Open a split of the arithmetic data, generating the data set first if need be.

    Args:
      split: "train", "interpolate" (unseen expressions of the training difficulty) or "longer" (more operands); for
        modules and released files "train", "train-easy", "train-medium", "train-hard", "interpolate" or "extrapolate".
      data_dir: folder of prepared data; None is `default_data_dir()`.
      seed: seed of the generator.
      variant: "small" or "deepmind", "all" or one of the nine modules, "released" or "released_add_sub_multiple".
      examples: other numbers of examples for some splits, e.g. ``{"train": 2000}``.

    Raises:
      UsageError: an unknown split or variant, with the known ones.
    """
    if variant not in ALL_VARIANTS:
        raise UsageError(f"arith: unknown variant {variant!r}; known variants: {', '.join(ALL_VARIANTS)}.")
    options = {"variant": variant, "separator": ANSWER_SEPARATOR, "data_dir": data_dir, "examples": examples}
    if variant in MODULE_VARIANTS:
        return make_module_source(split, seed=seed, **options)
    if variant in RELEASED_VARIANTS:
        return make_released_source(split, **options)
    splits = dict(VARIANTS[variant])
    for name in (split, *(examples or {})):
        if name not in splits:
            raise UsageError(f"arith: unknown split {name!r}; known splits: {', '.join(splits)}.")
    for name, count in (examples or {}).items():
        splits[name] = dataclasses.replace(splits[name], examples=count)
    return ArithSource(prepare(ArithConfig.make(variant, seed=seed, splits=splits), data_dir=data_dir), split)


ARITH = Task(
    name="arith",
    summary="arithmetic in the style of DeepMind Mathematics, generated or from its released files",
    train_split="train",
    eval_split="interpolate",
    splits=("train", "interpolate", "longer", *(name for name in SIZES if name not in ("train", "interpolate"))),
    variants=ALL_VARIANTS,
    file_variants=RELEASED_VARIANTS,
    options=MappingProxyType({"data_seed": (*VARIANTS, *MODULE_VARIANTS)}),
    grader="math_exact",
    defaults=MappingProxyType(
        {
            "max_length": 128,
            "batch_size": 16,
            "steps": 1000,
            # Muon needs about a third of AdamW's steps to the same loss here.
            "optimizer": "muon",
            "learning_rate": 2e-3,
            "log_every": 20,
            "eval_every": 250,
            "eval_examples": 1000,
            "checkpoint_every": 250,
        }
    ),
    pretrained_defaults=MappingProxyType(
        {
            "max_length": 64,
            "batch_size": 8,
            "steps": 300,
            "optimizer": "adamw",
            "learning_rate": 1e-4,
            "log_every": 10,
            "eval_every": 100,
            "eval_examples": 500,
            "checkpoint_every": 100,
        }
    ),
    make_source=make_source,
)
