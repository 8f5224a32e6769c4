"""The parameters of a run: which are trained and which stay frozen, what they start from, and where they live."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from smmd_jax.backbones import (
    BACKBONES,
    SHARDING_RULES,
    DecoderConfig,
    VisionLanguageConfig,
    add_lora,
    add_tower_lora,
    is_adapter,
    join_parameters,
    parameter_shardings,
    split_trainable,
)
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
      trainable_like, frozen_like: nested dicts of ShapeDtypeStruct with shardings; nothing is frozen without adapters
        and with --vision=train.
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
    rows = batch_sharding(mesh) if mesh.size > 1 else None
    make_model = functools.partial(make_untrained, config, backbone.config, rows=rows)
    is_trained = _rule(config, backbone.config)
    graphdef, abstract = nnx.split(nnx.eval_shape(make_model))
    shapes = nnx.to_pure_dict(abstract)
    shardings = parameter_shardings(shapes, mesh, rules=SHARDING_RULES[backbone.config.model_type])

    def like_of(path, leaf, sharding):
        path = tuple(key.key for key in path)
        # A tower that is trained whole beside frozen text: an update of a parameter in bfloat16 would be lost.
        is_wide = config.lora_rank and not config.param_dtype and is_trained(path)
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if is_wide else leaf.dtype, sharding=sharding)

    like = jax.tree_util.tree_map_with_path(like_of, shapes, shardings)
    trainable_like, frozen_like = split_trainable(like, is_trained)

    def draw(wanted: dict) -> dict:
        def function() -> dict:
            drawn = _chosen(nnx.to_pure_dict(nnx.state(make_model())), wanted)
            return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), drawn, wanted)

        return jax.jit(function, out_shardings=shardings_of(wanted))() if wanted else {}

    def make(wanted: dict, others: dict) -> dict:
        if backbone.folder is None:
            return draw(wanted)
        adapters, stored = split_trainable(wanted, is_adapter)
        beside = split_trainable(others, is_adapter)[1]
        read = load_parameters(backbone.folder, stored, shardings=shardings_of(stored), beside=beside) if stored else {}
        return join_parameters(draw(adapters), read)

    return Parameters(
        graphdef=graphdef,
        trainable_like=trainable_like,
        frozen_like=frozen_like,
        make_trainable=lambda: make(trainable_like, frozen_like),
        make_frozen=lambda: make(frozen_like, trainable_like),
        fingerprint=_fingerprint(config, backbone) if frozen_like else None,
    )


def make_untrained(
    config: TrainConfig, model: DecoderConfig | VisionLanguageConfig, *, rows: NamedSharding | None = None
) -> nnx.Module:
    """Make the model of a config, its adapters included, with the parameters that the run's seed gives.

    Args:
      rows: where the rows of a batch lie, see `Decoder`.

    Raises:
      ValueError: adapters for matrices that there are not.
    """
    rngs = nnx.Rngs(config.seed)
    made = BACKBONES[model.model_type](
        model,
        rngs=rngs,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.stored_dtype),
        scan_layers=config.scan_layers,
        remat=config.remat,
        rows=rows,
    )
    if config.lora_rank:
        targets = [name.strip() for name in config.lora_targets.split(",") if name.strip()]
        options = dict(rank=config.lora_rank, alpha=config.lora_alpha, rngs=rngs)
        add_lora(getattr(made, "language_model", made), targets=targets, **options)
        if isinstance(model, VisionLanguageConfig) and config.trained_vision == "lora":
            add_tower_lora(made, **options)
    return made


def _rule(config: TrainConfig, model: DecoderConfig | VisionLanguageConfig) -> Callable[[tuple[str, ...]], bool]:
    """Which parameters are trained, by their path."""

    def is_trained(path: tuple[str, ...]) -> bool:
        if isinstance(model, VisionLanguageConfig) and path[0] != "language_model" and config.trained_vision != "lora":
            return config.trained_vision == "train"
        return not config.lora_rank or is_adapter(path)

    return is_trained


def _chosen(tree: dict, wanted: dict) -> dict:
    """The branches of a nested dict that another one has."""
    return {
        name: _chosen(tree[name], branch) if isinstance(branch, dict) else tree[name] for name, branch in wanted.items()
    }


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
