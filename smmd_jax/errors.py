"""Errors that name the fault; each is also a ValueError."""


class TokenizerError(ValueError):
    """A tokenizer or token table has no usable numeric sub-vocabulary."""


class TokenRangeError(ValueError):
    """A token id lies outside the vocabulary or beyond the width of a head."""
