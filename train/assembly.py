"""From a config to everything a run needs: data, tokenizer, model, kernel, objective, mesh, and the jitted step."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from smmd_jax import LOSSES, NumericKernel, NumericVocab, make_numeric_kernel, numeric_vocab_from_tokenizer
from smmd_jax.backbones import join_parameters
from smmd_jax.backbones.image_rows import ImageRows
from smmd_jax.errors import TokenizerError
from train.backbone import Backbone, make_backbone
from train.config import TrainConfig, parse_mesh
from train.data import Batch, Batches, make_batches
from train.encode import Statistics
from train.exits import DataError, StorageError, UsageError
from train.objective import Objective, make_objective
from train.optimizer import Schedule, make_optimizer, make_schedule
from train.own_loss import check_own_loss
from train.parameters import Parameters, make_parameters
from train.partition import (
    batch_sharding,
    check_batch_size,
    data_shard,
    make_mesh,
    place_everywhere,
    place_rows,
)
from train.program import Program, make_program
from train.prompts import PromptBatch, make_prompt_batches
from train.splits import cache_folder, open_split
from train.step import Step, TrainState
from train.tasks import TASKS, Source, Task
from train.tasks.prepared import default_data_dir
from train.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All parts of a run; made by `assemble`, used by the loop and the commands.

    Attributes:
      parameters: the model's structure, and which of its parameters are trained.
      program: the jitted step and its state.
      images: how the backbone reads images; None: it reads text alone.
      prompts: of the evaluation; encoded before training, so that what cannot be evaluated is refused first.
      backbone_folder: holds the weights that the run starts from; None: they start at random.
      notes: sentences for the header.
    """

    config: TrainConfig
    task: Task
    tokenizer: Tokenizer
    kernel: NumericKernel | NumericVocab
    objective: Objective
    schedule: Schedule
    mesh: Mesh
    parameters: Parameters
    program: Program
    batches: Batches
    images: ImageRows | None
    statistics: Statistics
    prompts: Sequence[PromptBatch]
    backbone_folder: Path | None
    notes: tuple[str, ...]

    @property
    def state_like(self) -> TrainState:
        """ShapeDtypeStruct with shardings: what is restored into."""
        return self.program.state_like

    @property
    def make_state(self) -> Callable[[], TrainState]:
        """() -> a fresh state, born sharded."""
        return self.program.make_state

    @property
    def step(self) -> Step:
        """Jitted, the state donated; its last argument is `frozen`."""
        return self.program.step

    @property
    def is_pretrained(self) -> bool:
        """Whether the parameters start from a folder of weights."""
        return self.backbone_folder is not None

    @property
    def parameter_count(self) -> int:
        """How many parameters the model has, frozen ones included."""
        return self.trained_count + _count(self.parameters.frozen_like)

    @property
    def trained_count(self) -> int:
        return _count(self.parameters.trainable_like)

    @functools.cached_property
    def frozen(self) -> dict:
        """The parameters that are not trained, on the devices from the first use on; {} where all are trained."""
        return self.parameters.make_frozen()

    def model(self, parameters: Any) -> nnx.Module:
        """Make the model of these trained parameters and the frozen ones."""
        return nnx.merge(self.parameters.graphdef, join_parameters(parameters, self.frozen))

    def source(self, split: str) -> Source:
        return open_split(self.config, split)

    def place(self, batch: Batch) -> Batch:
        """Move a batch to the devices, its rows over data and fsdp."""
        return place_rows(batch, self.mesh)

    def lower_step(self, batch: Batch | None = None) -> jax.stages.Lowered:
        """Lower the step for the shapes of a batch; None: the largest of this run."""
        rows, batch = batch_sharding(self.mesh), self.batches.blank() if batch is None else batch
        # Every process has its own rows of the batch, and the step sees all of them.
        shape = lambda leaf: (self.config.batch_size, *leaf.shape[1:])
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(shape(leaf), leaf.dtype, sharding=rows), batch)
        return self.program.lower(like, self.kernel)


def assemble(config: TrainConfig) -> Run:
    """Make every part of a run; no device array but the kernel is made.

    Raises:
      UsageError: parts that do not fit one another; the message says which flag to change.
      DataError, TokenizerError: data or a tokenizer that cannot be used.
    """
    task = TASKS[config.task]
    with _usage_errors():
        mesh = make_mesh(parse_mesh(config.mesh))
        check_batch_size(mesh, config.batch_size, config.grad_accum)
        objective = make_objective(config.loss, weight=config.loss_weight, normalize_by=config.normalize_by)
        _check_objective(objective, config)
    backbone = make_backbone(config)
    tokenizer, model_config = backbone.tokenizer, backbone.config
    with _storage_errors(config.data_dir or default_data_dir()):
        source = open_split(config, task.train_split)
        batches = make_batches(
            source,
            tokenizer,
            batch_size=config.batch_size,
            max_length=config.max_length,
            seed=config.seed,
            shard=data_shard(mesh),
            vocab_size=model_config.vocab_size,
            num_embeddings=getattr(model_config, "text", model_config).num_embeddings,
            max_dropped_fraction=config.max_dropped_fraction,
            cache_dir=cache_folder(config),
            images=backbone.images,
        )
        prompts = _prompts(task, backbone, config)
    vocab = _numeric_vocab(backbone, config)
    statistics = batches.encoded.statistics(np.asarray(vocab.token_ids))
    if not (statistics.numeric_tokens or objective.is_plain):
        raise DataError(
            f"none of the {statistics.supervised_tokens:,} supervised tokens of split {task.train_split} is a number "
            f"(numeric_policy={config.numeric_policy}), so loss={config.loss} would learn nothing from them: choose "
            "another --numeric_policy, or --loss=ce."
        )
    with _usage_errors():
        objective = objective.placed(
            config.logits,
            rows=config.batch_size // config.grad_accum,
            length=config.max_length,
            width=model_config.vocab_size,
            mesh=mesh,
        )
        kernel = place_everywhere(_kernel(objective, vocab, config), mesh)
        if config.loss not in LOSSES:
            check_own_loss(config.loss, kernel, model_config.vocab_size)
        schedule = make_schedule(
            config.schedule, learning_rate=config.learning_rate, warmup_steps=config.warmup, steps=config.steps
        )
        optimizer = make_optimizer(
            config.optimizer, schedule, weight_decay=config.weight_decay, clip_norm=config.clip_norm
        )

        parameters = make_parameters(config, backbone, mesh)
        notes = (
            *backbone.notes,
            *getattr(source, "notes", ()),
            *batches.encoded.notes,
            *_unused_flags(objective, config, backbone),
            *_wide_adapters(parameters, config),
        )

    program = make_program(
        parameters, objective, optimizer, mesh, grad_accum=config.grad_accum, seed=config.seed
    )
    return Run(
        config=config,
        task=task,
        tokenizer=tokenizer,
        kernel=kernel,
        objective=objective,
        schedule=schedule,
        mesh=mesh,
        parameters=parameters,
        program=program,
        batches=batches,
        images=backbone.images,
        statistics=statistics,
        prompts=prompts,
        backbone_folder=backbone.folder,
        notes=notes,
    )


def _count(like: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(like))


def _prompts(task: Task, backbone: Backbone, config: TrainConfig) -> Sequence[PromptBatch]:
    split = config.eval_split or task.eval_split
    source = open_split(config, split)
    if config.eval_examples > len(source):
        raise UsageError(
            f"eval_examples={config.eval_examples:,}: split {split} has {len(source):,} examples; ask for fewer, or "
            "for all with 0."
        )
    return make_prompt_batches(
        source,
        backbone.tokenizer,
        batch_size=config.eval_batch_size,
        examples=config.eval_examples or len(source),
        max_length=backbone.config.max_positions - task.max_new_tokens,
        images=backbone.images,
    )


def _numeric_vocab(backbone: Backbone, config: TrainConfig) -> NumericVocab:
    """Find the numeric tokens; plain cross entropy needs them too, for the counts of the log."""
    try:
        return numeric_vocab_from_tokenizer(
            backbone.tokenizer.backend, policy=config.numeric_policy, vocab_size=backbone.config.vocab_size
        )
    except TokenizerError as error:
        raise TokenizerError(
            f"backbone={backbone.name}, numeric_policy={config.numeric_policy}: {error}. Flags: --numeric_policy, "
            "--backbone."
        ) from error


def _kernel(objective: Objective, vocab: NumericVocab, config: TrainConfig) -> NumericKernel | NumericVocab:
    return vocab if objective.spec.terms is None else make_kernel(vocab, config, terms=objective.spec.terms)


def make_kernel(vocab: NumericVocab, config: TrainConfig, *, terms: str = "smmd") -> NumericKernel:
    """Make the kernel that the flags describe; raises what `make_numeric_kernel` raises."""
    return make_numeric_kernel(
        vocab,
        kernel=config.kernel,
        sigma=config.sigma,
        alpha=config.alpha,
        rescale=config.rescale,
        seed=config.seed,
        terms=terms,
    )


def _check_objective(objective: Objective, config: TrainConfig) -> None:
    if objective.spec.needs == "sequence" and config.normalize_by == "tokens":
        raise ValueError(
            f"loss={config.loss} has one value per sample, so normalize_by=tokens has no meaning; leave it at numeric."
        )


def _unused_flags(objective: Objective, config: TrainConfig, backbone: Backbone) -> tuple[str, ...]:
    """Name the flags that were changed although the loss has no kernel, the run no adapters, the backbone no eyes."""
    unused = {}
    if objective.spec.terms is None:
        unused[f"loss={config.loss} has no kernel"] = ("kernel", "sigma", "alpha", "rescale")
    if not config.lora_rank:
        unused["lora_rank=0 trains all parameters"] = ("lora_alpha", "lora_targets")
    if backbone.images is None:
        unused[f"backbone={config.backbone} reads text alone"] = ("vision", "image_size")
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    return tuple(
        f"--{name} has no effect: {reason}."
        for reason, names in unused.items()
        for name in names
        if getattr(config, name) != defaults[name]
    )


def _wide_adapters(parameters: Parameters, config: TrainConfig) -> tuple[str, ...]:
    """Name the matrices whose smaller side is below the rank of their adapters, which then gains nothing.

    Raises:
      ValueError: all of them.
    """
    sides: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters.trainable_like) if config.lora_rank else ():
        *_, matrix, name = (key.key if hasattr(key, "key") else key for key in path)
        if name in ("lora_a", "lora_b"):
            side = leaf.shape[-2] if name == "lora_a" else leaf.shape[-1]
            sides[matrix] = min(side, sides.get(matrix, side))
    wide = {matrix: side for matrix, side in sides.items() if config.lora_rank > side}
    if not wide:
        return ()
    shown = ", ".join(f"{matrix} ({side})" for matrix, side in wide.items())
    if len(wide) == len(sides):
        raise ValueError(
            f"lora_rank={config.lora_rank} is more than the smaller side of every matrix with adapters, {shown}: they "
            "would be larger than the matrices; choose a smaller rank, or --lora_rank=0 to train all parameters."
        )
    return (f"lora_rank={config.lora_rank} is more than the smaller side of {shown}; a rank beyond it adds nothing.",)


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """What the library refuses as an argument came from a flag here."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def _storage_errors(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the data in {folder} cannot be prepared or read: {error}. Choose another --data_dir."
        ) from error
