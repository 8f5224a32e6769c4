"""The model of a run's checkpoint: found by its run folder, restored as it was trained."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from smmd_jax.backbones import join_parameters, lora_scale
from train.backbone import Backbone
from train.checkpoint import Checkpoints
from train.config import TrainConfig, config_from_json, parse_mesh
from train.exits import UsageError
from train.parameters import check_frozen, make_parameters
from train.partition import make_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """The model of a run's checkpoint.

    Attributes:
      step: of the checkpoint.
      parameters: trained and frozen ones, adapters apart from what they correct.
      scale: of the adapters; None: all parameters were trained.
      graphdef: the model without parameters, as it was trained.
    """

    config: TrainConfig
    backbone: Backbone
    step: int
    parameters: dict
    scale: float | None
    graphdef: nnx.GraphDef

    def model(self) -> nnx.Module:
        """Make the model that the run itself evaluates at this step."""
        return nnx.merge(self.graphdef, self.parameters)


def read_run_config(workdir: Path) -> TrainConfig:
    """Read the config of a run folder.

    Raises:
      UsageError: it is not the folder of a run.
    """
    path = workdir / "config.json"
    try:
        return config_from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"workdir={workdir} is not the folder of a run: {path} cannot be read ({error}).") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not the config of a run: {error}.") from error


def restore_trained(
    workdir: Path, config: TrainConfig, backbone: Backbone, step: int | None, *, widen: bool = False
) -> Trained:
    """Restore the parameters of a run's checkpoint; nothing of the run folder changes.

    Args:
      workdir: of the run.
      config: the run's, from `read_run_config`.
      backbone: what its `backbone` names.
      step: of the checkpoint; None: the newest that its manifest proves sound.
      widen: give frozen parameters in float32, as adapters must be merged: a sum in their narrow dtype would lose most
        of what was trained.

    Raises:
      UsageError: no such checkpoint.
      CheckpointCorruptError, CheckpointMismatchError: none that can be used, or adapters of other frozen parameters.
    """
    sizes = parse_mesh(config.mesh)
    # The run's mesh where this machine has one; the values do not depend on it.
    mesh = make_mesh(sizes if math.prod(sizes.values()) <= jax.device_count() else {})
    parameters = make_parameters(config, backbone, mesh)
    folder = workdir / "checkpoints"
    if step is not None and not (folder / str(step)).exists():
        raise UsageError(f"{folder} does not hold step {step}: name another --step, or none for the newest.")
    with Checkpoints(folder, writer=False) as checkpoints:
        restored = checkpoints.restore({"parameters": parameters.trainable_like}, step=step, partial=True)
    if restored is None:
        asked = "a checkpoint" if step is None else f"step {step}"
        raise UsageError(f"{folder} does not hold {asked}: train first, or name another --step or --workdir.")
    check_frozen(restored.data.get("frozen"), parameters.fingerprint, config.backbone)
    frozen = parameters.make_frozen()
    if widen:
        frozen = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), frozen)
    return Trained(
        config=config,
        backbone=backbone,
        step=restored.step,
        parameters=join_parameters(restored.state["parameters"], frozen),
        scale=lora_scale(config.lora_rank, config.lora_alpha) if config.lora_rank else None,
        graphdef=parameters.graphdef,
    )
