"""What a measurement gives: rows of a table, and goals with the value that was found."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Goal:
    """A ratio that is wished for; exactly one bound is given.

    Attributes:
      name: what is compared with what.
      value: what was measured; None where it cannot be, since something is not installed.
      at_most, at_least: the bound.
    """

    name: str
    value: float | None
    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"goal {self.name!r} needs one of at_most and at_least")

    @property
    def bound(self) -> str:
        return f"at most {self.at_most:g}" if self.at_least is None else f"at least {self.at_least:g}"

    @property
    def state(self) -> str:
        """`met`, `missed`, or `not measured`; a value counts as it is printed, with two decimals."""
        if self.value is None:
            return "not measured"
        value = round(self.value, 2)
        is_met = value <= self.at_most if self.at_least is None else value >= self.at_least
        return "met" if is_met else "missed"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "bound": self.bound, "state": self.state}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Rows and goals of one measurement; two of them add."""

    rows: list[dict[str, Any]]
    goals: list[Goal]

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(rows=self.rows + other.rows, goals=self.goals + other.goals)
