"""A model as the subject of an evaluation: a run's checkpoint or pretrained weights, asked the questions of a split."""

import dataclasses
from pathlib import Path
from typing import Any

from flax import nnx

from smmd_jax import numeric_vocab_from_tokenizer
from smmd_jax.backbones import join_parameters
from train.backbone import Backbone, make_backbone
from train.config import TrainConfig
from train.distribution_metrics import DistributionMetrics
from train.encode import encode_source
from train.evaluation import EvaluateFlags, content_digest, default_variant
from train.exits import UsageError
from train.flags import check_names
from train.graders import GRADERS
from train.manifest import MANIFEST
from train.parameters import make_parameters
from train.partition import make_mesh
from train.pictures import Pictures
from train.prompts import make_prompt_batches
from train.sampled_answers import DECODINGS, sample_answers
from train.scoring import Scored, answer_prompts, grade_answers
from train.splits import open_split
from train.tasks import TASKS, Example, Source
from train.tasks.published import digest
from train.teacher_forcing import measure_targets
from train.token_answers import TOKEN_DECODINGS, check_single_tokens, token_answers
from train.trained import read_run_config, restore_trained

# Numbers whose mean or median says nothing: minutes of a dial wrap around.
_CIRCULAR = ("clock",)


@dataclasses.dataclass(frozen=True)
class FirstExamples:
    """The first examples of a source, as a source."""

    source: Source
    count: int

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint if self.count == len(self.source) else f"{self.source.fingerprint}:{self.count}"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        return self.source[index]


class EvaluatedModel:
    """The model that the flags name and the questions it is asked; made before anything is generated.

    Attributes:
      name: of the results.
      inputs: all that the answers and their grades depend on; the batch size is no part of it.
      notes: sentences for the user.

    Raises:
      UsageError, DataError, CheckpointError: see `train.evaluation.evaluate`.
    """

    def __init__(self, flags: EvaluateFlags) -> None:
        self._flags = flags
        own = read_run_config(Path(flags.workdir)) if flags.workdir else None
        config = _config(flags, own)
        task = TASKS[config.task]
        self._grader = flags.grader or task.grader
        if flags.decode != "greedy" and self._grader in _CIRCULAR:
            raise UsageError(
                f"decode={flags.decode}: grader {self._grader} reads times of a dial, which wrap around, so neither "
                "their mean nor their median means anything; leave it at greedy."
            )
        backbone = make_backbone(config)
        self._tokenizer = backbone.tokenizer
        self._max_new_tokens = flags.max_new_tokens or task.max_new_tokens
        self._max_positions = backbone.config.max_positions
        source = open_split(config, config.eval_split)
        if flags.eval_examples > len(source):
            raise UsageError(
                f"eval_examples={flags.eval_examples:,}: split {config.eval_split} has {len(source):,} examples; ask "
                "for fewer, or for all with 0."
            )
        self._source = FirstExamples(source, flags.eval_examples or len(source))
        self._prompts = make_prompt_batches(
            self._source,
            backbone.tokenizer,
            batch_size=flags.eval_batch_size,
            max_length=self._max_positions - self._max_new_tokens,
            images=backbone.images,
        )
        if flags.reads_numeric_tokens:
            self._vocab = numeric_vocab_from_tokenizer(
                backbone.tokenizer.backend, policy=config.numeric_policy, vocab_size=backbone.config.vocab_size
            )
        if flags.decode in TOKEN_DECODINGS:
            examples = (example for batch in self._prompts for example in batch.examples)
            check_single_tokens(examples, backbone.tokenizer, self._vocab, decode=flags.decode)
        if flags.distribution:
            self._encoded = encode_source(
                self._source,
                backbone.tokenizer,
                max_length=self._max_positions,
                max_dropped_fraction=0.0,
                images=backbone.images,
            )
            self._pictures = None
            if self._encoded.has_images:
                self._pictures = Pictures(
                    self._source,
                    backbone.images,
                    places=self._encoded.source_index,
                    sizes=self._encoded.image_sizes,
                )
        self._model, step, weights = _load(flags, own, config, backbone)
        self.notes = (*backbone.notes, *getattr(source, "notes", ()))
        end = "" if flags.decode == "greedy" else f"-{flags.decode}"
        self.name = f"{config.task}-{config.eval_split}-{'pretrained' if step is None else step}{end}"
        drawn = {"samples": flags.samples, "temperature": flags.temperature, "seed": flags.seed}
        self.inputs: dict[str, Any] = {
            "task": config.task,
            "variant": config.variant,
            "split": config.eval_split,
            "examples": len(self._source),
            "data": content_digest(self._source.fingerprint),
            "step": step,
            "weights": weights,
            "tokenizer": backbone.tokenizer.fingerprint[:16],
            "grader": self._grader,
            "max_new_tokens": self._max_new_tokens,
            "decode": flags.decode,
            **(drawn if flags.draws else {}),
            **({"numeric_policy": config.numeric_policy} if flags.reads_numeric_tokens else {}),
            **({} if config.image_size is None else {"image_size": config.image_size}),
        }

    def score(self) -> tuple[Scored, DistributionMetrics | None]:
        """Generate, grade, and with --distribution read the gold answers too."""
        flags, length = self._flags, self._max_new_tokens
        if flags.draws:
            answers = self._regression_aware_answers()
        elif flags.decode in TOKEN_DECODINGS:
            answers = token_answers(self._model, self._prompts, self._vocab, decode=flags.decode)
            answers = [(example, self._mark + text) for example, text in answers]
        else:
            answers = answer_prompts(self._model, self._tokenizer, self._prompts, max_new_tokens=length)
        scored = grade_answers(answers, self._grader)
        if not flags.distribution:
            return scored, None
        return scored, measure_targets(
            self._model, self._encoded, self._vocab, batch_size=flags.eval_batch_size, pictures=self._pictures
        )

    @property
    def _mark(self) -> str:
        """What the strict grader reads a number behind; a mean is no text of the model's and has none."""
        return "#### " if self._grader == "gsm8k_strict" else ""

    def _regression_aware_answers(self) -> list[tuple[Example, str]]:
        flags = self._flags
        drawn = sample_answers(
            self._model,
            self._tokenizer,
            self._prompts,
            max_new_tokens=self._max_new_tokens,
            samples=flags.samples,
            temperature=flags.temperature,
            seed=flags.seed,
        )
        answers = []
        for example, texts in drawn:
            read = lambda text, gold=example.answer: GRADERS[self._grader](text, gold).value
            text = DECODINGS[flags.decode](texts, read)
            answers.append((example, text if text in texts else self._mark + text))
        return answers


def _config(flags: EvaluateFlags, own: TrainConfig | None) -> TrainConfig:
    """The config that names task, data and backbone; flags of training in it play no part."""
    task_name = flags.task or own.task
    task = TASKS[task_name]
    if own is None:
        dtype = flags.dtype or "float32"
        # A row of training may be longer than the model allows, and none is read here.
        base = TrainConfig(
            task=task_name,
            backbone=flags.backbone,
            max_length=2,
            dtype=dtype,
            param_dtype=dtype,
            image_size=flags.image_size,
        )
        variant = flags.variant or task.variants[0]
    else:
        base = own
        variant = flags.variant or default_variant(task_name, own_task=own.task, own_variant=own.variant)
    split = flags.split or task.eval_split
    check_names(
        {"variant": variant, "split": split}, EvaluateFlags, tables={"variant": task.variants, "split": task.splits}
    )
    return dataclasses.replace(
        base,
        task=task_name,
        variant=variant,
        eval_split=split,
        data_dir=flags.data_dir or base.data_dir,
        numeric_policy=flags.numeric_policy or base.numeric_policy,
    )


def _load(
    flags: EvaluateFlags, own: TrainConfig | None, config: TrainConfig, backbone: Backbone
) -> tuple[nnx.Module, int | None, str]:
    """(model, step, a digest of its weights)."""
    if own is not None:
        trained = restore_trained(Path(flags.workdir), own, backbone, flags.step)
        manifest = Path(flags.workdir) / "checkpoints" / str(trained.step) / MANIFEST
        return trained.model(), trained.step, digest(manifest)[:16]
    if backbone.folder is None:
        raise UsageError(f"backbone={backbone.name} has no weights: name a model folder, or a run with --workdir.")
    parameters = make_parameters(config, backbone, make_mesh({}))
    model = nnx.merge(parameters.graphdef, join_parameters(parameters.make_trainable(), parameters.make_frozen()))
    files = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in backbone.folder.glob("*.safetensors")
    )
    return model, None, content_digest([files, config.dtype])
