"""Low-rank adapters: a small trained correction beside each frozen matrix of the layers."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ADAPTERS = ("lora_a", "lora_b")


class LoraLinear(nnx.Module):
    """Add a product of two thin matrices to a linear layer: y = x W + b + scale (x A) B.

    The parameters of the linear layer keep their paths; `lora_a` [in, r] and `lora_b` [r, out] stand beside them.
    Stacked layers have an axis of layers in front of each. Products are in the dtype of the linear layer.

    Args:
        linear: the layer that is corrected.
        lora_a, lora_b: first values.
        scale: alpha / r.

    References:
        E. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, equation 3.
    """

    def __init__(self, linear: nnx.Linear, lora_a: Array, lora_b: Array, *, scale: float):
        self.kernel, self.bias, self.dtype, self.scale = linear.kernel, linear.bias, linear.dtype, scale
        self.lora_a, self.lora_b = nnx.Param(lora_a), nnx.Param(lora_b)

    def __call__(self, inputs: Float[Array, "*tokens inner"]) -> Float[Array, "*tokens outer"]:
        def narrow(parameter: nnx.Param) -> Array:
            return parameter[...].astype(self.dtype)

        inputs = inputs.astype(self.dtype)
        outputs = inputs @ narrow(self.kernel)
        if self.bias is not None:
            outputs = outputs + narrow(self.bias)
        correction = (inputs @ narrow(self.lora_a)) @ narrow(self.lora_b)
        return outputs + correction * jnp.asarray(self.scale, self.dtype)


def lora_scale(rank: int, alpha: float | None = None) -> float:
    """Return alpha / rank, the factor on the correction; alpha None means 2 * rank.

    Raises:
        ValueError: a rank that is not a whole number from 1 on, or an alpha that is not positive and finite.
    """
    if isinstance(rank, bool) or not isinstance(rank, Integral) or rank < 1:
        raise ValueError(f"the rank of the adapters is {rank!r}, wanted at least 1, a whole number")
    if alpha is not None and not (isinstance(alpha, Real) and 0 < alpha < math.inf):
        raise ValueError(f"the alpha of the adapters is {alpha!r}, wanted more than 0 and finite: at 0 they do nothing")
    return 2.0 if alpha is None else alpha / rank


def add_lora(
    model: nnx.Module,
    *,
    rank: int,
    alpha: float | None = None,
    targets: str | Sequence[str] = LORA_TARGETS,
    rngs: nnx.Rngs,
    param_dtype=jnp.float32,
) -> nnx.Module:
    """Put adapters beside matrices of every layer of a decoder, in place; its outputs stay the same at first.

    A is uniform in +-1/sqrt(in), B is 0. What an adapter starts from depends on its layer and its name alone, not on
    the other targets or on whether layers are stacked. Embedding and head have no adapters.

    Args:
        model: a Decoder without adapters.
        rank: r, the width between A and B.
        alpha: factor alpha / r on the correction; None: 2 * rank.
        targets: names of LORA_TARGETS, or one of them.
        rngs: draws A.
        param_dtype: of the adapters.

    Returns:
        The model itself.

    Raises:
        ValueError: no target, an unknown one (the known ones are listed), a rank below 1, adapters already there.

    Example:
        >>> from smmd_jax.backbones import PRESETS, Decoder
        >>> model = add_lora(Decoder(PRESETS["tiny"], rngs=nnx.Rngs(0)), rank=4, targets=["q_proj"], rngs=nnx.Rngs(1))
        >>> model.layers[0].self_attn.q_proj.lora_a.shape
        (128, 4)

    References:
        E. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, section 4.1.
    """
    scale = lora_scale(rank, alpha)
    targets = [targets] if isinstance(targets, str) else targets
    unknown = [name for name in targets if name not in LORA_TARGETS]
    if unknown or not targets:
        raise ValueError(
            f"adapters have no target named {', '.join(map(repr, unknown)) or '(none given)'}; known: "
            f"{', '.join(LORA_TARGETS)}"
        )
    key = rngs.params()

    def first(layer: int, name: str, inputs: int) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(key, layer), LORA_TARGETS.index(name))
        return jax.random.uniform(own, (inputs, rank), param_dtype, -(inputs**-0.5), inputs**-0.5)

    count = model.config.num_layers
    for index, layer in enumerate([model.layers] if model.scan_layers else model.layers):
        # A layer that reads images has no attention to itself.
        for block in (layer.self_attn if hasattr(layer, "self_attn") else layer.cross_attn, layer.mlp):
            for name in [name for name in dict.fromkeys(targets) if hasattr(block, name)]:
                linear = getattr(block, name)
                if isinstance(linear, LoraLinear):
                    raise ValueError(f"{name} has an adapter already: merge it, or start from a model without adapters")
                *stacked, inputs, outputs = linear.kernel.shape
                if stacked:
                    lora_a = jnp.stack([first(number, name, inputs) for number in range(count)])
                else:
                    lora_a = first(index, name, inputs)
                lora_b = jnp.zeros((*stacked, rank, outputs), param_dtype)
                setattr(block, name, LoraLinear(linear, lora_a, lora_b, scale=scale))
    return model


def add_tower_lora(
    model: nnx.Module, *, rank: int, alpha: float | None = None, rngs: nnx.Rngs, param_dtype=jnp.float32
) -> nnx.Module:
    """Put adapters beside every matrix of the layers of a vision tower, in place; outputs stay the same at first.

    What is in front of the layers and the projector behind them have no adapters.

    Args:
        model: a vision-language model; its decoder gets its own by `add_lora(model.language_model, ...)`.
        rank, alpha, rngs, param_dtype: as `add_lora`.

    Returns:
        The model itself.

    Raises:
        ValueError: as `add_lora`.
    """
    scale, key = lora_scale(rank, alpha), rngs.params()
    for number, layer in enumerate(model.tower.all_layers):
        for place, (owner, name) in enumerate(_linears(layer)):
            linear = getattr(owner, name)
            own = jax.random.fold_in(jax.random.fold_in(key, number), place)
            inputs, outputs = linear.kernel.shape
            lora_a = jax.random.uniform(own, (inputs, rank), param_dtype, -(inputs**-0.5), inputs**-0.5)
            lora_b = jnp.zeros((rank, outputs), param_dtype)
            setattr(owner, name, LoraLinear(linear, lora_a, lora_b, scale=scale))
    return model


def _linears(module: nnx.Module) -> list[tuple[nnx.Module, str]]:
    """The matrices within a module, as (owner, name), by name."""
    found = []
    for name, part in sorted(vars(module).items()):
        if isinstance(part, LoraLinear):
            raise ValueError(f"{name} has an adapter already: merge it, or start from a model without adapters")
        if isinstance(part, nnx.Linear):
            found.append((module, name))
        elif isinstance(part, nnx.Module):
            found += _linears(part)
    return found


def merge_lora(parameters: Mapping, scale: float) -> dict:
    """Return the parameters of the model without adapters that computes the same: W + scale A B.

    The sum is taken in float32 and rounded once, to the dtype of W. Stacked layers stay stacked.

    Args:
        parameters: nested dict of arrays, adapters and what they correct (see `join_parameters`).
        scale: `lora_scale` of the adapters.

    Raises:
        ValueError: no adapters, or one whose matrix or other half is missing.
    """
    merged, count = _merge(parameters, scale, "")
    if not count:
        raise ValueError("these parameters hold no adapters: nothing to merge")
    return merged


def _merge(tree: Mapping, scale: float, path: str) -> tuple[dict, int]:
    found = [name for name in (*_ADAPTERS, "kernel") if name in tree]
    if found in ([], ["kernel"]):
        merged, count = {}, 0
        for name, branch in tree.items():
            inner = _merge(branch, scale, f"{path}{name}/") if isinstance(branch, Mapping) else (branch, 0)
            merged[name], count = inner[0], count + inner[1]
        return merged, count
    if len(found) < 3:
        raise ValueError(f"{path.rstrip('/')} has only {', '.join(found)}: wanted lora_a, lora_b and the kernel")
    kernel, lora_a, lora_b = (jnp.asarray(tree[name]) for name in ("kernel", *_ADAPTERS))
    wide = (array.astype(jnp.float32) for array in (lora_a, lora_b))
    correction = jnp.matmul(*wide, precision=jax.lax.Precision.HIGHEST)
    rest = {name: leaf for name, leaf in tree.items() if name not in found}
    return {**rest, "kernel": (kernel.astype(jnp.float32) + scale * correction).astype(kernel.dtype)}, 1


def is_adapter(path: Sequence[str]) -> bool:
    """Say whether the parameter at a path belongs to an adapter."""
    return path[-1] in _ADAPTERS


def split_trainable(
    parameters: Mapping, is_trained: Callable[[tuple[Any, ...]], bool] | None = None
) -> tuple[dict, dict]:
    """Return (trainable, frozen): the adapters and the rest, or everything and {} where there are no adapters.

    Both are nested dicts with the paths of `parameters`; `join_parameters` puts them together again.

    Args:
        parameters: nested dict.
        is_trained: says it of the path of each parameter instead.

    Example:
        >>> split_trainable({"q_proj": {"kernel": 1, "lora_a": 2, "lora_b": 3}, "norm": {"weight": 4}})
        ({'q_proj': {'lora_a': 2, 'lora_b': 3}}, {'q_proj': {'kernel': 1}, 'norm': {'weight': 4}})
    """
    trainable, frozen = _split(parameters, is_adapter if is_trained is None else is_trained, ())
    return (frozen, {}) if is_trained is None and not trainable else (trainable, frozen)


def _split(tree: Mapping, is_trained: Callable[[tuple[Any, ...]], bool], path: tuple[Any, ...]) -> tuple[dict, dict]:
    trainable: dict[Any, Any] = {}
    frozen: dict[Any, Any] = {}
    for name, branch in tree.items():
        inner = (*path, name)
        if not isinstance(branch, Mapping):
            (trainable if is_trained(inner) else frozen)[name] = branch
            continue
        for side, part in zip((trainable, frozen), _split(branch, is_trained, inner), strict=True):
            if part:
                side[name] = part
    return trainable, frozen


def join_parameters(trainable: Mapping, frozen: Mapping) -> dict:
    """Put together what `split_trainable` took apart.

    Raises:
        ValueError: a parameter that stands in both.
    """
    joined = dict(frozen)
    for name, branch in trainable.items():
        if name not in joined:
            joined[name] = branch
        elif isinstance(branch, Mapping) and isinstance(joined[name], Mapping):
            joined[name] = join_parameters(branch, joined[name])
        else:
            raise ValueError(f"{name} is trainable and frozen: wanted each parameter once")
    return joined
