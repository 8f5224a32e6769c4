"""`python -m benchmarks.report`: write the tables of README.md and of two pages of docs from the JSON in docs/results.

A page holds `<!-- results: NAME -->` ... `<!-- end of results -->`; what stands between is replaced. `NAME` is a row of
`BLOCKS`. Which JSON is what is seen from its keys: a comparison has `cells` (`compare.json` of `train.compare`), a
benchmark has `rows`, the file of a device has `measurements` (of `benchmarks.run`).
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.devices import goal_rows
from train.aggregate import summary_head, summary_rows, to_markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "performance.md")

_BLOCK = re.compile(r"(<!-- results: (?P<name>[a-z-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
_SHORT_COLUMNS = ("loss", "seeds", "accuracy, %", "MAE", "minutes")

Result = Mapping[str, Any]


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Read every JSON file of the folder, by name and without its ending."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def comparisons(results: Mapping[str, Result]) -> str:
    """Every comparison in full."""
    parts = [f"### {name}\n\n{to_markdown(result)}" for name, result in results.items() if "cells" in result]
    return "\n".join(parts) or "No comparison is committed yet.\n"


def summary(results: Mapping[str, Result]) -> str:
    """One row a loss, with the command that gives it."""
    rows = []
    for result in results.values():
        if "cells" not in result:
            continue
        for row in summary_rows(result):
            shown = dict(zip(summary_head(result), row, strict=True))
            command = next(cell["command"] for cell in result["cells"] if cell["loss"] == shown["loss"])
            command = re.sub(r" --(seed|workdir)=\S+", "", command)
            what = f"{result['task']}, {result['backbone']}"
            rows.append([what, *(shown[column] for column in _SHORT_COLUMNS), f"`{command}`"])
    if not rows:
        return "No result is committed yet.\n"
    return table(["task, backbone", *_SHORT_COLUMNS, "command, with `--seed=0`, 1, ..."], rows)


def benchmarks(results: Mapping[str, Result]) -> str:
    """Every benchmark: its rows, command and machine."""
    parts = []
    for name, result in results.items():
        if "rows" not in result:
            continue
        parts.append(f"### {name}\n\n{table_of(result['rows'])}{_facts(result)}")
    return "\n".join(parts) or "No benchmark is committed yet.\n"


def goals(results: Mapping[str, Result]) -> str:
    """Every goal of `benchmarks.run`, with a column for each kind of device."""
    return table(*goal_rows(_devices(results)))


def measurement(results: Mapping[str, Result], name: str) -> str:
    """One measurement of `benchmarks.run` on every device that has it."""
    parts = []
    for device in _devices(results):
        if name in device["measurements"]:
            found = device["measurements"][name]
            facts = {**found, "command": f"`{found['command']}`", "machine": _machine(device, found)}
            parts.append(f"{table_of(found['rows'])}{_facts(facts)}")
    return "\n".join(parts) or "Not measured yet.\n"


def _machine(device: Result, found: Result) -> str:
    load = "" if found["load"] is None else f"; load average over the last minutes {found['load'][1]:g}"
    return f"{device['machine']}; {device['device_count']} x {device['device_kind']}{load}"


def _devices(results: Mapping[str, Result]) -> list[Result]:
    found = {name: result for name, result in results.items() if "measurements" in result}
    for name, device in found.items():
        if quick := [key for key, part in device["measurements"].items() if part["quick"]]:
            raise ValueError(f"{name}.json holds quick runs of {', '.join(quick)}, which measure nothing: remove it.")
    return list(found.values())


def _facts(result: Result) -> str:
    keys = [key for key in ("command", "date", "machine", "versions") if key in result]
    return "".join(f"\n{key.capitalize()}: {_cell(result[key])}\n" for key in keys)


BLOCKS: dict[str, Callable[[Mapping[str, Result]], str]] = {
    "comparisons": comparisons,
    "summary": summary,
    "benchmarks": benchmarks,
    "goals": goals,
    **{f"measured-{name}": functools.partial(measurement, name=name) for name in ("loss", "step", "decode", "input")},
}


def render(text: str, results: Mapping[str, Result]) -> str:
    """Return a page with every block of results written anew.

    Raises:
      ValueError: a block of an unknown name, or a page without any block.

    Example:
      >>> print(render("<!-- results: summary -->\\nold\\n<!-- end of results -->", {}))
      <!-- results: summary -->
      <BLANKLINE>
      No result is committed yet.
      <BLANKLINE>
      <!-- end of results -->
    """
    if not _BLOCK.search(text):
        raise ValueError("this page has no <!-- results: NAME --> ... <!-- end of results --> block.")

    def block(match: re.Match[str]) -> str:
        if match["name"] not in BLOCKS:
            raise ValueError(f"unknown block of results {match['name']!r}; known: {', '.join(BLOCKS)}.")
        return f"{match[1]}\n{BLOCKS[match['name']](results)}\n{match[3]}"

    return _BLOCK.sub(block, text)


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with a column for every key of the rows."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    return table(heads, [[_cell(row.get(head)) for head in heads] for row in rows])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = ["---"] + ["---:"] * (len(head) - 1)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ruler, *rows))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(part)}" for key, part in value.items() if part is not None)
    return str(value).replace("|", "\\|")


def main() -> None:
    results = read_results()
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8"), results), encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)} from {len(results)} files of {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
