"""Losses of logits and targets: one value per position or per sequence, nothing shifted, nothing reduced."""

from smmd_jax.losses.table import LOSSES, LossSpec

__all__ = ["LOSSES", "LossSpec"]
