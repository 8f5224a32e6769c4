"""The text of a compiled XLA program, read into computations, instructions and array shapes."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

# Bits of an element.
_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip
_NARROW_FLOAT = re.compile(r"f(\d+)e\w+")  # f8e4m3fn, f4e2m1fn: the first number is the width
_SHAPE = re.compile(r"\b([a-z]+[a-z0-9]*)\[([<=0-9,]*)\](?:\{([^{}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_FAST_MEMORY = re.compile(r"S\(\d+\)")


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """One array of a program as it lies on a chip.

    Attributes:
      dtype: XLA's name, as f32.
      dims: lengths.
      layout: the text between the braces: order of the dimensions, tiles, memory space.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def is_in_hbm(self) -> bool:
        """Whether it lies in the chip's main memory; S(1) is the fast memory beside the units."""
        return not _FAST_MEMORY.search(self.layout)

    @property
    def bits(self) -> int:
        if self.dtype in _BITS:
            return _BITS[self.dtype]
        narrow = _NARROW_FLOAT.fullmatch(self.dtype)
        return int(narrow[1]) if narrow else 32

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Without the padding of tiles."""
        return -(-self.elements * self.bits // 8)

    @property
    def padded_bytes(self) -> int:
        """As it is stored: the minor dimensions are filled up to whole tiles."""
        tile = re.search(r"T\(([\d,]+)\)", self.layout)
        order = self.layout.split(":")[0]
        if not tile or not order.replace(",", "").isdigit():
            return self.bytes
        minor_to_major = [int(axis) for axis in order.split(",")]
        lengths = [self.dims[axis] for axis in reversed(minor_to_major)]
        tiles = [int(length) for length in tile[1].split(",")][-len(lengths) :]
        for place, length in zip(range(-len(tiles), 0), tiles, strict=True):
            lengths[place] = -(-lengths[place] // length) * length
        return -(-math.prod(lengths) * self.bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      arrays: its result, flat where it is a tuple.
      operands: names of instructions of the same computation.
      attributes: the text after the operands.
      literal: the number of a parameter, the value of a constant.
    """

    name: str
    opcode: str
    arrays: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""
    is_root: bool = False

    @property
    def called(self) -> dict[str, str]:
        """Role -> computation: calls, to_apply, body, condition; branch0, branch1, ... of a conditional."""
        found = {role: name for role, name in _CALLED.findall(self.attributes)}
        if branches := _BRANCHES.search(self.attributes):
            names = [name.strip().lstrip("%") for name in branches[1].split(",")]
            return found | {f"branch{number}": name for number, name in enumerate(names)}
        if "true_computation" in found:
            found |= {"branch0": found.pop("true_computation"), "branch1": found.pop("false_computation")}
        return found

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def op_name(self) -> str:
        """What JAX called it: the path of functions and the primitive."""
        return (self.attribute(r'op_name="([^"]*)"') or "").replace("\\", "")


@dataclasses.dataclass(frozen=True)
class Computation:
    """A sequence of instructions by name."""

    name: str
    instructions: Mapping[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next((each for each in self.instructions.values() if each.is_root), list(self.instructions.values())[-1])

    def users(self, name: str) -> Iterator[Instruction]:
        return (each for each in self.instructions.values() if name in each.operands)


@dataclasses.dataclass(frozen=True)
class Program:
    """All computations of a compiled module, and which of them is run."""

    computations: Mapping[str, Computation]
    entry: str


def read_program(text: str) -> Program:
    """Read the text of `compiled.as_text()`.

    Raises:
      ValueError: a text without an entry computation.

    Example:
      >>> program = read_program('''ENTRY %main (x: f32[2,3]) -> f32[2] {
      ...   %x = f32[2,3]{1,0} parameter(0)
      ...   ROOT %y = f32[2]{0} custom-call(%x), custom_call_target="sum"
      ... }''')
      >>> [(each.opcode, str(each.arrays[0])) for each in program.computations["main"].instructions.values()]
      [('parameter', 'f32[2,3]'), ('custom-call', 'f32[2]')]
    """
    computations: dict[str, Computation] = {}
    entry, name, instructions = None, None, {}
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            name, instructions = opened[2], {}
            entry = name if opened[1] else entry
        elif line.startswith("}") and name is not None:
            computations[name], name = Computation(name, instructions), None
        elif name is not None and (found := _INSTRUCTION.match(line)):
            instructions[found[2]] = _read_instruction(found[2], found[3], bool(found[1]))
    if entry is None:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")
    return Program(computations, entry)


def _read_instruction(name: str, text: str, is_root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : close]
    return Instruction(
        name=name,
        opcode=opcode.strip(),
        arrays=tuple(_read_shapes(shape)),
        operands=tuple(_NAME.findall(inside)),
        attributes=rest[close + 1 :],
        literal=inside if opcode in ("constant", "parameter") else "",
        is_root=is_root,
    )


def _read_shapes(text: str) -> Iterator[ArrayShape]:
    for dtype, dims, layout in _SHAPE.findall(text):
        yield ArrayShape(dtype, tuple(int(length.lstrip("<=")) for length in dims.split(",") if length), layout or "")


def _closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one at `start`; quoted text does not count."""
    depth, quoted = 0, False
    for place in range(start, len(text)):
        letter = text[place]
        if letter == '"' and text[place - 1] != "\\":
            quoted = not quoted
        elif not quoted and letter == "(":
            depth += 1
        elif not quoted and letter == ")":
            depth -= 1
            if depth == 0:
                return place
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")
