"""Errors that name the fault; each is also a ValueError."""


class TokenizerError(ValueError):
    """A tokenizer or token table has no usable numeric sub-vocabulary."""


class TokenRangeError(ValueError):
    """A token id lies outside the vocabulary or beyond the width of a head."""


class CheckpointError(ValueError):
    """A folder that does not hold the model it should: its config, its tensors or their files."""
