"""A run's checkpoint as a Hugging Face folder, merged or as adapters, and the proof that it computes the same."""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from smmd_jax.backbones import (
    DecoderConfig,
    VisionLanguageConfig,
    join_parameters,
    load_pretrained,
    merge_lora,
    split_trainable,
)
from smmd_jax.backbones.adapter_files import load_adapter, save_adapter
from smmd_jax.backbones.safetensors_files import open_folder
from smmd_jax.backbones.tensor_names import find_prefix
from smmd_jax.backbones.weights import save_parameters
from train.backbone import Backbone, make_backbone, with_dropout
from train.exits import ExportError, StorageError, UsageError
from train.hub import is_hub_name
from train.parameters import make_untrained
from train.prompts import make_prompt_batches
from train.splits import open_split
from train.tasks import TASKS
from train.tokenizer import Tokenizer
from train.trained import Trained, read_run_config, restore_trained

# Largest difference of a logit that --verify lets pass, by the dtype written. In float32 only the order of sums
# differs; rounding SmolLM2-135M to float16 or bfloat16 moves a logit by at most 0.03 or 0.16.
TOLERANCES = {"float32": 1e-3, "float16": 1e-1, "bfloat16": 5e-1}
_VERIFIED_PROMPTS = 8
_TOKENIZER_FILES = ("tokenizer*", "tekken.json", "chat_template*", "special_tokens_map.json", "added_tokens.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """How close two models are on the same prompts; logits and KL divergence (in nats) over every position."""

    positions: int
    largest_difference: float
    mean_kl: float
    argmax_agreement: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.largest_difference <= self.tolerance  # NaN does not

    def __str__(self) -> str:
        return (
            f"max |dlogit| {self.largest_difference:.2e} (tolerance {self.tolerance:.0e}), mean KL {self.mean_kl:.2e}, "
            f"arg-max agreement {self.argmax_agreement:.2%} over {self.positions:,} positions"
        )


def export(
    workdir: str | Path, out: str | Path, *, step: int | None = None, adapter: bool = False, verify: bool = False
) -> tuple[Trained, Agreement | None]:
    """Write a run's checkpoint as a folder that transformers loads, in one rename.

    A run that began from a folder keeps that folder's names, dtypes, shards, config, tokenizer and chat template;
    adapters are merged in float32. One that began at random is written as a llama-type folder with its own tokenizer.

    Args:
      workdir: of the run.
      out: is made; must be empty where it exists.
      step: of the checkpoint; None: the newest.
      adapter: write the adapters alone, in the format of PEFT.
      verify: load what was written and compare its logits with the run's own before it takes its name.

    Raises:
      UsageError: no run, no checkpoint, a folder that is not empty, or adapters of a run without them.
      ExportError: what was written does not compute what the run does.
      StorageError: the folder cannot be written.
    """
    out = Path(out)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"out={out} is not an empty folder: nothing is overwritten, choose another.")
        if (Path(workdir) / "checkpoints").resolve() in (out.resolve(), *out.resolve().parents):
            raise UsageError(f"out={out} is among the checkpoints of the run, where only steps lie: choose another.")
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"out={str(out)[:200]} cannot be a folder: {error.args[-1]}.") from error
    config = read_run_config(Path(workdir))
    if adapter and not config.lora_rank:
        raise UsageError(f"{workdir} trained all parameters (lora_rank=0): there is no adapter, export it without.")
    if config.task not in TASKS:
        raise UsageError(f"{workdir} trained on task={config.task}, which is not known here: {', '.join(TASKS)}.")
    backbone = make_backbone(config)
    if adapter and backbone.images is not None and config.trained_vision == "train":
        raise UsageError(f"{workdir} trained its vision tower whole (vision=train): export it without --adapter.")
    if adapter and backbone.folder is None:
        raise UsageError(f"the adapters belong to backbone={config.backbone}, which is no folder: export them merged.")
    trained = restore_trained(Path(workdir), config, backbone, step, widen=True)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise StorageError(f"{out} cannot be made: {error}.") from error
    try:
        (_write_adapter if adapter else _write_merged)(trained, partial / "model")
        agreement = _verify(trained, partial / "model", adapter=adapter) if verify else None
        if agreement is not None and not agreement.holds:
            raise ExportError(f"{out} was not written: the exported model differs from the run's: {agreement}.")
        if out.exists():
            out.rmdir()
        (partial / "model").rename(out)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return trained, agreement


def compare_logits(left: nnx.Module, right: nnx.Module, trained: Trained, *, tolerance: float) -> Agreement:
    """Compare two models on the first prompts of the evaluation split of the run's task.

    Args:
      tolerance: for `Agreement.holds`.
    """
    task, config = TASKS[trained.config.task], trained.config
    source = open_split(config, config.eval_split or task.eval_split)
    batches = make_prompt_batches(
        source,
        trained.backbone.tokenizer,
        batch_size=_VERIFIED_PROMPTS,
        examples=min(_VERIFIED_PROMPTS, len(source)),
        images=trained.backbone.images,
    )
    run = nnx.jit(lambda model, ids, mask, vision: model(ids, attention_mask=mask, **vision))
    largest, divergence, agreed, positions = 0.0, 0.0, 0, 0
    for batch in batches:
        rows = batch.attention_mask & (np.arange(len(batch.attention_mask)) < len(batch.examples))[:, None]
        vision = batch.vision()
        logits = [
            np.asarray(run(model, batch.input_ids, batch.attention_mask, vision), np.float64)[rows]
            for model in (left, right)
        ]
        largest = float(np.maximum(largest, np.abs(logits[0] - logits[1]).max()))  # unlike max() it keeps NaN
        logs = [values - _log_sum_exp(values) for values in logits]
        divergence += float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())
        agreed += int((logits[0].argmax(-1) == logits[1].argmax(-1)).sum())
        positions += int(rows.sum())
    return Agreement(
        positions=positions,
        largest_difference=largest,
        mean_kl=divergence / positions,
        argmax_agreement=agreed / positions,
        tolerance=tolerance,
    )


def _log_sum_exp(values: np.ndarray) -> np.ndarray:
    highest = values.max(axis=-1, keepdims=True)
    return np.log(np.exp(values - highest).sum(axis=-1, keepdims=True)) + highest


def _write_merged(trained: Trained, folder: Path) -> None:
    parameters = trained.parameters if trained.scale is None else merge_lora(trained.parameters, trained.scale)
    backbone = trained.backbone
    save_parameters(
        parameters, _plain(backbone), folder, source=backbone.folder, fields=_special_ids(backbone.tokenizer)
    )
    if backbone.folder is None:
        backbone.tokenizer.save(folder)
    if backbone.preprocessor is not None and (backbone.folder is None or trained.config.image_size is not None):
        # Images must be scaled as they were when the model was trained.
        text = json.dumps(backbone.preprocessor, indent=2, ensure_ascii=False)
        (folder / "preprocessor_config.json").write_text(text + "\n", encoding="utf-8")


def _write_adapter(trained: Trained, folder: Path) -> None:
    folder.mkdir()
    backbone = trained.backbone
    save_adapter(
        split_trainable(trained.parameters)[0],
        folder,
        num_layers=backbone.config.num_layers,
        scale=trained.scale,
        base=backbone.name if is_hub_name(backbone.name) else str(backbone.folder.resolve()),
        **_prefixes(backbone),
    )
    for pattern in _TOKENIZER_FILES:
        for path in backbone.folder.glob(pattern):
            shutil.copyfile(path, folder / path.name)


def _prefixes(backbone: Backbone) -> dict[str, str]:
    """What stands in front of the names of tensors; PEFT takes those that a vision-language model has in memory."""
    if isinstance(backbone.config, VisionLanguageConfig):
        return {"prefix": "model.language_model.", "outer": "model."}
    return {"prefix": find_prefix(open_folder(backbone.folder).tensors)}


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """What the config.json of a vision-language model without a source says of its tokenizer."""
    names = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {field: tokenizer.special_ids[name] for field, name in names.items() if name in tokenizer.special_ids}


def _plain(backbone: Backbone) -> DecoderConfig | VisionLanguageConfig:
    """The model's config without the dropout of training, which no config.json of these families has."""
    return with_dropout(backbone.config, 0.0)


def _verify(trained: Trained, folder: Path, *, adapter: bool) -> Agreement:
    """Compare with the run's own parameters, unmerged; products are in float32 on both sides."""
    ours = _model(trained, trained.parameters)
    if adapter:
        adapters, frozen = split_trainable(trained.parameters)
        read, scale = load_adapter(
            folder, adapters, num_layers=trained.backbone.config.num_layers, **_prefixes(trained.backbone)
        )
        theirs = _model(dataclasses.replace(trained, scale=scale), join_parameters(read, frozen))
        written = "float32"
    else:
        theirs = load_pretrained(folder)
        kinds = {tensor.dtype.name for tensor in open_folder(folder).tensors.values()}
        written = max(kinds, key=lambda name: TOLERANCES.get(name, 0.0))
    return compare_logits(ours, theirs, trained, tolerance=TOLERANCES.get(written, TOLERANCES["float32"]))


def _model(trained: Trained, parameters: Mapping[str, Any]) -> nnx.Module:
    config = dataclasses.replace(trained.config, dtype="float32")
    if trained.scale is not None:
        config = dataclasses.replace(config, lora_alpha=trained.scale * config.lora_rank)
    model = nnx.eval_shape(lambda: make_untrained(config, _plain(trained.backbone)))
    return nnx.merge(nnx.split(model)[0], parameters)
