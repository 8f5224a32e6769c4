"""The arithmetic modules as data: generated splits that share no problem, each answer checked, as TFDS builders."""

import hashlib
import random
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

from train.exits import UsageError
from train.tasks.base import Example
from train.tasks.expressions import split_of
from train.tasks.math_answers import solve
from train.tasks.math_modules import MODULES, MODULES_VERSION, Drawn
from train.tasks.math_trees import NoTreeError
from train.tasks.prepared import Record, RecordBuilder, RecordConfig, RecordSource, prepare_builder

LEVELS = ("train-easy", "train-medium", "train-hard")
# Examples of each split; the published sizes are 1,999,998 (train) and 10,000 (the others).
SIZES: Mapping[str, int] = MappingProxyType(
    {"train": 99_999, **dict.fromkeys(LEVELS, 33_333), "interpolate": 2_000, "extrapolate": 2_000}
)
# Variant -> its modules. "all" mixes them in equal parts.
MODULE_VARIANTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"all": tuple(MODULES), **{name: (name,) for name in MODULES}}
)
MAX_QUESTION_CHARACTERS, MAX_ANSWER_CHARACTERS = 160, 30
# One in sixteen draws belongs to an evaluation split, so this many in vain mean that there is nothing left to find.
_MAX_TRIES_PER_EXAMPLE = 50_000


class MathModules(RecordBuilder):
    """Questions of DeepMind Mathematics' arithmetic modules, generated anew, with module and regime of each."""

    FIELDS = ("question", "answer", "module", "regime")


def regime_of(problem: str) -> str:
    """Name the regime that a problem belongs to, whatever the seed and the size: a hash of its text decides.

    One in sixteen problems is for interpolation and one for extrapolation; the rest goes to the three training levels
    in equal parts. So no two splits share a problem, under any wording.

    Example:
      >>> sorted({regime_of(f"{number} + 1") for number in range(200)})
      ['extrapolate', 'interpolate', 'train-easy', 'train-hard', 'train-medium']
    """
    split = split_of(problem)
    if split != "train":
        return "extrapolate" if split == "longer" else split
    code = hashlib.blake2b(problem.encode("ascii"), digest_size=8, person=b"level").digest()
    return LEVELS[int.from_bytes(code, "big") % len(LEVELS)]


def generate_records(
    modules: tuple[str, ...], regime: str, *, examples: int, seed: int, unique: bool = False
) -> Iterator[Record]:
    """Yield the records of one regime, in order; the arguments alone decide them, and `examples` only how many.

    The entropy is uniform over the regime's range; every answer is checked by `train.tasks.math_answers.solve`.

    Args:
      modules: names in `MODULES`, equally likely; those without an extrapolation set are left out there.
      regime: "train-easy", "train-medium", "train-hard", "interpolate" or "extrapolate", or "train": the three levels
        in turn.
      examples: how many.
      seed: any integer.
      unique: whether a problem may come once only.

    Raises:
      ValueError: no module has the regime, or there are fewer (distinct) problems than asked for.
      RuntimeError: the generator and the check disagree, which is a defect of one of them.

    Example:
      >>> [record["answer"] for record in generate_records(("mul",), "train-easy", examples=2, seed=0)]
      ['-82.6', '0.439']
    """
    if regime == "train":
        levels = [
            generate_records(modules, level, examples=(examples + 2 - place) // 3, seed=seed, unique=unique)
            for place, level in enumerate(LEVELS)
        ]
        for index in range(examples):
            yield next(levels[index % 3])
        return
    names = [name for name in modules if regime != "extrapolate" or MODULES[name].extrapolate]
    if not names:
        raise ValueError(f"arith: {', '.join(modules)} has no split extrapolate.")
    rng = random.Random(f"math/{MODULES_VERSION}/{','.join(names)}/{regime}/{seed}")
    seen: set[str] = set()
    for _ in range(examples):
        for _ in range(_MAX_TRIES_PER_EXAMPLE):
            name = rng.choice(names)
            drawn = _draw(rng, name, regime)
            if drawn and regime_of(drawn.problem) == regime and not (unique and drawn.problem in seen):
                break
        else:
            raise ValueError(f"arith: split {regime} of {', '.join(names)} has fewer than {examples:,} questions.")
        if unique:
            seen.add(drawn.problem)
        if solve(drawn.question) != drawn.answer:
            raise RuntimeError(f"{drawn.question!r}: generated {drawn.answer}, worked out {solve(drawn.question)}.")
        module = MODULES[name].longer if regime == "extrapolate" else name
        yield {
            "question": drawn.question, "answer": drawn.answer, "module": f"arithmetic__{module}", "regime": regime,
        }  # fmt: skip


def make_module_source(
    split: str,
    *,
    variant: str,
    separator: str,
    data_dir: str | None = None,
    seed: int = 0,
    examples: Mapping[str, int] | None = None,
) -> RecordSource:
    """Open a split of a variant of `MODULE_VARIANTS`, generating it first if need be.

    Args:
      split: "train" (the three levels in turn), one of them, "interpolate" or "extrapolate".
      variant: "all" or a module.
      separator: what follows the question in a prompt.
      data_dir: folder of prepared data; None is `default_data_dir()`.
      seed: of the generator.
      examples: other numbers of examples for some splits.

    Raises:
      UsageError: an unknown split, with the known ones.
    """
    sizes = dict(SIZES)
    if not any(MODULES[name].extrapolate for name in MODULE_VARIANTS[variant]):
        del sizes["extrapolate"]
    for name in (split, *(examples or {})):
        if name not in sizes:
            raise UsageError(f"arith: unknown split {name!r}; known splits: {', '.join(sizes)}.")
    count = (examples or {}).get(split, sizes[split])
    make = partial(
        generate_records, MODULE_VARIANTS[variant], split, examples=count, seed=seed, unique="train" not in split
    )
    config = RecordConfig(name=f"{variant}-{split}-n{count}-seed{seed}-v{MODULES_VERSION}", records={split: make})

    def make_example(index: int, record: Record) -> Example:
        return Example(key=f"{split}-{index}", prompt=record["question"] + separator, answer=record["answer"])

    return RecordSource(prepare_builder(MathModules, config, data_dir=data_dir), split, make_example)


def _draw(rng: random.Random, name: str, regime: str) -> Drawn | None:
    """One question of the module, or None where the draws give none or one that is too long."""
    module = MODULES[name]
    try:
        drawn = module.draw(rng, rng.uniform(*module.entropy(regime)), regime == "extrapolate")
    except NoTreeError:
        return None
    is_long = len(drawn.question) > MAX_QUESTION_CHARACTERS or len(drawn.answer) > MAX_ANSWER_CHARACTERS
    return None if is_long else drawn
