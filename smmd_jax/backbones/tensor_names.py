"""Which tensor of a Hugging Face file holds which parameter, and how the two are laid out."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smmd_jax.errors import CheckpointError

# Prefix of the decoder -> name of the head beside it: text files, files that vision models write and keep in memory,
# and files of a bare decoder. The embedding tells which one a checkpoint has.
PREFIXES = {
    "model.": "lm_head.weight",
    "model.language_model.": "lm_head.weight",
    "language_model.model.": "language_model.lm_head.weight",
    "": "lm_head.weight",
}
_EMBEDDING = "embed_tokens.weight"
# First parts of the paths of vision models that are not their decoder's.
TOWERS = ("vision_tower", "multi_modal_projector", "visual", "vision_model")
# Last parts of the paths of parameters, where the files have another.
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "position_embedding": "embedding"}
# Buffers of older files, which the config says better.
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq$|.*\.masked_bias$|.*\.attn\.bias$")


@dataclass(frozen=True)
class Source:
    """The tensors of one parameter.

    Attributes:
        names: one tensor, or one per layer where the parameter stacks all layers on its first axis.
        stacked: whether it does.
        transposed: files hold matrices [out, in] and convolutions [out, in, (frames,) height, width]; kernels are
            [in, out], the latter flattened.
    """

    names: tuple[str, ...]
    stacked: bool
    transposed: bool


def find_prefix(names: Collection[str]) -> str:
    """Return the prefix of the decoder's tensors in a checkpoint.

    Raises:
        CheckpointError: no embedding under any known prefix.
    """
    for prefix in PREFIXES:
        if prefix + _EMBEDDING in names:
            return prefix
    known = ", ".join(prefix + _EMBEDDING for prefix in PREFIXES)
    raise CheckpointError(f"the checkpoint has no embedding, wanted one of {known}; it has {_some(names)}")


def source_of(path: str, *, num_layers: int, prefix: str = "model.", outer: str = "") -> Source:
    """Return the tensors of the parameter at a path; those of a vision model's decoder start with language_model/.

    Example:
        >>> source_of("layers/3/mlp/up_proj/kernel", num_layers=8).names
        ('model.layers.3.mlp.up_proj.weight',)
        >>> len(source_of("layers/mlp/up_proj/kernel", num_layers=8).names)
        8
    """
    parts = path.split("/")
    leaf = parts[-1]
    parts[-1] = _LEAVES.get(leaf, leaf)
    if _in_tower(path):
        # The entries of a list that holds more than matrices.
        name = outer + re.sub(r"\bmlp_(\d)\b", r"mlp.\1", ".".join(parts))
        return Source(names=(name,), stacked=False, transposed=leaf == "kernel")
    if parts[0] == "language_model":
        parts = parts[1:]
    stacked = parts[0] == "layers" and not parts[1].isdigit()
    if parts[0] == "lm_head":
        names = (PREFIXES[prefix],)
    elif stacked:
        names = tuple(f"{prefix}layers.{layer}." + ".".join(parts[1:]) for layer in range(num_layers))
    else:
        names = (prefix + ".".join(parts),)
    return Source(names=names, stacked=stacked, transposed=leaf == "kernel")


def match_tensors(
    parameters: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], *, num_layers: int, tied: bool
) -> dict[str, Source]:
    """Give every parameter its tensors, and leave no tensor over.

    Args:
        parameters: path -> anything with a shape.
        tensors: name -> shape in the file.
        num_layers: of the decoder.
        tied: the head is the embedding; a head in the file is then left aside (some files carry one).

    Returns:
        path -> Source.

    Raises:
        CheckpointError: missing, extra or misshapen tensors, all of them in one message.
    """
    prefix = find_prefix(tensors)
    # Towers stand at the top of a file, or under the model where it was written as it lies in memory.
    outer = "model." if any(name.startswith(tuple(f"model.{tower}." for tower in TOWERS)) for name in tensors) else ""
    sources = {path: source_of(path, num_layers=num_layers, prefix=prefix, outer=outer) for path in parameters}
    missing, misshapen = [], []
    for path, source in sources.items():
        shape = tuple(parameters[path].shape)[1 if source.stacked else 0 :]
        wanted = shape[::-1] if source.transposed else shape
        for name in source.names:
            if name not in tensors:
                missing.append(name)
            elif (_flattened(tensors[name], source) if _in_tower(path) else tuple(tensors[name])) != wanted:
                misshapen.append(f"{name} is {list(tensors[name])}, wanted {list(wanted)}")
    used = {name for source in sources.values() for name in source.names}
    if tied:
        used.add(PREFIXES[prefix])
    extra = [name for name in tensors if name not in used and not _IGNORED.match(name)]
    faults = [
        f"{len(names)} {kind}: {', '.join(sorted(names))}"
        for kind, names in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
        if names
    ]
    if faults:
        raise CheckpointError("the checkpoint does not hold the tensors of its config.\n  " + "\n  ".join(faults))
    return sources


def _in_tower(path: str) -> bool:
    return path.split("/")[0] in TOWERS


def _flattened(shape: Sequence[int], source: Source) -> tuple[int, ...]:
    return (shape[0], math.prod(shape[1:])) if source.transposed and len(shape) > 2 else tuple(shape)


def _some(names: Iterable[str], count: int = 5) -> str:
    names = sorted(names)
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "") or "nothing"
