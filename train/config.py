"""The frozen config of one run, how it is made from flags and task defaults, and what a resume may change."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from train.exits import StorageError, UsageError
from train.files import replace_file
from train.flags import Tables, check_names, check_values, flag_field, nearest, parse_flags

# Fields that only some variants of some tasks have a use for; see `train.tasks.base.Task`.
DATA_OPTIONS = ("data_seed", "limit", "max_bad_lines")
MESH_AXES = ("data", "fsdp", "tensor")
USAGE = "usage: python -m train.main --task=TASK [--flag=value ...]"
_BACKBONE_FORM = (r".*[/\\].*|.*\.gguf|~.*|\.{1,2}", "a model folder, a .gguf file, or org/name of a hub")
# Backbones that start from random parameters.
_RANDOM_BACKBONES = ("tiny", "tiny-vlm")
_FUNCTION_FORM = (r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "package.module:function for a loss of your own")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run; one field, one flag. Defaults live here, a task may override them.

    Raises:
        UsageError: a value of the wrong type or out of range; the message names the field.

    Example:
        >>> TrainConfig(task="arith", sigma=4).sigma
        (4.0,)
    """

    task: str = flag_field("What to train on")
    variant: str = flag_field("Form of the task's data; empty: the task's first", "")
    data_dir: str = flag_field(
        "Folder of data sets that are not generated; empty: the task's own", "", resumable=True
    )
    data_seed: int = flag_field("Seed of generated data; another one gives other examples", 0, at_least=0, below=2**32)
    limit: int = flag_field("First examples of the training file to use; 0: all of them", 0, at_least=0)
    max_bad_lines: int | None = flag_field(
        "Lines or pictures of your own files that may be bad and are left out; none: any number",
        None,
        at_least=0,
        resumable=True,
    )
    backbone: str = flag_field("Model to train", "tiny", other_form=_BACKBONE_FORM)
    dropout: float = flag_field("Share of activations dropped in training", 0.0, at_least=0, below=1)
    dtype: Literal["float32", "bfloat16"] = flag_field(
        "Dtype of matrix products and of what flows between layers; sums, norms and losses are float32", "float32"
    )
    param_dtype: Literal["", "float32", "bfloat16"] = flag_field(
        "Dtype of stored parameters; empty: float32, and bfloat16 for those that --lora_rank freezes", ""
    )
    scan_layers: bool = flag_field("Stack the layers and run them in one loop: compiles fast at any depth", False)
    remat: Literal["none", "full", "dots"] = flag_field(
        "What a layer computes again in the backward pass to save memory: nothing, all, or all but products", "none"
    )
    lora_rank: int = flag_field("Rank of trained adapters beside frozen parameters; 0: all are trained", 0, at_least=0)
    lora_alpha: float | None = flag_field("Adapters count alpha / rank; none: twice the rank", None, above=0)
    lora_targets: str = flag_field(
        "Matrices with adapters, commas between", "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    )
    vision: Literal["", "train", "freeze", "lora"] = flag_field(
        "What of a backbone's vision tower is trained: all, nothing, or adapters of --lora_rank; empty: all, and "
        "nothing with --lora_rank",
        "",
    )
    image_size: int | None = flag_field(
        "Images are scaled into a square of so many pixels a side (qwen2_5_vl: to its area); none: the backbone's own",
        None,
        at_least=1,
    )
    max_length: int = flag_field("Tokens in a packed row; longer examples are refused, never cut", 256, at_least=2)
    max_dropped_fraction: float = flag_field(
        "Share of the training examples that may be left out: longer than a row, or with unreadable images; 0: none",
        0.01,
        at_least=0,
        below=1,
        resumable=True,
    )

    loss: str = flag_field("Numeric loss that joins the cross-entropy", "smmd", other_form=_FUNCTION_FORM)
    loss_weight: float | None = flag_field("Weight of the numeric loss; none: the loss's own default", None, at_least=0)
    kernel: str = flag_field("Similarity of two numeric values", "rbf")
    sigma: tuple[float, ...] = flag_field("Bandwidth of the kernel; the mean over several", (2.0,), above=0)
    alpha: float | None = flag_field("Weight of the smoothness term; none: from the mean degree", None, at_least=0)
    rescale: float | None = flag_field("Map non-zero distances onto [1, this] before the kernel", None, at_least=1)
    normalize_by: Literal["numeric", "tokens"] = flag_field(
        "Positions the numeric loss is averaged over: numeric ones, or all supervised ones", "numeric"
    )
    numeric_policy: str = flag_field("Which tokens count as numbers", "integers")
    logits: Literal["", "dense", "chunked"] = flag_field(
        "Logits of all positions at once, or of a chunk at a time; empty: chunked where those of a micro-batch on one "
        "device take more than 256 MiB",
        "",
        resumable=True,
    )

    steps: int = flag_field("Optimizer steps of the whole run", 1000, at_least=1, resumable=True)
    batch_size: int = flag_field("Rows of one optimizer step, over all devices", 64, at_least=1)
    grad_accum: int = flag_field("Micro-batches that one optimizer step is computed in", 1, at_least=1)
    seed: int = flag_field("Seed of parameters, data order and dropout", 0, at_least=0, below=2**32)
    optimizer: str = flag_field("Rule that turns gradients into updates", "adamw")
    learning_rate: float = flag_field("Largest learning rate of the schedule", 3e-4, above=0)
    schedule: str = flag_field("Shape of the learning rate after the warm-up", "cosine")
    warmup_steps: int | None = flag_field(
        "Steps of linear warm-up; none: a tenth of --steps, at most 100", None, at_least=0
    )
    weight_decay: float = flag_field("Decoupled weight decay of the matrices", 0.01, at_least=0)
    clip_norm: float = flag_field("Largest global norm of the gradient; 0: no clipping", 1.0, at_least=0)

    mesh: str = flag_field("Devices along each axis, as data:2,fsdp:2,tensor:2; empty: one device", "", resumable=True)
    platform: Literal["", "cpu", "gpu", "tpu"] = flag_field(
        "Stop before any work unless jax runs on this; empty: whatever is there", "", resumable=True
    )

    distributed: Literal["", "auto"] = flag_field(
        "How several processes meet; auto: as Cloud TPU, SLURM, Open MPI or Kubernetes say; empty: at --coordinator or "
        "JAX_COORDINATOR_ADDRESS, and without either this process is alone",
        "",
        resumable=True,
    )
    coordinator: str = flag_field("HOST:PORT that process 0 opens and all processes reach", "", resumable=True)
    num_processes: int | None = flag_field(
        "Processes of the run; none: JAX_NUM_PROCESSES", None, at_least=1, resumable=True
    )
    process_id: int | None = flag_field(
        "Which of them this is, from 0; none: JAX_PROCESS_ID", None, at_least=0, resumable=True
    )
    join_timeout: int = flag_field("Seconds to wait for the other processes", 300, at_least=1, resumable=True)
    peer_timeout: int = flag_field(
        "Seconds without a sign of life of a process, after which the others end", 100, at_least=1, resumable=True
    )
    stall_timeout: int = flag_field(
        "Seconds without progress, after which a process of several ends itself; 0: never",
        1800,
        at_least=0,
        resumable=True,
    )

    workdir: str = flag_field(
        "Run folder; empty: runs/TASK-BACKBONE-LOSS-seedSEED. The same command in the same folder resumes",
        "",
        resumable=True,
    )
    log_every: int = flag_field("Steps between rows of metrics.jsonl", 10, at_least=1, resumable=True)
    eval_every: int = flag_field("Steps between evaluations; 0: only at the end", 0, at_least=0, resumable=True)
    eval_examples: int = flag_field("Examples of an evaluation; 0: the whole split", 200, at_least=0, resumable=True)
    eval_split: str = flag_field("Split to evaluate on; empty: the task's own", "", resumable=True)
    eval_batch_size: int = flag_field("Prompts generated for at a time", 64, at_least=1, resumable=True)
    checkpoint_every: int = flag_field("Steps between checkpoints; 0: only at the end", 200, at_least=0, resumable=True)
    keep_checkpoints: int = flag_field("Newest checkpoints that stay", 3, at_least=1, resumable=True)
    tensorboard: bool = flag_field("Also write TensorBoard events", False, resumable=True)

    print_config: bool = flag_field("Print the config as JSON and exit", False, resumable=True)
    dry_run: bool = flag_field(
        "Compile one step, show its memory and three decoded examples, and exit", False, resumable=True
    )
    debug: bool = flag_field("Show the trace of an error", False, resumable=True)
    allow_data_change: bool = flag_field(
        "Resume although the data differ from those of the checkpoint; the change is recorded", False, resumable=True
    )

    def __post_init__(self) -> None:
        check_values(self)
        parse_mesh(self.mesh)
        if self.batch_size % self.grad_accum:
            raise UsageError(
                f"batch_size={self.batch_size} cannot be cut into grad_accum={self.grad_accum} equal micro-batches: "
                "choose a batch size that is a multiple of it."
            )
        if self.vision == "lora" and not self.lora_rank:
            raise UsageError("vision=lora trains adapters beside the tower's matrices: give --lora_rank too.")
        for name in ("workdir", "data_dir"):
            if "://" in getattr(self, name):
                raise UsageError(f"{name} is a URL: wanted a folder that this machine has mounted.")

    @property
    def stored_dtype(self) -> str:
        """The dtype of stored parameters with the default resolved; adapters are float32 always."""
        return self.param_dtype or ("bfloat16" if self.lora_rank else "float32")

    @property
    def trained_vision(self) -> str:
        """What of a vision tower is trained, with the default resolved: train, freeze or lora."""
        return self.vision or ("freeze" if self.lora_rank else "train")

    @property
    def warmup(self) -> int:
        """The steps of warm-up with the default resolved: a tenth of the steps, at most 100."""
        return min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps


def parse_mesh(text: str) -> dict[str, int]:
    """Read `data:2,fsdp:2,tensor:2` into axis -> devices, in the order given; an empty text gives {}.

    Raises:
        UsageError: an unknown or repeated axis, or a size below 1.
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else []:
        axis, _, size = part.strip().partition(":")
        if axis not in MESH_AXES or axis in sizes or not re.fullmatch(r"[1-9][0-9]*", size, re.ASCII):
            raise UsageError(
                f"mesh={text}: {part.strip()!r} was not understood; wanted axis:size pairs with each of "
                f"{', '.join(MESH_AXES)} at most once, as data:2,fsdp:2,tensor:2."
            )
        sizes[axis] = int(size)
    return sizes


def make_config(given: Mapping[str, Any], *, tables: Tables) -> TrainConfig:
    """Make the config of a run: TrainConfig's defaults, then the task's, then `given`, which beats both.

    A backbone with pretrained weights, every one but tiny, takes the task's `pretrained_defaults` on top of its own.

    Args:
        given: the values asked for, by field name; a value counts as given also where it equals a default.
        tables: field name -> names allowed, e.g. {"task": TASKS, "loss": LOSSES, "kernel": KERNELS}. Rows of the
            table of tasks may carry `defaults` and `pretrained_defaults`.

    Raises:
        UsageError: an unknown field or name, a value out of range, no task.
        TypeError: a task overrides a field that does not exist.
    """
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    for name in given:
        if name not in known:
            near = nearest(name, known)
            raise UsageError(f"{name} is not a field of the config" + (f"; did you mean {near}?" if near else "."))
    tasks = tables.get("task", ())
    if "task" not in given:
        raise UsageError(f"--task is required. Known: {', '.join(tasks)}.")
    check_names({"task": given["task"]}, TrainConfig, tables={"task": tasks} if tasks else {})
    task = tasks[given["task"]] if isinstance(tasks, Mapping) else None
    defaults = dict(getattr(task, "defaults", {}))
    if given.get("backbone", defaults.get("backbone", "tiny")) not in _RANDOM_BACKBONES:
        defaults |= getattr(task, "pretrained_defaults", {})
    if not defaults.keys() <= known - {"task", "workdir"}:
        raise TypeError(f"task {given['task']} sets defaults for {sorted(defaults.keys() - known)}: no such fields.")
    config = TrainConfig(**{**defaults, **given})
    if variants := getattr(task, "variants", ()):
        config = dataclasses.replace(config, variant=config.variant or variants[0])
        tables = {**tables, "variant": variants}
        _check_data_options(task, config)
    if splits := getattr(task, "splits", ()):
        config = dataclasses.replace(config, eval_split=config.eval_split or task.eval_split)
        tables = {**tables, "eval_split": splits}
    check_names(dataclasses.asdict(config), TrainConfig, tables=tables)
    return config if config.workdir else dataclasses.replace(config, workdir=default_workdir(config))


def _check_data_options(task: Any, config: TrainConfig) -> None:
    """Refuse an option of the data that the variant would not heed: the run would not be what was asked for."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    options = getattr(task, "options", {})
    for name in DATA_OPTIONS:
        value = getattr(config, name)
        if value == defaults[name] or config.variant in options.get(name, ()):
            continue
        users = ", ".join(options.get(name, ())) or "none of its variants"
        raise UsageError(
            f"{name}={value} has no effect on task {config.task}, variant {config.variant}: leave it out (of this "
            f"task it is for {users})."
        )


def parse_command_line(argv: Sequence[str], *, tables: Tables) -> TrainConfig:
    """Make the config from a command line, program name first; `--help` and `--print_config` print and exit with 0.

    Raises:
        UsageError: see `make_config` and `train.flags.parse_flags`.
        SystemExit: with code 0 after `--help` and `--print_config`.
    """
    config = make_config(parse_flags(TrainConfig, argv, tables=tables, usage=USAGE), tables=tables)
    if config.print_config:
        print(config_to_json(dataclasses.replace(config, print_config=False)))
        raise SystemExit(0)
    return config


def default_workdir(config: TrainConfig) -> str:
    """Return runs/TASK-BACKBONE-LOSS-seedSEED: the same command finds the same folder."""
    parts = (config.task, Path(config.backbone).name, config.loss, f"seed{config.seed}")
    return os.path.join("runs", "-".join(re.sub(r"[^A-Za-z0-9_.]+", "-", part) for part in parts))


def config_to_json(config: TrainConfig) -> str:
    """Return the config as JSON, one field a line."""
    return json.dumps(dataclasses.asdict(config), indent=2, allow_nan=False)


def config_from_json(text: str) -> TrainConfig:
    """Read back what `config_to_json` wrote; a field that an earlier version did not have yet takes its default.

    Raises:
        UsageError: not an object of the config's fields, or a value out of range.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is not a config: {error}.") from error
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    if not isinstance(values, dict) or "task" not in values or not values.keys() <= known:
        keys = set(values) if isinstance(values, dict) else set()
        missing = "" if "task" in keys else "it has no task; "
        raise UsageError(f"this is not a config: {missing}unknown fields {sorted(keys - known)}.")
    return TrainConfig(**values)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one line `name: old -> new` for every name whose value differs, by name; `(absent)` where it is missing.

    Example:
        >>> differences({"seed": 0, "steps": 5}, {"seed": 1, "steps": 5})
        ['seed: 0 -> 1']
    """
    absent = object()

    def shown(value: Any) -> str:
        return "(absent)" if value is absent else json.dumps(value, default=str)

    pairs = {name: (old.get(name, absent), new.get(name, absent)) for name in sorted({*old, *new})}
    return [f"{name}: {shown(before)} -> {shown(after)}" for name, (before, after) in pairs.items() if before != after]


def resume_differences(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Return the differences between a saved config and this one that a resumed run must not have.

    Mesh, platform, steps, folders and the rhythm of logs, evaluations and checkpoints may change; with
    `allow_data_change` so may the variant, the seed and the limit of the data.
    """
    free = {field.name for field in dataclasses.fields(TrainConfig) if field.metadata["resumable"]}
    if config.allow_data_change:
        free |= {"variant", "data_seed", "limit"}
    now = json.loads(config_to_json(config))
    # What an earlier version could not say, it did as the default does.
    defaults = json.loads(config_to_json(TrainConfig(task=config.task)))
    saved = {**{name: value for name, value in defaults.items() if name not in saved}, **saved}
    return differences(
        {name: value for name, value in saved.items() if name not in free},
        {name: value for name, value in now.items() if name not in free},
    )


def check_run_folder(config: TrainConfig) -> bool:
    """Return whether the run folder holds an earlier start of this run; writes nothing.

    Raises:
        UsageError: it holds a run of another config; the message lists what differs.
    """
    path = Path(config.workdir) / "config.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            raise ValueError(f"a {type(saved).__name__}, not an object")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (ValueError, OSError, RecursionError) as error:
        raise UsageError(f"{path} is not readable ({error}): choose another --workdir.") from error
    lines = resume_differences(saved, config)
    if lines:
        raise UsageError(
            f"{config.workdir} holds a run with another config, and a resumed run must keep it (saved -> now):\n  "
            + "\n  ".join(lines)
            + "\nGive the saved values, or another --workdir to start a new run."
        )
    return True


def save_config(config: TrainConfig) -> None:
    """Write `config.json` into the run folder, which is made where it is missing.

    Raises:
        StorageError: the folder or file cannot be written.
    """
    try:
        Path(config.workdir).mkdir(parents=True, exist_ok=True)
        replace_file(Path(config.workdir) / "config.json", config_to_json(config) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write the run folder: {error}. Choose another --workdir.") from error
