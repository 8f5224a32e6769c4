"""What lies in a chip's memory while a compiled program runs: its largest arrays, and what the backward pass needs."""

from collections.abc import Iterator
from typing import NamedTuple

from train.hlo_costs import FREE
from train.hlo_text import ArrayShape, Computation, Instruction, Program

# Hand an array on without making a new one that counts.
_PASSING = {
    "bitcast", "copy", "copy-start", "copy-done", "tuple", "get-tuple-element", "opt-barrier", "optimization-barrier",
}  # fmt: skip


class Held(NamedTuple):
    """Equal arrays that a program makes.

    Attributes:
      shape: dtype and lengths on one chip.
      bytes: of one of them, tiles filled up.
      count: how many instructions make one; the compiler lets them share memory where it can.
      source: the JAX operation of the first.
    """

    shape: str
    bytes: int
    count: int
    source: str


def largest_arrays(program: Program, count: int = 10) -> list[Held]:
    """Return the largest arrays in main memory, arguments included, equal ones together."""
    found: dict[tuple[str, int], list[Instruction]] = {}
    for array, instruction in _arrays_of(program):
        found.setdefault((str(array), array.padded_bytes), []).append(instruction)
    largest = sorted(found.items(), key=lambda item: -item[0][1])[:count]
    named = lambda makers: next((each.op_name for each in makers if each.op_name), makers[0].opcode)
    return [Held(shape, size, len(makers), named(makers)) for (shape, size), makers in largest]


def bytes_for_backward(program: Program) -> int:
    """Return the bytes that the forward pass leaves for the backward pass, on one chip.

    JAX names an operation of the forward pass jvp(...) and one of the backward pass transpose(jvp(...)). What one of
    the former makes and one of the latter reads is kept in between: for stacked layers the stacks that the forward loop
    fills, for unrolled ones the arrays themselves.
    """
    return sum(
        array.padded_bytes
        for computation in _outside_fusions(program)
        for array in _crossing(program, computation)
        if array.is_in_hbm
    )


def _arrays_of(program: Program) -> Iterator[tuple[ArrayShape, Instruction]]:
    for computation in _outside_fusions(program):
        for instruction in computation.instructions.values():
            is_argument = instruction.opcode == "parameter" and computation.name == program.entry
            if is_argument or instruction.opcode not in FREE:
                yield from ((array, instruction) for array in instruction.arrays if array.is_in_hbm)


def _outside_fusions(program: Program) -> Iterator[Computation]:
    called = {
        name for computation in program.computations.values() for each in computation.instructions.values()
        for role, name in each.called.items() if role in ("calls", "to_apply")
    }  # fmt: skip
    return (each for name, each in program.computations.items() if name not in called)


def _crossing(program: Program, computation: Computation) -> Iterator[ArrayShape]:
    users: dict[str, list[Instruction]] = {}
    for instruction in computation.instructions.values():
        for name in set(instruction.operands):
            users.setdefault(name, []).append(instruction)

    def is_read_backward(name: str, index: int | None, seen: set[tuple[str, int | None]]) -> bool:
        """Whether a backward operation reads this array, or this element of a tuple."""
        if (name, index) in seen:
            return False
        seen.add((name, index))
        for user in users.get(name, []):
            if _is_backward(user):
                return True
            if user.opcode == "get-tuple-element" and index is not None:
                reads = int(user.attribute(r"index=(\d+)")) == index and is_read_backward(user.name, None, seen)
            elif user.opcode == "tuple":
                places = [place for place, operand in enumerate(user.operands) if operand == name]
                reads = any(is_read_backward(user.name, place, seen) for place in places)
            else:
                reads = user.opcode in _PASSING and is_read_backward(user.name, index, seen)
            if reads:
                return True
        return False

    for instruction in computation.instructions.values():
        if not _is_forward(instruction) or instruction.opcode in _PASSING | {"parameter", "constant"}:
            continue
        made = range(len(instruction.arrays))
        if instruction.opcode == "while":
            made = _changed_by(program.computations[instruction.called["body"]])
        for index in made:
            place = index if len(instruction.arrays) > 1 else None
            if is_read_backward(instruction.name, place, set()):
                yield instruction.arrays[index]


def _is_backward(instruction: Instruction) -> bool:
    return "transpose(" in instruction.op_name


def _is_forward(instruction: Instruction) -> bool:
    return "jvp(" in instruction.op_name and not _is_backward(instruction)


def _changed_by(body: Computation) -> list[int]:
    """The elements of a loop's tuple that its body does not hand on as they are."""
    changed = []
    for index, name in enumerate(body.root.operands):
        element = body.instructions[name]
        handed_on = element.opcode == "get-tuple-element" and element.attribute(r"index=(\d+)") == str(index)
        if not handed_on:
            changed.append(index)
    return changed
