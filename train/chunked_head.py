"""Head and losses a chunk of rows at a time, on every device its own rows: never the logits of all positions."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from smmd_jax import LOSSES, LossSpec
from smmd_jax.losses.chunked import chunked_loss_and_gradients

# Float32 logits of one micro-batch on one device, above which they are not made at once: 256 MiB.
LARGEST_DENSE_BYTES = 2**28
_ROW_AXES = ("data", "fsdp")


def choose_logits(asked: str, spec: LossSpec, *, rows: int, length: int, width: int, mesh: Mesh | None = None) -> str:
    """Say how the logits of a run are made: "dense", all positions at once, or "chunked".

    Without a wish they are chunked where those of one micro-batch on one device would take more than 256 MiB. A loss of
    one's own that reads the whole vocabulary stays dense unless asked: in chunks it sees positions one by one.

    Args:
      asked: "dense", "chunked", or "" for the rule.
      spec: the loss's row.
      rows: of a micro-batch, over all devices.
      length: positions T of a row.
      width: of the head, V.
      mesh: that rows (data, fsdp) and vocabulary (tensor) lie on.

    Raises:
      ValueError: chunks of a loss that reads whole sequences of the whole vocabulary.

    Example:
      >>> choose_logits("", LOSSES["smmd"], rows=8, length=256, width=32)
      'dense'
      >>> choose_logits("", LOSSES["smmd"], rows=8, length=1024, width=151_936)
      'chunked'
    """
    needs_dense = spec.needs == "sequence" and spec.columns is None
    if asked == "chunked" and needs_dense:
        raise ValueError(
            "logits=chunked: this loss reads whole sequences over the whole vocabulary and cannot be cut into chunks; "
            "leave --logits at dense, or give its LossSpec `columns`."
        )
    if asked or needs_dense or (spec.columns is None and spec not in LOSSES.values()):
        return asked or "dense"
    sizes = dict(mesh.shape) if mesh is not None else {}
    share = sizes.get("tensor", 1)
    width = width // share if width % share == 0 else width
    rows = -(-rows // (sizes.get("data", 1) * sizes.get("fsdp", 1)))
    return "chunked" if 4 * rows * length * width > LARGEST_DENSE_BYTES else "dense"


def chunked_losses(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    kernel: Any,
    *,
    spec: LossSpec | None,
    ce_weights: Float[Array, "B T"],
    numeric_weights: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], Float[Array, "B T"], Float[Array, "B T"]]:
    """Compute a weighted total of losses whose gradient is made on the way forward, and the losses at each position.

        total = sum_i ce_weights_i ce_i + numeric_weights_i numeric_i

    The weights must be known, which they are: counts come first. On several devices each scans the chunks of its own
    rows; the gradient of the head adds up in float32 over all of them and is reduced over the devices once, after the
    scan. A head that is not trained gets no gradient.

    Args:
      hidden: [B, T, D], rows over the mesh's data and fsdp.
      head: [D, V] in the dtype it is stored in; products are in that of `hidden`, its gradient is not rounded to it.
      targets, mask: [B, T]; where the mask is false the weights are 0.
      kernel: a NumericKernel or NumericVocab.
      spec: a loss of positions; None: cross entropy alone.
      ce_weights, numeric_weights: [B, T] float32.
      mesh: None: one device.

    Returns:
      (total, ce, numeric), float32; only the total has a gradient.
    """
    sizes = dict(mesh.shape) if mesh is not None else {}
    axes = tuple(axis for axis in _ROW_AXES if sizes.get(axis, 1) > 1)
    # With a tensor axis left to it, XLA would gather the gradient over that axis before it scatters it over this one.
    scattered = "fsdp" in axes and sizes.get("tensor", 1) == 1 and hidden.shape[-1] % sizes["fsdp"] == 0

    def run(gradients: str, hidden: Array, head: Array) -> tuple:
        def of_shard(hidden, head, targets, kernel, ce_weights, numeric_weights, mask):
            losses, found = chunked_loss_and_gradients(
                hidden,
                head,
                targets,
                kernel,
                loss=spec,
                ce_weights=ce_weights,
                numeric_weights=numeric_weights,
                mask=mask,
                gradients=gradients,
            )
            if not axes:
                return losses, found
            losses = (lax.psum(losses[0], axes), *losses[1:])
            if gradients == "both":
                by_hidden, by_head = found
                if scattered:
                    by_head = lax.psum_scatter(by_head, "fsdp", scatter_dimension=0, tiled=True)
                others = tuple(axis for axis in axes if not (scattered and axis == "fsdp"))
                found = by_hidden, (lax.psum(by_head, others) if others else by_head)
            return losses, found

        operands = (hidden, head.astype(hidden.dtype), targets, kernel, ce_weights, numeric_weights, mask)
        if not axes:
            return of_shard(*operands)
        rows, whole = PartitionSpec(axes), PartitionSpec()
        by_head = {"both": PartitionSpec("fsdp") if scattered else whole, "hidden": None, "none": None}[gradients]
        gradient_specs = None if gradients == "none" else (rows, by_head)
        # The tensor axis stays with the compiler, which splits the vocabulary as the head's sharding says.
        return jax.shard_map(
            of_shard,
            mesh=mesh,
            axis_names=set(axes),
            in_specs=(rows, whole, rows, whole, rows, rows, rows),
            out_specs=((whole, rows, rows), gradient_specs),
        )(*operands)

    @jax.custom_vjp
    def losses(hidden, head):
        return run("none", hidden, head)[0]

    def forward(hidden, head):
        found, gradients = run("both" if head.perturbed else "hidden", hidden.value, head.value)
        return found, (gradients, jnp.zeros((), head.value.dtype))

    def backward(residuals, cotangents):
        (by_hidden, by_head), like = residuals
        of_total = cotangents[0]
        by_hidden = (of_total * by_hidden).astype(by_hidden.dtype)
        return by_hidden, None if by_head is None else (of_total * by_head).astype(like.dtype)

    losses.defvjp(forward, backward, symbolic_zeros=True)
    return losses(hidden, head)
