"""The table of losses: one row a loss; flags, help texts, the common tests and the training objective read it."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from jaxtyping import Array

from smmd_jax.losses import digit_entropy, dist2, emo, gce, ntil, ntl, number_level, smmd
from smmd_jax.losses.cross_entropy import cross_entropy_of_all


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSpec:
    """What the rest of the code needs to know of a loss.

    Attributes:
      function: (logits [..., V], targets [...], kernel, *, mask=None) -> [...]; with needs="sequence" the operands end
        in T, the result has one value per sequence, and `segment_ids` is taken too.
      needs: "position" or "sequence".
      terms: what `make_numeric_kernel(terms=...)` has to build; None where the loss takes no quadratic form.
      join: how it meets cross entropy: "add": CE + weight * loss; "scale_to_ce": CE + weight * stop_gradient(CE / loss)
        * loss; "replace_ce": weight * loss instead of CE at numeric positions.
      default_weight: the weight its authors use.
      source: where it was published.
      columns: (scores [..., N], match [..., N], kernel) -> [...], the same loss from float32 numeric logits, where it
        needs no others; None for a softmax over the whole vocabulary.
      minimum_at_target: whether the minimum 0 lies at p = onehot(target).
    """

    function: Callable[..., Array]
    needs: Literal["position", "sequence"] = "position"
    terms: Literal["smmd", "mmd", "smoothness"] | None = None
    join: Literal["add", "scale_to_ce", "replace_ce"] = "add"
    default_weight: float
    source: str
    columns: Callable[..., Array] | None = None
    minimum_at_target: bool = True


_SMMD = "Zuo et al., Enhancing Numerical Prediction in LLMs via Smooth MMD Alignment, 2026, arXiv 2606.27731"
_NTL = "Zausinger et al., Regress, Don't Guess, ICML 2025, arXiv 2411.02083"


def _smmd_row(terms: Literal["smmd", "mmd", "smoothness"]) -> LossSpec:
    return LossSpec(
        function=smmd.smmd_loss, columns=smmd.smmd_columns, terms=terms, default_weight=3.0, source=_SMMD
    )


LOSSES: dict[str, LossSpec] = {
    "ce": LossSpec(
        function=cross_entropy_of_all, join="replace_ce", default_weight=1.0, source="cross entropy alone"
    ),
    "smmd": _smmd_row("smmd"),
    "mmd": _smmd_row("mmd"),
    "smoothness": _smmd_row("smoothness"),
    "ntl_was": LossSpec(function=ntl.ntl_was_loss, columns=ntl.was_columns, default_weight=0.3, source=_NTL),
    "ntl_mse": LossSpec(function=ntl.ntl_mse_loss, columns=ntl.mse_columns, default_weight=0.3, source=_NTL),
    "ntl_mae": LossSpec(function=ntl.ntl_mae_loss, columns=ntl.mae_columns, default_weight=0.3, source=_NTL),
    "ntl_huber": LossSpec(function=ntl.ntl_huber_loss, columns=ntl.huber_columns, default_weight=0.3, source=_NTL),
    "number_level": LossSpec(
        function=number_level.number_level_loss,
        columns=number_level.number_level_columns,
        needs="sequence",
        default_weight=0.3,
        source=_NTL + " (ntloss 0.3.2, NumberLevelLoss)",
    ),
    "ntil": LossSpec(
        function=ntil.ntil_loss,
        columns=lambda scores, match, kernel, **options: ntil.ntil_columns(scores, match, kernel, **options).total,
        needs="sequence",
        join="scale_to_ce",
        default_weight=0.3,
        source="Fei et al., Advancing Sequential Numerical Prediction in Autoregressive Models, ACL 2025, "
        "arXiv 2505.13077",
    ),
    "gce": LossSpec(
        function=gce.gce_loss,
        join="replace_ce",
        default_weight=1.0,
        source=_NTL + " (baseline); Wang et al., Token-Mol 1.0, 2025, arXiv 2407.07930",
        minimum_at_target=False,
    ),
    "dist2": LossSpec(
        function=dist2.dist2_loss,
        default_weight=0.1,
        source="Chung et al., Teaching Metric Distance to Discrete Autoregressive Language Models, 2025, "
        "arXiv 2503.02379",
        minimum_at_target=False,
    ),
    "del": LossSpec(
        function=digit_entropy.digit_entropy_loss,
        columns=digit_entropy.digit_entropy_columns,
        default_weight=0.1,
        source="Zheng et al., DEL: Digit Entropy Loss for Numerical Learning of LLMs, 2026, arXiv 2605.20369",
        minimum_at_target=False,
    ),
    "emo": LossSpec(
        function=emo.emo_loss,
        terms="smmd",
        join="scale_to_ce",
        default_weight=1.0,
        source="Ren et al., EMO: Earth Mover Distance Optimization for Auto-Regressive Language Modeling, ICLR 2024, "
        "arXiv 2310.04691",
    ),
}


def find_loss(name: str) -> LossSpec:
    """Look a loss up by name; an unknown name is an error that lists the known ones."""
    if not isinstance(name, str) or name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; known: {', '.join(LOSSES)}.")
    return LOSSES[name]
