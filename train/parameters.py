"""The parameters of a run: which are trained and which stay frozen, what they start from, and where they live."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from smmd_jax.backbones import Decoder, add_lora, parameter_shardings, split_trainable
from smmd_jax.backbones.weights import load_parameters
from train.backbone import Backbone
from train.config import TrainConfig
from train.exits import CheckpointMismatchError
from train.partition import batch_sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """A model whose parameters are not made yet.

    Attributes:
      graphdef: the model without parameters.
      trainable_like, frozen_like: nested dicts of ShapeDtypeStruct with shardings; nothing is frozen without adapters.
      make_trainable, make_frozen: () -> the arrays, born sharded: read from the backbone's folder, or drawn with the
        run's seed where it has none. Adapters are always drawn.
      fingerprint: of what the frozen ones come from; checkpoints hold the trained ones only. None: nothing is frozen.
    """

    graphdef: nnx.GraphDef
    trainable_like: dict
    frozen_like: dict
    make_trainable: Callable[[], dict]
    make_frozen: Callable[[], dict]
    fingerprint: str | None


def make_parameters(config: TrainConfig, backbone: Backbone, mesh: Mesh) -> Parameters:
    """Describe the parameters of a run; no array is made.

    Raises:
      ValueError: adapters for matrices that there are not.
    """

    def make_model() -> nnx.Module:
        rngs = nnx.Rngs(config.seed)
        model = Decoder(
            backbone.config,
            rngs=rngs,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.stored_dtype),
            scan_layers=config.scan_layers,
            remat=config.remat,
            rows=batch_sharding(mesh) if mesh.size > 1 else None,
        )
        if config.lora_rank:
            targets = [name.strip() for name in config.lora_targets.split(",") if name.strip()]
            add_lora(model, rank=config.lora_rank, alpha=config.lora_alpha, targets=targets, rngs=rngs)
        return model

    graphdef, abstract = nnx.split(nnx.eval_shape(make_model))
    shapes = nnx.to_pure_dict(abstract)
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        parameter_shardings(shapes, mesh),
    )
    trainable_like, frozen_like = split_trainable(like)

    def draw(part: int) -> dict:
        function = lambda: split_trainable(nnx.to_pure_dict(nnx.state(make_model())))[part]
        return jax.jit(function, out_shardings=shardings_of((trainable_like, frozen_like)[part]))()

    def read(wanted: dict) -> dict:
        return load_parameters(backbone.folder, wanted, shardings=shardings_of(wanted))

    def make_trainable() -> dict:
        return draw(0) if config.lora_rank or backbone.folder is None else read(trainable_like)

    def make_frozen() -> dict:
        if not config.lora_rank:
            return {}
        return draw(1) if backbone.folder is None else read(frozen_like)

    return Parameters(
        graphdef=graphdef,
        trainable_like=trainable_like,
        frozen_like=frozen_like,
        make_trainable=make_trainable,
        make_frozen=make_frozen,
        fingerprint=_fingerprint(config, backbone) if config.lora_rank else None,
    )


def shardings_of(like: Any) -> Any:
    """Return the shardings of a tree of ShapeDtypeStruct."""
    return jax.tree.map(lambda leaf: leaf.sharding, like)


def check_frozen(saved: str | None, current: str | None, name: str) -> None:
    """Refuse to go on with adapters of a checkpoint beside other frozen parameters than they were trained with.

    Args:
      saved, current: fingerprints.
      name: the backbone's, for the message.

    Raises:
      CheckpointMismatchError: they differ.
    """
    if saved != current:
        raise CheckpointMismatchError(
            f"the adapters of this run were trained beside other frozen parameters than backbone={name} has today: its "
            "config or its files have changed. Bring back the former ones, or choose another --workdir for a new run."
        )


def _fingerprint(config: TrainConfig, backbone: Backbone) -> str:
    """SHA-256 of the config and of samples of the weights, or of the seed that the parameters come from."""
    if backbone.folder is None:
        source: Any = config.seed
    else:
        source = sorted((path.name, _sample(path)) for path in backbone.folder.glob("*.safetensors"))
    text = json.dumps([_changed(backbone.config), config.stored_dtype, source], default=_changed, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _changed(config: Any) -> dict[str, Any]:
    """The fields that differ from their defaults: a field that is new tomorrow leaves today's runs alone."""
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }


def _sample(path: Path) -> str:
    """SHA-256 of a file's size and of 64 blocks of 64 KiB, evenly over it: other weights differ there too.

    All of a small file; 4 MiB of a large one, because hashing 16 GB would take longer than loading them.
    """
    size, count, length = path.stat().st_size, 64, 2**16
    found = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for block in range(count):
            file.seek(max(size - length, 0) * block // (count - 1))
            found.update(file.read(length))
    return found.hexdigest()
