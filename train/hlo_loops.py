"""How often a loop of a compiled program turns: its counters are run, as far as they are constants at the start."""

import operator
from collections.abc import Mapping
from typing import NamedTuple

from train.hlo_text import Computation, Instruction, Program

# Longer loops of a training step than this are none that a scan made.
_LONGEST = 2**16
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "and": operator.and_,
               "or": operator.or_, "maximum": max, "minimum": min}  # fmt: skip
_COMPARISONS = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq,
                "NE": operator.ne}  # fmt: skip
_PASSING = {"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"}
# Index in the tuple that a computation takes -> its value, where it is a known whole number.
Scalars = Mapping[int, int]


class Turns(NamedTuple):
    """How often a loop's body runs.

    Attributes:
      count: None where it depends on more than constants.
      fixed: elements of the loop's tuple that are known and that its body does not change.
    """

    count: int | None
    fixed: dict[int, int]


def turns_of(program: Program, loop: Instruction, computation: Computation, scalars: Scalars) -> Turns:
    """Run the counters of a while loop.

    A loop that counts in twos, or from another number than 0, is no exception: the compiler unrolls and peels.

    Args:
      loop: an instruction `while` of `computation`.
      scalars: known elements of the tuple that `computation` takes, where it is a body of another loop.
    """
    body, condition = (program.computations[loop.called[role]] for role in ("body", "condition"))
    start = _tuple_scalars(program, loop.operands[0], computation, scalars)
    state, count = dict(start), 0
    while count <= _LONGEST:
        goes_on = _value(program, condition.root.name, condition, state)
        if goes_on is None:
            count = None
            break
        if not goes_on:
            break
        state = _tuple_scalars(program, body.root.name, body, state)
        count += 1
    fixed = {
        index: value for index, value in start.items()
        if _tuple_scalars(program, body.root.name, body, start).get(index) == value
    }  # fmt: skip
    return Turns(None if count is None or count > _LONGEST else count, fixed)


def _tuple_scalars(program: Program, name: str, computation: Computation, scalars: Scalars) -> dict[int, int]:
    made = computation.instructions[name]
    if made.opcode == "parameter":
        return dict(scalars)
    if made.opcode in ("opt-barrier", "copy"):
        return _tuple_scalars(program, made.operands[0], computation, scalars)
    if made.opcode != "tuple":
        return {}
    found = {}
    for index, operand in enumerate(made.operands):
        if _is_whole_number(computation.instructions[operand]):
            value = _value(program, operand, computation, scalars)
            if value is not None:
                found[index] = value
    return found


def _is_whole_number(instruction: Instruction) -> bool:
    return len(instruction.arrays) == 1 and not instruction.arrays[0].dims and instruction.arrays[0].dtype[0] in "sup"


def _value(program: Program, name: str, computation: Computation, scalars: Scalars) -> int | None:
    """The value of a whole number, by the constants that it is made of."""
    each = computation.instructions[name]
    of = lambda operand: _value(program, operand, computation, scalars)
    if each.opcode == "constant":
        text = each.literal.strip()
        return {"true": 1, "false": 0}.get(text, int(text) if text.lstrip("-").isdigit() else None)
    if each.opcode == "get-tuple-element":
        is_own = computation.instructions[each.operands[0]].opcode == "parameter"
        return scalars.get(int(each.attribute(r"index=(\d+)"))) if is_own else None
    if each.opcode == "parameter":  # of a fusion: its operands are numbered
        return scalars.get(int(each.literal)) if _is_whole_number(each) else None
    if each.opcode in _PASSING:
        return of(each.operands[0])
    if each.opcode in _ARITHMETIC or each.opcode == "compare":
        values = [of(operand) for operand in each.operands]
        if None in values:
            return None
        if each.opcode == "compare":
            return int(_COMPARISONS[each.attribute(r"direction=(\w+)")](*values))
        return int(_ARITHMETIC[each.opcode](*values))
    if each.opcode == "fusion":
        inner = program.computations[each.called["calls"]]
        operands = {number: of(operand) for number, operand in enumerate(each.operands)
                    if _is_whole_number(computation.instructions[operand])}  # fmt: skip
        known = {number: value for number, value in operands.items() if value is not None}
        return _value(program, inner.root.name, inner, known)
    return None
