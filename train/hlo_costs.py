"""What one run of a compiled program costs on each chip: products, memory traffic, collectives; loops multiplied out.

`compiled.cost_analysis()` counts the body of a loop once, whatever its trip count; here it counts as often as it runs.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from train.hlo_loops import turns_of
from train.hlo_text import ArrayShape, Computation, Instruction, Program, read_program

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
# What moves no bytes by itself; loops, calls and branches are looked into.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "conditional", "call",
    "partition-id", "replica-id", "add-dependency", "opt-barrier", "optimization-barrier", "domain",
}  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
# What changes a part of its first operand in place -> which operand is the part.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


class Collective(NamedTuple):
    """Collectives of one kind and size.

    Attributes:
      kind: a name in `COLLECTIVES`.
      bytes: of the larger of operand and result on one chip: what an all-gather makes, what a reduce-scatter takes.
      group: chips that take part in one.
      source: the JAX operation it comes from.
      channel: its number. The TPU compiler cuts one collective into pieces of several fusions, all of one channel.
      hbm_bytes: of operand and result, as far as they lie in main memory.
    """

    kind: str
    bytes: int
    group: int
    source: str
    channel: int | None = None
    hbm_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of one run on one chip; they add and multiply.

    Attributes:
      flops: of matrix products and convolutions, 2 a multiplication and addition.
      hbm_bytes: read from and written to main memory; what a fusion keeps inside costs nothing.
      collectives: how often each one runs.
      unknown_loops: loops whose trip count the program does not tell; their bodies count once.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: Mapping[Collective, int] = dataclasses.field(default_factory=dict)
    unknown_loops: int = 0

    def __add__(self, other: "Costs") -> "Costs":
        together = collections.Counter(self.collectives)
        together.update(other.collectives)
        return Costs(
            self.flops + other.flops,
            self.hbm_bytes + other.hbm_bytes,
            dict(together),
            self.unknown_loops + other.unknown_loops,
        )

    def times(self, count: int) -> "Costs":
        moved = {each: number * count for each, number in self.collectives.items()}
        return Costs(self.flops * count, self.hbm_bytes * count, moved, self.unknown_loops)

    @property
    def collective_bytes(self) -> int:
        return sum(each.bytes * count for each, count in self.collectives.items())

    @property
    def wire_bytes(self) -> float:
        """What each chip sends at least: a ring over n chips sends (n - 1) / n of an array, twice for an all-reduce."""
        factor = {"all-reduce": 2.0}
        # A group of 0 is all chips, whose number the instruction does not say.
        share = lambda each: 1.0 if each.kind == "collective-permute" or not each.group else 1.0 - 1.0 / each.group
        return sum(
            factor.get(each.kind, 1.0) * share(each) * each.bytes * count for each, count in self.collectives.items()
        )


def costs_of_text(text: str, *, branch: Callable = max) -> Costs:
    """Read the text of a compiled program and count what one run of it costs; see `costs_of`."""
    return costs_of(read_program(text), branch=branch)


def costs_of(program: Program, *, branch: Callable = max) -> Costs:
    """Count what one run of a compiled program costs on each chip.

    Args:
      program: as the compiler left it.
      branch: which branch of a conditional counts: `max` the dearest, `min` the cheapest.

    Returns:
      The costs of the entry computation, bodies of loops as often as they run.
    """

    @functools.cache
    def of(name: str, scalars: tuple[tuple[int, int], ...] = ()) -> Costs:
        computation, total, collectives = program.computations[name], Costs(), []
        for instruction in computation.instructions.values():
            if instruction.opcode in ("while", "conditional", "call"):
                total += of_called(instruction, computation, dict(scalars))
                continue
            total += Costs(flops_of(instruction, computation), traffic_of(program, instruction, computation))
            collectives += _collectives_of(instruction, computation)
            if "calls" in instruction.called:
                inside = inside_of(instruction.called["calls"])
                total += Costs(inside[0])
                collectives += inside[1]
        return total + _once_a_channel(collectives)

    def of_called(instruction: Instruction, computation: Computation, scalars: dict[int, int]) -> Costs:
        called = instruction.called
        if instruction.opcode == "while":
            count, fixed = turns_of(program, instruction, computation, scalars)
            body = of(called["body"], tuple(sorted(fixed.items()))).times(1 if count is None else count)
            return dataclasses.replace(body, unknown_loops=body.unknown_loops + (count is None))
        if instruction.opcode == "conditional":
            parts = [of(name) for role, name in called.items() if role.startswith("branch")]
            return branch(parts, key=lambda part: (part.flops, part.hbm_bytes, part.collective_bytes))
        return of(called["to_apply"])

    @functools.cache
    def inside_of(name: str) -> tuple[float, list[Collective]]:
        """Products and collectives of a fusion or an asynchronous computation; its bytes are those of its operands."""
        computation, flops, collectives = program.computations[name], 0.0, []
        for instruction in computation.instructions.values():
            flops += flops_of(instruction, computation)
            collectives += _collectives_of(instruction, computation)
            if "calls" in instruction.called:
                inside = inside_of(instruction.called["calls"])
                flops, collectives = flops + inside[0], collectives + inside[1]
        return flops, collectives

    return of(program.entry)


def _once_a_channel(collectives: list[Collective]) -> Costs:
    """The collectives of one computation, pieces of the same one together."""
    by_channel: dict[Any, Collective] = {}
    for number, each in enumerate(collectives):
        key = ("none", number) if each.channel is None else (each.kind, each.channel)
        by_channel[key] = max(by_channel.get(key, each), each, key=lambda one: (one.bytes, one.hbm_bytes))
    counted = collections.Counter(each._replace(channel=None) for each in by_channel.values())
    return Costs(hbm_bytes=float(sum(each.hbm_bytes for each in by_channel.values())), collectives=dict(counted))


def flops_of(instruction: Instruction, computation: Computation) -> float:
    """Operations of a matrix product or convolution; 0 for everything else."""
    if instruction.opcode == "dot":
        left = computation.instructions[instruction.operands[0]].arrays[0]
        contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        inner = math.prod(left.dims[int(axis)] for axis in contracted.split(",") if axis)
        return 2.0 * instruction.arrays[0].elements * inner
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, computation)
    return 0.0


def _convolution_flops(instruction: Instruction, computation: Computation) -> float:
    """Only pairs of a window's element and an input's element that exist: the TPU compiler writes batched products so.

    A batch axis of n becomes a window of n with stride and dilation by which one element of n meets one.
    """
    left, right = (computation.instructions[name].arrays[0] for name in instruction.operands[:2])
    labels = instruction.attribute(r"dim_labels=(\S+?)(?:,|$)")
    inputs, kernels, outputs = re.fullmatch(r"(\w+)_(\w+)->(\w+)", labels).groups()
    size_of = lambda array, names, label: array.dims[names.index(label)]
    window = _window(instruction.attribute(r"window=\{([^}]*)\}") or "")
    pairs = 1
    for axis in [label for label in outputs if label.isdigit()]:
        pairs *= _valid_pairs(
            size_of(left, inputs, axis), size_of(right, kernels, axis), size_of(instruction.arrays[0], outputs, axis),
            {key: values[int(axis)] for key, values in window.items()},
        )  # fmt: skip
    groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    batch = size_of(left, inputs, "b") // groups
    return 2.0 * batch * size_of(right, kernels, "i") * size_of(right, kernels, "o") * pairs


def _window(text: str) -> dict[str, list]:
    read = dict(part.split("=") for part in text.split())
    read.pop("rhs_reversal", None)
    return {
        key: [tuple(map(int, each.split("_"))) if key == "pad" else int(each) for each in value.split("x")]
        for key, value in read.items()
    }


def _valid_pairs(inputs: int, kernel: int, outputs: int, window: Mapping) -> int:
    """Pairs (output, element of the window) along one axis that read an element which exists."""
    stride, (low, _) = window.get("stride", 1), window.get("pad", (0, 0))
    spread, step = window.get("lhs_dilate", 1), window.get("rhs_dilate", 1)
    place = np.arange(outputs)[:, None] * stride - low + np.arange(kernel)[None, :] * step
    return int(((place >= 0) & (place <= (inputs - 1) * spread) & (place % spread == 0)).sum())


def traffic_of(program: Program, instruction: Instruction, computation: Computation) -> float:
    """Bytes that an instruction reads from and writes to main memory.

    What is sliced is read no further than the slice, inside a fusion too, and what is updated in place is written no
    further than the update: the layers of a scan lie in one array.
    """
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-done") or opcode.endswith("-update") or _kind_of(instruction):
        return 0.0
    operands = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    if opcode == "fusion":
        inner = program.computations[instruction.called["calls"]]
        return _fusion_reads(program, inner, operands) + _fusion_writes(program, inner, instruction)
    if opcode in _SLICES:
        return 2.0 * _hbm(instruction.arrays)
    if opcode in _UPDATES:
        return 2.0 * _hbm(operands[_UPDATES[opcode]].arrays)
    if opcode == "slice-start":
        # (operand, slice, context): of the operand the slice is read.
        source, part = instruction.arrays[0], instruction.arrays[1]
        return float(part.bytes * (source.is_in_hbm + part.is_in_hbm))
    if opcode.endswith("-start"):
        # (operands, results, context): each operand is read, each result written, the context is a word.
        return float(_hbm(instruction.arrays))
    return float(sum(_hbm(each.arrays) for each in operands) + _hbm(instruction.arrays))


def _hbm(arrays: Iterable[ArrayShape]) -> int:
    return sum(each.bytes for each in arrays if each.is_in_hbm)


def _fusion_reads(program: Program, inner: Computation, operands: list[Instruction]) -> float:
    parameters = [each for each in inner.instructions.values() if each.opcode == "parameter"]
    total = 0.0
    for parameter in parameters:
        number = int(parameter.literal)
        operand = operands[number] if number < len(operands) else parameter
        if not _hbm(operand.arrays):
            continue
        parts = [_read_by(program, user, parameter.name, inner) for user in inner.users(parameter.name)]
        whole = float(_hbm(operand.arrays))
        total += whole if any(part is None for part in parts) else min(whole, float(sum(parts)))
    return total


def _read_by(program: Program, user: Instruction, name: str, inner: Computation) -> int | None:
    """Bytes that an instruction inside a fusion reads of an array; None: all of it."""
    if user.opcode in _SLICES and user.operands[0] == name:
        return 0 if name in user.operands[1:] else sum(each.bytes for each in user.arrays)
    if user.opcode in _UPDATES and user.operands[0] == name:
        return 0
    if user.opcode == "fusion":
        nested = program.computations[user.called["calls"]]
        names = [each.name for each in nested.instructions.values()
                 if each.opcode == "parameter" and user.operands[int(each.literal)] == name]  # fmt: skip
        parts = [_read_by(program, other, own, nested) for own in names for other in nested.users(own)]
        return None if any(part is None for part in parts) else sum(parts)
    # Handed on as it is, and what a collective moves is counted once for all of its pieces.
    if user.opcode == "tuple" or _kind_of(user):
        return 0
    if user.opcode == "bitcast":
        parts = [_read_by(program, other, user.name, inner) for other in inner.users(user.name)]
        return None if any(part is None for part in parts) or not parts else sum(parts)
    return None


def _fusion_writes(program: Program, inner: Computation, instruction: Instruction) -> float:
    roots = [inner.root]
    if inner.root.opcode == "tuple":
        roots = [inner.instructions[name] for name in inner.root.operands]
    total = 0.0
    for root, array in zip(roots, instruction.arrays, strict=False):
        if not array.is_in_hbm:
            continue
        root, home = _maker(program, root, inner)
        if root.opcode == "parameter" or _kind_of(root):
            continue
        if root.opcode in _UPDATES:
            # The part is read and written; what it is part of stays where it is.
            total += 2 * home.instructions[root.operands[_UPDATES[root.opcode]]].arrays[0].bytes
        else:
            total += array.bytes
    return total


def _maker(program: Program, root: Instruction, home: Computation) -> tuple[Instruction, Computation]:
    """The instruction that makes the result of a fusion, through bitcasts and fusions inside it."""
    while True:
        if root.opcode == "bitcast" and root.operands:
            root = home.instructions[root.operands[0]]
        elif root.opcode == "fusion":
            home = program.computations[root.called["calls"]]
            root = home.root
        else:
            return root, home


def _kind_of(instruction: Instruction) -> str | None:
    """The kind of a collective, or of its first half; None for everything else, its second half too."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def _collectives_of(instruction: Instruction, computation: Computation) -> list[Collective]:
    """The collective that an instruction is, as a list of one; empty where it is none or has no partner."""
    kind, group = _kind_of(instruction), _group_size(instruction.attributes)
    if kind is None or group == 1:
        return []
    operands = [
        array for name in instruction.operands if name in computation.instructions
        for array in computation.instructions[name].arrays
    ]  # fmt: skip
    results = list(instruction.arrays)
    if instruction.opcode.endswith("-start") and len(results) > len(operands):
        results = results[len(operands) :]  # the operands come first
    channel = instruction.attribute(r"channel_id=(\d+)")
    return [
        Collective(
            kind=kind,
            bytes=max(sum(array.bytes for array in operands), sum(array.bytes for array in results)),
            group=group,
            source=instruction.op_name,
            channel=int(channel) if channel else None,
            hbm_bytes=_hbm((*operands, *results)),
        )
    ]


def _group_size(attributes: str) -> int:
    """Chips in one group; 0 where all of them are one."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"('[^']*')=(\d+)", named[1])}
        return math.prod(sizes[axis.split(":")[0].strip()] for axis in named[2].split(","))
    if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(tiled[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    return 2 if "source_target_pairs" in attributes else 0
