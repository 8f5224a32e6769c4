"""An evaluation outside of training: whose answers, to which questions, graded how, and the files that keep it."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from train.config import differences
from train.exits import StorageError, UsageError
from train.files import replace_file
from train.flags import check_values, flag_field
from train.log import encode_row, write_jsonl
from train.tasks import TASKS

FOLDER = "evaluations"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    """The flags of the command.

    Raises:
      UsageError: not exactly one of a run, a model folder and a file of predictions, or a flag that does not fit.
    """

    workdir: str = flag_field("Folder of the run whose checkpoint answers", "")
    backbone: str = flag_field("Instead of a run: model folder, .gguf file or org/name whose weights answer", "")
    predictions: str = flag_field(
        "Instead of a model: a file of JSON lines with prediction and answer, to be graded", ""
    )
    task: str = flag_field("Task to score on; empty: the run's own", "")
    variant: str = flag_field("Form of the task's data; empty: the run's, or the task's first of the run's kind", "")
    data_dir: str = flag_field("Folder of data sets; empty: the run's", "")
    split: str = flag_field("Split to score on; empty: the task's evaluation split", "")
    eval_split: str = flag_field("Another name of --split: the one that train.main has for it", "")
    step: int | None = flag_field("Step of the checkpoint; none: the newest", None, at_least=0)
    grader: str = flag_field("Rule of right and wrong; empty: the task's", "")
    eval_examples: int = flag_field("First examples of the split; 0: all of them", 0, at_least=0)
    eval_batch_size: int = flag_field("Prompts generated for at a time; changes no answer", 64, at_least=1)
    max_new_tokens: int | None = flag_field("Tokens of an answer that does not end; none: the task's", None, at_least=1)
    decode: Literal["greedy", "expected_value", "median", "token_expected_value", "token_median"] = flag_field(
        "Answer with the most likely tokens; with the mean or median of the numbers that drawn answers state; or with "
        "that of the numeric tokens after the prompt, where answers are one token",
        "greedy",
    )
    samples: int = flag_field("Answers drawn for a prompt by --decode=expected_value or median", 16, at_least=1)
    temperature: float = flag_field("Temperature of the draws", 1.0, above=0)
    seed: int = flag_field("Seed of the draws", 0, at_least=0, below=2**32)
    distribution: bool = flag_field("Also measure the predicted distribution at gold answers' numeric tokens", False)
    numeric_policy: str = flag_field(
        "Which tokens are numeric for --distribution and --decode=token_...; empty: the run's", ""
    )
    image_size: int | None = flag_field(
        "Scale images of a --backbone as training's flag does; none: as its files say", None, at_least=1
    )
    dtype: Literal["", "float32", "bfloat16"] = flag_field("Dtype of a --backbone; empty: float32", "")
    out: str = flag_field("Folder to write to; empty: evaluations/ of the run", "")
    debug: bool = flag_field("Show the trace of an error", False)

    def __post_init__(self) -> None:
        check_values(self)
        given = [name for name in _SUBJECTS if getattr(self, name)]
        if len(given) != 1:
            shown = " and ".join(f"--{name}" for name in given) or "none of them"
            raise UsageError(
                f"give exactly one of --workdir=RUN, --backbone=FOLDER and --predictions=FILE.jsonl; got {shown}."
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        useless = [f"--{name}" for name in _USELESS[given[0]] if getattr(self, name) != defaults[name]]
        if not self.draws:
            drawn = (name for name in ("samples", "temperature", "seed") if getattr(self, name) != defaults[name])
            useless += [f"--{name} without --decode" for name in drawn]
        if not self.reads_numeric_tokens and self.numeric_policy:
            useless.append("--numeric_policy without --distribution")
        if useless:
            raise UsageError(f"no effect with --{given[0]}: {', '.join(dict.fromkeys(useless))}; leave it out.")
        if self.predictions and not (self.task or self.grader):
            raise UsageError("--predictions needs --grader=NAME, or --task=TASK whose grader is meant.")
        if self.backbone and not (self.task and self.out):
            raise UsageError("--backbone needs --task=TASK and --out=FOLDER: nothing is written beside a model.")
        if self.split and self.eval_split not in ("", self.split):
            raise UsageError(f"--split={self.split} and --eval_split={self.eval_split} are one flag: give one of them.")
        object.__setattr__(self, "split", self.split or self.eval_split)

    @property
    def draws(self) -> bool:
        """Whether several answers are drawn for each prompt."""
        return self.decode in ("expected_value", "median")

    @property
    def reads_numeric_tokens(self) -> bool:
        return self.distribution or self.decode.startswith("token_")


_SUBJECTS = ("workdir", "backbone", "predictions")
_OF_A_MODEL = (
    "variant", "data_dir", "split", "eval_split", "step", "eval_examples", "eval_batch_size", "max_new_tokens",
    "decode", "samples", "temperature", "seed", "distribution", "numeric_policy", "image_size", "dtype",
)  # fmt: skip
_USELESS = {"workdir": ("dtype", "image_size"), "backbone": ("step",), "predictions": _OF_A_MODEL}


def evaluate(flags: EvaluateFlags) -> tuple[Path | None, dict[str, Any]]:
    """Score what the flags name; returns the file of the predictions (None: nothing was written) and the summary.

    Raises:
      UsageError: flags that fit neither one another nor the task, or other content where the results belong.
      DataError: examples or predictions that cannot be used.
      CheckpointCorruptError, CheckpointMismatchError, CheckpointError: no weights that can be used.
      StorageError: the results cannot be written.
    """
    # Imported late: --help and a mistyped flag answer at once, and a file of predictions needs no model.
    if flags.predictions:
        from train.graded_file import GradedFile

        subject = GradedFile(flags)
    else:
        from train.compilation_cache import use_compilation_cache
        from train.evaluated_model import EvaluatedModel

        use_compilation_cache()
        subject = EvaluatedModel(flags)
    folder = Path(flags.out) if flags.out else Path(flags.workdir) / FOLDER if flags.workdir else None
    stem = folder / subject.name if folder else None
    if stem:
        _check_place(stem, subject.inputs)
    scored, distribution = subject.score()
    summary = {
        "inputs": subject.inputs,
        "metrics": json.loads(encode_row(dataclasses.asdict(scored.metrics))),
        "distribution": json.loads(encode_row(dataclasses.asdict(distribution))) if distribution else None,
        "notes": list(subject.notes),
    }
    if stem is None:
        return None, summary
    try:
        write_jsonl(_with(stem, ".jsonl"), scored.predictions)
        replace_file(_with(stem, ".json"), json.dumps(summary, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise StorageError(f"{stem} cannot be written: {error}. Choose another --out.") from error
    return _with(stem, ".jsonl"), summary


def default_variant(task_name: str, *, own_task: str, own_variant: str) -> str:
    """Choose the variant of a task for a model that was trained on one of another task: chats for a model of chats.

    Example:
      >>> default_variant("svamp", own_task="gsm8k", own_variant="chat_stripped")
      'chat_stripped'
      >>> default_variant("jsonl", own_task="gsm8k", own_variant="chat_stripped")
      'chat'
    """
    task, is_chat = TASKS[task_name], TASKS[own_task].is_chat(own_variant)
    if own_variant in task.variants and task.is_chat(own_variant) == is_chat:
        return own_variant
    return next((variant for variant in task.variants if task.is_chat(variant) == is_chat), task.variants[0])


def content_digest(content: Any) -> str:
    """Give 16 hexadecimal digits that change with any part of what JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _check_place(stem: Path, inputs: Mapping[str, Any]) -> None:
    """Let the same evaluation be written again, and refuse to replace any other content."""
    summary, predictions = _with(stem, ".json"), _with(stem, ".jsonl")
    if not summary.exists():
        if predictions.exists():
            raise UsageError(f"{predictions} exists without {summary.name}: move it away, or choose another --out.")
        return
    try:
        former = json.loads(summary.read_text(encoding="utf-8"))["inputs"]
        lines = differences(former, inputs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{summary} is no summary of an evaluation: choose another --out.") from error
    if lines:
        raise UsageError(
            f"{summary} holds another evaluation (there -> now):\n  "
            + "\n  ".join(lines)
            + "\nNothing is overwritten: choose another --out, or move it away."
        )


def _with(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)
