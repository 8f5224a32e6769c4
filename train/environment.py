"""What a run ran on: versions, devices, command line and revision, for `environment.json`; secrets are taken out."""

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from train.files import replace_file

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets", "array-record",
    "tokenizers", "safetensors", "numpy", "matplotlib", "libtpu",
)  # fmt: skip
# An allow-list: the whole environment holds secrets, these two change what a run computes.
VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS")

_SECRETS = (
    (re.compile(r"\b(?:hf|ghp|gho|ghs|github_pat|glpat|sk|xox[abp])[_-][A-Za-z0-9_-]{16,}"), "[redacted]"),
    (re.compile(r"(?<=://)[^/\s@]+(?=@)"), "[redacted]"),
    # `num_tokens=500` is no secret: the name must end in the singular word and the value be long.
    (
        re.compile(r"""(?i)((?:token|secret|password|passwd|api[_-]?key)["']?[=:]\s*["']?)[^\s"'&]{12,}"""),
        r"\1[redacted]",
    ),
)


def redact(text: str) -> str:
    """Replace what looks like an access token, a password or the user part of a URL by `[redacted]`.

    Example:
        >>> redact("--data_dir=https://me:secret@host/x")
        '--data_dir=https://[redacted]@host/x'
    """
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def installed_versions() -> dict[str, str | None]:
    """Return the version of Python and of every package that a result depends on; None where it is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def git_revision(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the commit of the checkout that holds `folder` and whether files differ from it; None outside of git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def describe_environment(argv: Sequence[str]) -> dict[str, Any]:
    """Collect versions, devices, command line, revision, processors and the time of one start, free of secrets."""
    import jax

    devices = jax.devices()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [redact(argument) for argument in argv],
        "git": git_revision(Path(__file__).parent),
        "versions": installed_versions(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "process_count": jax.process_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "variables": {name: redact(os.environ[name]) for name in VARIABLES if name in os.environ},
    }


def write_environment(folder: str | os.PathLike[str], argv: Sequence[str]) -> dict[str, Any]:
    """Write `environment.json` for this start into `folder`; the record of former starts moves to `earlier_starts`.

    Args:
        folder: the run folder.
        argv: the command line, program first.

    Returns:
        What was written.
    """
    path = Path(folder) / "environment.json"
    earlier: list[Any] = []
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        earlier = [*before.pop("earlier_starts", []), before]
    environment = {**describe_environment(argv), "earlier_starts": earlier}
    replace_file(path, json.dumps(environment, indent=2) + "\n")
    return environment
