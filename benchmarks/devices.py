"""The files of `benchmarks.run`, one for each kind of device, and the table of goals with a column for each."""

import datetime
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.goals import Measured
from benchmarks.timing import describe_machine, version_of
from train.files import replace_file

PLATFORMS = ("cpu", "gpu", "tpu")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers", "ntloss", "libtpu")
UNMEASURED = "unmeasured"

Device = Mapping[str, Any]


def default_path() -> Path:
    """Where results go: runs/benchmarks/KIND.json."""
    kind = re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")
    return Path("runs") / "benchmarks" / f"{kind}.json"


def read_measured(path: Path) -> dict[str, Any]:
    """Read a device's file, or begin one of this device: before anything is measured, since that takes minutes.

    Raises:
      ValueError: the file is that of another kind of device or of another machine, or no such file.
    """
    here = {
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "device_count": len(jax.devices()),
        "machine": describe_machine(),
    }
    if not path.exists():
        return {**here, "measurements": {}}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        found = {key: result.get(key) for key in here if result.get(key) != here[key]}
        result["measurements"].keys()
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} holds no results of benchmarks.run: choose another --json.") from error
    if found:
        raise ValueError(f"{path} holds results of {found}, and this is {here}: choose another --json.")
    return result


def write_measured(path: Path, name: str, measured: Measured, *, command: str, quick: bool) -> None:
    """Put one measurement into a device's file; the other measurements of the file stay.

    Raises:
      ValueError: see `read_measured`.
    """
    result = read_measured(path)
    result["measurements"][name] = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "quick": quick,
        "load": [round(load, 1) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "versions": {"python": platform.python_version(), **{package: version_of(package) for package in PACKAGES}},
        "rows": measured.rows,
        "goals": [goal.to_json() for goal in measured.goals],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(result, indent=1) + "\n")


def goal_rows(devices: Sequence[Device]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of goals: a column for each kind of device, and for each platform without one."""
    columns: list[tuple[str, Device | None]] = []
    for name in PLATFORMS:
        found = [device for device in devices if device["platform"] == name]
        columns += [(_label(device), device) for device in found] or [(name.upper(), None)]
    bounds: dict[str, str] = {}
    for device in devices:
        for measurement in device["measurements"].values():
            bounds |= {goal["name"]: goal["bound"] for goal in measurement["goals"]}
    head = ["quantity", "goal", *(label for label, _ in columns)]
    return head, [[name, bound, *(_cell(device, name) for _, device in columns)] for name, bound in bounds.items()]


def _label(device: Device) -> str:
    kind = device["device_kind"]
    return device["platform"].upper() if kind == device["platform"] else f"{device['platform'].upper()}, {kind}"


def _cell(device: Device | None, name: str) -> str:
    for measurement in device["measurements"].values() if device else ():
        for goal in measurement["goals"]:
            if goal["name"] == name:
                return goal["state"] if goal["value"] is None else f"{goal['value']:.2f}, {goal['state']}"
    return UNMEASURED
