"""Numeric-aware training losses in JAX."""
