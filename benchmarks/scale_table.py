"""`python -m benchmarks.scale_table`: plan the paper's backbones on slices of TPUs, for the table of docs/scale.md.

Needs the extra `[tpu-compile]`. Each cell is a plan of its own, `docs/results/scale/CELL.json`; a cell that is there is
not planned again, so the command can be stopped and started. `--table_only` plans nothing.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "results" / "scale"
PAGE = ROOT / "docs" / "scale.md"

PAPER = (
    "qwen2.5-0.5b", "qwen2.5-1.5b", "smollm3-3b", "ministral-3-3b", "llama3-8b", "qwen2.5-vl-3b", "qwen2.5-vl-7b",
    "llama-3.2-11b-vision",
)  # fmt: skip
LORA_RANK = 16
_BLOCK = re.compile(r"(<!-- scale table -->\n).*?(<!-- end of scale table -->)", re.DOTALL)
_HEAD = (
    "backbone", "trained", "slice", "rows", "GiB a chip", "of it state", "fits", "PFLOP a step", "roofline, s",
    "tokens/s at most", "MFU at most, %", "collectives, GiB a chip",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row of the table; `rows` is the batch: two a chip where all parameters are trained, four for adapters."""

    backbone: str
    lora_rank: int
    topology: str

    @property
    def name(self) -> str:
        trained = f"lora{self.lora_rank}" if self.lora_rank else "full"
        return f"{self.backbone}-{trained}-{self.topology.replace(':', '-')}"

    @property
    def flags(self) -> list[str]:
        chips = 1
        for length in self.topology.split(":")[1].split("x"):
            chips *= int(length)
        rows = (4 if self.lora_rank else 2) * chips
        return [
            f"--backbone={self.backbone}", f"--topology={self.topology}", f"--batch_size={rows}",
            f"--lora_rank={self.lora_rank}",
        ]  # fmt: skip


def cells() -> list[Cell]:
    """All backbones on v5e:2x4, and two of them on other slices."""
    found = [Cell(backbone, rank, "v5e:2x4") for backbone in PAPER for rank in (0, LORA_RANK)]
    for topology in ("v5e:1x1", "v6e:2x2", "v5p:2x2x1"):
        found += [Cell("qwen2.5-1.5b", rank, topology) for rank in (0, LORA_RANK)]
    for topology in ("v5e:4x4", "v6e:2x4", "v5p:2x2x1"):
        found.append(Cell("llama3-8b", 0, topology))
    return found


def plan(cell: Cell, folder: Path, timeout: float) -> str:
    """Plan one cell in a process of its own; returns a line for the log."""
    path, began = folder / f"{cell.name}.json", time.monotonic()
    command = [sys.executable, "-m", "train.plan", *cell.flags, f"--json={os.path.relpath(path, ROOT)}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"{cell.name}: not compiled within {timeout:.0f} s"
    verdict = "done" if done.returncode == 0 else f"failed: {done.stderr.strip()[-400:]}"
    return f"{cell.name}: {verdict}, {time.monotonic() - began:.0f} s"


def rows(found: Mapping[str, Mapping[str, Any]], wanted: Sequence[Cell]) -> list[list[str]]:
    """The cells that are there, in the order of the table."""
    table = []
    for cell in wanted:
        if cell.name not in found:
            continue
        plan = found[cell.name]
        kinds = plan["bytes_by_kind"]
        moved = sum(row["bytes"] for row in plan["collectives"])
        known = bool(plan["largest_arrays"])
        table.append([
            cell.backbone,
            f"adapters, rank {cell.lora_rank}" if cell.lora_rank else "all",
            cell.topology,
            str(plan["batch_size"]),
            f"{plan['bytes_per_chip'] / 2**30:.1f}",
            f"{(kinds['parameters'] + kinds['optimizer']) / 2**30:.1f}",
            "yes" if plan["fits"] else "no",
            f"{plan['flops_per_step'] / 1e15:.2f}",
            f"{plan['roofline_seconds']:.2f}",
            f"{plan['tokens_per_second_at_most']:,.0f}" if plan["fits"] else "-",
            f"{100 * plan['mfu_at_most']:.0f}" if plan["fits"] else "-",
            f"{moved / 2**30:.1f}" if known else "-",
        ])  # fmt: skip
    return table


def render(page: str, found: Mapping[str, Mapping[str, Any]], wanted: Sequence[Cell]) -> str:
    """Return the page with the table written anew.

    Raises:
      ValueError: a page without the block.
    """
    if not _BLOCK.search(page):
        raise ValueError("this page has no <!-- scale table --> ... <!-- end of scale table --> block.")
    ruler = ["---"] * 3 + ["---:"] * (len(_HEAD) - 3)
    lines = [f"| {' | '.join(row)} |" for row in (_HEAD, ruler, *rows(found, wanted))]
    compilers = [plan["versions"] for plan in found.values()]
    versions = sorted({f"jax {each['jax']}, libtpu {each['libtpu']}" for each in compilers})
    missing = [cell.name for cell in wanted if cell.name not in found]
    notes = f"\nCompilers: {'; '.join(versions)}.\n"
    if missing:
        notes += f"\nNot planned yet: {', '.join(missing)}.\n"
    return _BLOCK.sub(lambda match: f"{match[1]}\n" + "\n".join(lines) + f"\n{notes}\n{match[2]}", page)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table_only", action="store_true", help="write the table of what is there")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which a cell is given up")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for cell in [] if arguments.table_only else cells():
        if not (FOLDER / f"{cell.name}.json").exists():
            print(plan(cell, FOLDER, arguments.timeout), flush=True)
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), read(FOLDER), cells()), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
