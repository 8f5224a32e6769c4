"""The flags of a plan: the step that is planned, the slice, and the defaults that depend on both."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from smmd_jax.backbones import PRESETS, DecoderConfig, VisionLanguageConfig
from smmd_jax.backbones.hf_config import read_config
from smmd_jax.backbones.ports import model_config
from smmd_jax.errors import CheckpointError
from train.config import TrainConfig
from train.exits import UsageError
from train.flags import check_values, flag_field
from train.topologies import find_topology

DIGITS = 10
# Rows of the head -> tokens that are numbers: the tokenizer of Llama 3 and SmolLM3 has 0 to 999, others the digits.
_NUMERIC_TOKENS = {128256: 1000}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The step that is planned, and the slice; every field is a flag, those of `train.main` mean the same."""

    backbone: str = flag_field(
        "Model whose shapes are planned; no weights are needed",
        other_form=(r".*[/\\].*", "a folder with a config.json"),
    )
    topology: str = flag_field("Slice of TPUs as KIND:SHAPE, e.g. v5e:1x1, v5e:2x4, v6e:2x4, v5p:2x2x1", "v5e:2x4")
    batch_size: int = flag_field("Rows of one optimizer step, over all chips; 0: eight a chip", 0, at_least=0)
    find_batch: bool = flag_field("Look for the largest batch that fits, instead of --batch_size", False)
    max_length: int = flag_field("Tokens in a packed row", 1024, at_least=2)
    mesh: str = flag_field("Chips along each axis, as data:1,fsdp:4,tensor:2; empty: all along fsdp", "")
    grad_accum: int = flag_field("Micro-batches that one optimizer step is computed in", 1, at_least=1)
    optimizer: str = flag_field("Rule that turns gradients into updates", "adamw")
    loss: str = flag_field("Numeric loss that joins the cross-entropy", "smmd")
    logits: Literal["", "dense", "chunked"] = flag_field(
        "Logits of all positions at once, or of a chunk at a time; empty: as train.main chooses", ""
    )
    numeric_tokens: int = flag_field("Tokens that are numbers; 0: as many as the family's tokenizer has", 0, at_least=0)
    lora_rank: int = flag_field("Rank of trained adapters beside frozen parameters; 0: all are trained", 0, at_least=0)
    lora_targets: str = flag_field("Matrices with adapters, commas between", TrainConfig.lora_targets)
    dtype: Literal["float32", "bfloat16"] = flag_field("Dtype of matrix products", "bfloat16")
    param_dtype: Literal["", "float32", "bfloat16"] = flag_field(
        "Dtype of stored parameters; empty: float32, and bfloat16 for those that --lora_rank freezes", ""
    )
    remat: Literal["none", "full", "dots"] = flag_field("What a layer computes again in the backward pass", "full")
    scan_layers: bool = flag_field("Run the layers in one loop; no, by default, where layers are of two kinds", True)
    json: str = flag_field("File that the plan is also written to; empty: none", "")
    debug: bool = flag_field("Show the trace of an error", False)

    def __post_init__(self) -> None:
        check_values(self)


def find_model(name: str) -> DecoderConfig | VisionLanguageConfig:
    """Return the config of a preset, or of a folder's config.json.

    Raises:
      UsageError: the folder has no readable config of a known family.
    """
    if name in PRESETS:
        return PRESETS[name]
    try:
        return model_config(read_config(Path(name).expanduser()))
    except (CheckpointError, OSError) as error:
        raise UsageError(
            f"backbone={name}: {error}. Give one of {', '.join(PRESETS)}, or a folder with a config.json."
        ) from error


def complete(given: Mapping[str, Any]) -> PlanConfig:
    """Make the config of a plan, with the defaults that depend on the backbone and the slice.

    Raises:
      UsageError: no backbone, a slice that cannot be read, sizes that do not divide.
    """
    if "backbone" not in given:
        raise UsageError(f"--backbone is required. Known: {', '.join(PRESETS)}, or a folder with a config.json.")
    config = PlanConfig(**given)
    if config.find_batch and config.batch_size:
        raise UsageError(
            f"--find_batch looks for the batch, and batch_size={config.batch_size} gives it: leave one out."
        )
    topology, model = find_topology(config.topology), find_model(config.backbone)
    mesh = config.mesh or f"fsdp:{topology.chips}"
    layers_differ = bool(getattr(model, "text", model).cross_layers)
    return dataclasses.replace(
        config,
        mesh=mesh,
        batch_size=config.batch_size or 8 * topology.chips * config.grad_accum,
        numeric_tokens=config.numeric_tokens or _NUMERIC_TOKENS.get(model.vocab_size, DIGITS),
        scan_layers=given.get("scan_layers", not layers_differ),
    )
