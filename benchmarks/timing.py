"""Times of several programs side by side: interleaved, the order reversed every other round, medians and minima."""

import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Times(NamedTuple):
    """Seconds of every round: on the clock, and of all processors together."""

    wall: list[float]
    processor: list[float]


def interleave(programs: Mapping[str, Callable[[], Any]], *, rounds: int) -> dict[str, Times]:
    """Time each program once a round, after one warm-up each.

    The machine may be shared: only ratios within one call mean anything, the minimum is the least disturbed, and the
    processors' time hardly depends on what else runs (but for programs whose threads spin while they wait).
    """
    for program in programs.values():
        program()
    times = {name: Times([], []) for name in programs}
    for number in range(rounds):
        for name in list(programs)[:: -1 if number % 2 else 1]:
            began, busy = time.perf_counter(), time.process_time()
            programs[name]()
            times[name].wall.append(time.perf_counter() - began)
            times[name].processor.append(time.process_time() - busy)
    return times


def summarise(times: Mapping[str, Times], base: str) -> dict[str, dict[str, float]]:
    """Median and minimum in milliseconds, the median of the processors' time, and two ratios to a base program.

    `ratio` is the median of the ratios within a round: what slows a whole round down drops out. `ratio_of_minima` is
    that of the least disturbed times.
    """
    return {
        name: {
            "median_ms": 1e3 * statistics.median(wall),
            "min_ms": 1e3 * min(wall),
            "processor_ms": 1e3 * statistics.median(processor),
            "ratio": statistics.median(one / other for one, other in zip(wall, times[base].wall, strict=True)),
            "ratio_of_minima": min(wall) / min(times[base].wall),
        }
        for name, (wall, processor) in times.items()
    }


def write_rows(path: Path, command: str, rows: Sequence[Mapping[str, Any]], versions: Mapping[str, str | None]) -> None:
    """Write rows that `benchmarks.report` makes a table of."""
    result = {
        "command": command,
        "machine": f"{describe_machine()}, {jax.default_backend()}",
        "versions": versions,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_machine() -> str:
    """Processor and cores of this machine, in words."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores"
