"""The type checker that jaxtyping's import hook applies to `smmd_jax` in the test of its annotations."""

from beartype import BeartypeConf, beartype

# PEP 484: where a float is wanted, an int is welcome.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
