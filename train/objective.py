"""What is minimised: cross entropy and a numeric loss, as sums whose coefficients are known before the backward."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from smmd_jax import LOSSES, LossSpec, cross_entropy_loss, numeric_mask
from smmd_jax.losses.compacted import is_worth_compacting, losses_at_numbers
from smmd_jax.operands import live_rows, match_targets
from train.chunked_head import choose_logits, chunked_losses
from train.data import Batch
from train.own_loss import at_numbers, find_own_loss


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the positions of a batch or of a part of it; parts add.

    Attributes:
      ce: cross entropy over supervised positions.
      ce_at_numbers: cross entropy over numeric positions.
      numeric: the numeric loss over numeric positions, or over samples where it reads whole sequences.
    """

    ce: Float[Array, ""]
    ce_at_numbers: Float[Array, ""]
    numeric: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """How many positions and samples the whole batch has; they depend on the targets alone, so they come first."""

    supervised: Int[Array, ""]
    numeric: Int[Array, ""]
    samples: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """The total of one optimizer step, a linear function of `Sums`; static under jit.

        add:          CE + weight * L              CE = ce / supervised,   L = numeric / denominator
        scale_to_ce:  CE + weight * stop_gradient(CE / L) * L
        replace_ce:   (ce - ce_at_numbers + weight * numeric) / supervised

    Attributes:
      spec: the loss's row.
      weight: the paper's lambda.
      normalize_by: "numeric": L is the mean over numeric positions (samples, for a loss of sequences); "tokens": over
        supervised positions.
      logits: "dense": of all positions at once; "chunked": see `train.chunked_head`.
      mesh: that the rows of a batch lie on; read where the logits are chunked.
      is_plain: cross entropy alone; the numeric loss is not computed.
    """

    spec: LossSpec
    weight: float
    normalize_by: str = "numeric"
    logits: str = "dense"
    mesh: Mesh | None = None

    @property
    def is_plain(self) -> bool:
        return self.spec is LOSSES["ce"]

    @property
    def needs_values(self) -> bool:
        """Whether the coefficients depend on the sums of the whole batch, not on its counts alone."""
        return self.spec.join == "scale_to_ce"

    def placed(self, logits: str, *, rows: int, length: int, width: int, mesh: Mesh) -> "Objective":
        """Give the objective of a mesh, its logits made as asked or by the rule; see `choose_logits`."""
        logits = choose_logits(logits, self.spec, rows=rows, length=length, width=width, mesh=mesh)
        return dataclasses.replace(self, logits=logits, mesh=mesh)

    def counts(self, batch: Batch, kernel: Any) -> Counts:
        """Count over the whole batch, before it is cut into micro-batches."""
        numeric = numeric_mask(batch.targets, kernel, mask=batch.target_mask)
        starts = _sample_starts(batch)
        return Counts(*(jnp.sum(mask, dtype=jnp.int32) for mask in (batch.target_mask, numeric, starts)))

    def total(
        self, model: Any, hidden: Float[Array, "B T D"], batch: Batch, kernel: Any, coefficients: Sums
    ) -> tuple[Float[Array, ""], Sums]:
        """Give sum_i coefficients_i sums_i of a batch or micro-batch, differentiable, and the sums themselves."""
        if self.logits == "chunked":
            return self._chunked(model, hidden, batch, kernel, coefficients)
        sums = self.sums(model, hidden, batch, kernel)
        return _dot(coefficients, sums), sums

    def sums(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch, kernel: Any) -> Sums:
        """Sum the losses of a batch or micro-batch, given its hidden states."""
        if self.logits == "chunked":
            zero = jnp.zeros(())
            return self._chunked(model, hidden, batch, kernel, Sums(ce=zero, ce_at_numbers=zero, numeric=zero))[1]
        logits = model.logits(hidden)
        ce = cross_entropy_loss(logits, batch.targets, mask=batch.target_mask)
        numeric = numeric_mask(batch.targets, kernel, mask=batch.target_mask)
        ce_at_numbers = jnp.sum(jnp.where(numeric, ce, 0.0))
        value = jnp.zeros(())
        if not self.is_plain:
            value = jnp.sum(self._numeric_losses(model, hidden, logits, batch, kernel))
        return Sums(ce=jnp.sum(ce), ce_at_numbers=ce_at_numbers, numeric=value)

    def _chunked(self, model, hidden, batch, kernel, coefficients):
        is_number = numeric_mask(batch.targets, kernel, mask=batch.target_mask)
        by_position = self.spec.needs == "position" and not self.is_plain
        total, ce, numeric = chunked_losses(
            hidden,
            model.stored_head,
            batch.targets,
            kernel,
            spec=self.spec if by_position else None,
            ce_weights=coefficients.ce * batch.target_mask + coefficients.ce_at_numbers * is_number,
            numeric_weights=coefficients.numeric * batch.target_mask,
            mask=batch.target_mask,
            mesh=self.mesh,
        )
        value = jnp.sum(numeric)
        if not (by_position or self.is_plain):
            # A loss of sequences reads numeric columns alone: N of V, for all positions.
            value = jnp.sum(self._numeric_losses(model, hidden, None, batch, kernel))
            total = total + coefficients.numeric * value
        ce_at_numbers = jnp.sum(jnp.where(is_number, ce, 0.0))
        return total, Sums(ce=jnp.sum(ce), ce_at_numbers=ce_at_numbers, numeric=value)

    def _numeric_losses(self, model, hidden, logits, batch, kernel):
        options = {"segment_ids": batch.segment_ids} if self.spec.needs == "sequence" else {}
        if self.spec.columns is None:
            losses = self.spec.function(logits, batch.targets, kernel, mask=batch.target_mask, **options)
        else:
            if self.spec.needs == "position" and is_worth_compacting(batch.targets.shape, kernel):
                columns = model.numeric_columns(kernel)
                return losses_at_numbers(
                    self.spec.columns, hidden, columns, batch.targets, kernel, batch.target_mask
                )
            # From the hidden states: a gather from the logits scatters into a second [T, V] array on the way back.
            match = match_targets(batch.targets, kernel.token_ids, batch.target_mask)
            scores = model.numeric_logits(hidden, kernel)
            losses = self.spec.columns(live_rows(scores, match.any(-1)), match, kernel, **options)
        if self.spec.needs == "sequence":
            # Per row comes the mean over its samples; the sum over samples does not depend on how rows were packed.
            return losses * jnp.sum(_sample_starts(batch), axis=-1)
        return losses

    def coefficients(self, counts: Counts, sums: Sums | None = None) -> Sums:
        """Give d total / d sums; `sums` are those of the whole batch and are needed only if `needs_values`."""
        per_token = 1.0 / jnp.maximum(counts.supervised, 1).astype(jnp.float32)
        zero = jnp.zeros(())
        if self.is_plain:
            return Sums(ce=per_token, ce_at_numbers=zero, numeric=zero)
        if self.spec.join == "replace_ce":
            return Sums(ce=per_token, ce_at_numbers=-per_token, numeric=self.weight * per_token)
        per_number = self.weight / jnp.maximum(self._denominator(counts), 1).astype(jnp.float32)
        if self.spec.join == "scale_to_ce":
            loss = sums.numeric / jnp.maximum(self._denominator(counts), 1)
            # A batch without numbers has loss 0 and nothing to scale.
            ratio = jnp.where(loss > 0, sums.ce * per_token / jnp.where(loss > 0, loss, 1.0), 0.0)
            per_number = per_number * lax.stop_gradient(ratio)
        return Sums(ce=per_token, ce_at_numbers=zero, numeric=per_number)

    def metrics(self, sums: Sums, counts: Counts, coefficients: Sums) -> dict[str, Array]:
        """Give the row of a log: total, plain cross entropy and unweighted numeric term, with their counts."""
        metrics = {
            "loss": _dot(coefficients, sums),
            "ce": sums.ce / jnp.maximum(counts.supervised, 1),
            "ce_count": counts.supervised,
            "numeric_count": counts.numeric,
            "samples": counts.samples,
        }
        if not self.is_plain:
            metrics["numeric"] = sums.numeric / jnp.maximum(self._denominator(counts), 1)
        return metrics

    def _denominator(self, counts: Counts) -> Int[Array, ""]:
        if self.normalize_by == "tokens":
            return counts.supervised
        return counts.samples if self.spec.needs == "sequence" else counts.numeric


def _dot(coefficients: Sums, sums: Sums) -> Float[Array, ""]:
    return sum(jax.tree.leaves(jax.tree.map(jnp.multiply, sums, coefficients)))


def _sample_starts(batch: Batch) -> Bool[Array, "B T"]:
    before = jnp.pad(batch.segment_ids, ((0, 0), (1, 0)))[:, :-1]
    return (batch.segment_ids != 0) & (batch.segment_ids != before)


def make_objective(loss: str, *, weight: float | None = None, normalize_by: str = "numeric") -> Objective:
    """Make the objective of a loss by name, or of a function of one's own.

    Args:
      loss: a name in `smmd_jax.LOSSES`, or "package.module:function" with the call
        (logits, targets, kernel, *, mask) -> one value per position, counted where the target is numeric; the module
        may hold a `LossSpec` instead (see `train.own_loss`).
      weight: None takes the loss's own default (1.0 for a function of one's own).
      normalize_by: "numeric" or "tokens".

    Raises:
      ValueError: an unknown loss (the known ones are listed), a module or function that cannot be found.
    """
    spec = LOSSES[loss] if loss in LOSSES else at_numbers(find_own_loss(loss))
    return Objective(spec=spec, weight=spec.default_weight if weight is None else weight, normalize_by=normalize_by)
