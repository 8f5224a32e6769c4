"""A grid of runs, losses by seeds: the cells, what has become of each, and running those that are not finished."""

import dataclasses
import datetime
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.config import TrainConfig, check_run_folder, make_config
from train.environment import redact
from train.exits import RunError, StoppedError, StopSignals, UsageError
from train.flags import Tables, read_value
from train.log import EVALS, METRICS, encode_row, read_jsonl

LOG, ATTEMPTS = "output.log", "attempts.jsonl"
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_LONGEST_MESSAGE = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a grid: a config, and the flags of `train.main` that give it."""

    config: TrainConfig
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.config.loss} seed {self.config.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.config.workdir)

    @property
    def command(self) -> str:
        return shlex.join(["python", "-m", "train.main", *(redact(flag) for flag in self.flags)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What has become of a cell.

    Attributes:
      state: "finished": evaluated at its last step; "failed": the newest attempt ended with an error; "unfinished":
        begun and stopped; "missing": never begun.
      metrics: the final row of `eval.jsonl`; None unless finished.
      exit_code: of the newest attempt; negative: the number of the signal that killed it.
      message: why it is not finished, one line.
      seconds: wall time of all attempts; None where an attempt was not timed (begun by hand, or the grid was killed).
      environment: the cell's `environment.json`, without command lines.
    """

    state: str
    metrics: Mapping[str, Any] | None = None
    exit_code: int | None = None
    message: str = ""
    seconds: float | None = None
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Launch = Callable[[Cell, StopSignals], int]


def make_cells(
    given: Mapping[str, Any], *, losses: Sequence[str], seeds: Sequence[int], workdir: str, tables: Tables
) -> list[Cell]:
    """Make the cells of a grid, seed by seed, so that an unfinished grid holds complete pairs.

    Args:
      given: config values that all cells share, by field name.
      losses: names of losses; seeds: whole numbers.
      workdir: folder of the grid; a cell lies in `LOSS-seedSEED` below it.
      tables: as `train.config.make_config`.

    Raises:
      UsageError: a value that a cell's config refuses, nothing to compare, or a loss or seed named twice.
    """
    for what, values in (("losses", losses), ("seeds", seeds)):
        if not values or len(set(values)) < len(values):
            shown = ",".join(map(str, values))
            raise UsageError(f"{what}={shown}: wanted at least one, each named once, with commas between several.")
    cells = []
    for seed in seeds:
        for loss in losses:
            folder = re.sub(r"[^A-Za-z0-9_.]+", "-", loss) + f"-seed{seed}"
            values = {**given, "loss": loss, "seed": seed, "workdir": str(Path(workdir) / folder)}
            flags = tuple(f"--{name}={_flag_text(value)}" for name, value in values.items())
            cells.append(Cell(config=make_config(values, tables=tables), flags=flags))
    return cells


def read_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def read_seeds(text: str) -> list[int]:
    return [read_value("seeds", part, int) for part in read_names(text)]


def check_cells(cells: Sequence[Cell], *, report_only: bool = False) -> None:
    """Refuse a grid whose folder holds cells of another one; changes nothing.

    Args:
      cells: the grid.
      report_only: whether nothing will be run; then no cell may have ended all of whose ends are others than asked for.

    Raises:
      UsageError: a cell's folder holds another config, a finished cell was evaluated on another number of examples, or
        the cells hold other steps than asked for.
    """
    ends, wanted = set(), (cells[0].config.steps, cells[0].config.eval_split)
    for cell in cells:
        if not check_run_folder(cell.config):
            continue
        if _final_row(cell) is None:
            ends |= _saved_end(cell)
            _check_steps(cell)
            continue
        ends.add(wanted)
        before = _saved_config(cell)["eval_examples"]
        if before != cell.config.eval_examples:
            raise UsageError(
                f"{cell.folder} was evaluated with --eval_examples={before}, the others would be with "
                f"{cell.config.eval_examples}: give the former value, or another --workdir."
            )
    if report_only and ends and wanted not in ends:
        shown = " or ".join(f"--steps={steps} --eval_split={split}" for steps, split in sorted(ends))
        raise UsageError(
            f"no cell of {cells[0].folder.parent} was run with --steps={wanted[0]} --eval_split={wanted[1]}: give "
            f"{shown}, as they were, or leave --report_only out to go on with them. The report is as it was."
        )


def _check_steps(cell: Cell) -> None:
    done = max((row["step"] for row in read_jsonl(cell.folder / METRICS)), default=0)
    if done > cell.config.steps:
        raise UsageError(
            f"{cell.folder} holds step {done} and --steps={cell.config.steps} asks for fewer: give at least {done}, or "
            "another --workdir."
        )


def read_outcome(cell: Cell) -> Outcome:
    """Read what has become of a cell from its folder; see `Outcome`."""
    attempts = read_jsonl(cell.folder / ATTEMPTS)
    environment, starts = _environment(cell)
    exit_code = attempts[-1]["exit_code"] if attempts else None
    facts = {
        "exit_code": exit_code,
        "seconds": sum(row["seconds"] for row in attempts) if len(attempts) >= max(starts, 1) else None,
        "environment": environment,
    }
    row = _final_row(cell)
    if row is not None:
        return Outcome(state="finished", metrics=row, **facts)
    ends = _saved_end(cell)
    if exit_code == 0 and (cell.config.steps, cell.config.eval_split) not in ends:
        message = ", ".join(f"ended with step {steps}, evaluated on {split}" for steps, split in ends)
        return Outcome(state="unfinished", message=message, **facts)
    if exit_code == 0:
        message = f"ended without an evaluation of {cell.config.eval_split} at step {cell.config.steps}"
        return Outcome(state="failed", message=message, **facts)
    if exit_code is not None and exit_code not in _STOPPED:
        return Outcome(state="failed", message=_last_line(cell.folder / LOG), **facts)
    if starts == 0 and not attempts:
        return Outcome(state="missing", message="not begun", **facts)
    steps = [metrics["step"] for metrics in read_jsonl(cell.folder / METRICS)]
    message = f"stopped after step {max(steps, default=0)} of {cell.config.steps}"
    return Outcome(state="unfinished", message=message, **facts)


def run_cells(
    cells: Sequence[Cell],
    *,
    launch: Launch,
    stop: StopSignals,
    report: Callable[[], Any] = lambda: None,
    say: Callable[[str], Any] = print,
) -> None:
    """Run the cells that are not finished, one after the other; a failure does not keep the next one from running.

    Args:
      cells: the grid.
      launch: runs one cell to its end and returns its exit code; `launch_process` outside of tests.
      stop: signals that end the grid; the same command goes on.
      report: called after every attempt.
      say: takes a line of progress.

    Raises:
      StoppedError: a signal came.
    """
    for number, cell in enumerate(cells, 1):
        place = f"[{number}/{len(cells)}] {cell.name}"
        if read_outcome(cell).state == "finished":
            say(f"{place}: finished before")
            continue
        if stop.received is not None:
            break
        cell.folder.mkdir(parents=True, exist_ok=True)
        say(f"{place}: running, output in {cell.folder / LOG}")
        began = time.monotonic()
        exit_code = launch(cell, stop)
        ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        row = {"exit_code": exit_code, "seconds": round(time.monotonic() - began, 1), "ended": ended}
        with (cell.folder / ATTEMPTS).open("a", encoding="utf-8") as file:
            file.write(encode_row(row) + "\n")
        outcome = read_outcome(cell)
        say(f"{place}: {describe(outcome)}")
        report()
    if stop.received is not None:
        raise StoppedError("a signal ended the comparison. Run the same command again to go on.", stop.received)


def raise_for_failures(cells: Sequence[Cell], *, report_only: bool = False) -> None:
    """Raise if a cell failed, so that a script that runs the grid notices.

    Args:
      cells: the grid.
      report_only: whether the command at hand runs nothing.

    Raises:
      RunError: names the cells; exit code 1.
    """
    failed = [cell.name for cell in cells if read_outcome(cell).state == "failed"]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(cells)} cells failed ({', '.join(failed)}); {LOG} in their folders says why. The "
            f"same command {'without --report_only ' if report_only else ''}tries them again."
        )


def launch_process(cell: Cell, stop: StopSignals) -> int:
    """Run a cell as a process of its own, its output appended to the cell's log.

    The process has its own session: Ctrl-C in a terminal reaches this process alone, which hands on one signal. Two
    signals would end the cell before it has saved.
    """
    with (cell.folder / LOG).open("a", encoding="utf-8") as log:
        print(f"$ {cell.command}", file=log, flush=True)
        command = [sys.executable, "-m", "train.main", *cell.flags]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        handed_on = False
        while True:
            try:
                return process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                if stop.received is not None and not handed_on:
                    process.send_signal(stop.received)
                    handed_on = True


def describe(outcome: Outcome) -> str:
    """Say in one line what has become of a cell."""
    if outcome.state == "finished":
        accuracy = outcome.metrics["accuracy"]
        return "finished" + (f", accuracy {accuracy:.1%}" if accuracy is not None else "")
    if outcome.state != "failed":
        return f"{outcome.state}: {outcome.message}"
    ending = f"exit code {outcome.exit_code}"
    if outcome.exit_code is not None and outcome.exit_code < 0:
        ending = f"killed by signal {-outcome.exit_code}"
    return f"failed, {ending}: {outcome.message}"


def _final_row(cell: Cell) -> dict[str, Any] | None:
    wanted = (cell.config.steps, cell.config.eval_split)
    rows = [row for row in read_jsonl(cell.folder / EVALS) if (row.get("step"), row.get("split")) == wanted]
    return rows[-1] if rows else None


def _saved_config(cell: Cell) -> dict[str, Any]:
    path = cell.folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _saved_end(cell: Cell) -> set[tuple[int, str]]:
    """The last step and the split of the evaluation that the newest start of a cell was to end with, if it began."""
    saved = _saved_config(cell)
    return {(saved["steps"], saved["eval_split"])} if saved else set()


def _environment(cell: Cell) -> tuple[dict[str, Any], int]:
    """The facts of the newest start without command lines, which hold paths of this machine; how often it started."""
    path = cell.folder / "environment.json"
    if not path.exists():
        return {}, 0
    facts = json.loads(path.read_text(encoding="utf-8"))
    starts = 1 + len(facts.pop("earlier_starts", []))
    facts.pop("command", None)
    return facts, starts


def _last_line(path: Path) -> str:
    if not path.exists():
        return "no output"
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "no output")
    return last if len(last) <= _LONGEST_MESSAGE else last[:_LONGEST_MESSAGE] + " ..."


def _flag_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(repr, value)) if isinstance(value, tuple) else str(value)
