"""torch and its kind, which the library is measured beside: where they are installed, and on the device jax is on."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax

# What stands in a table where a column cannot be measured.
NOT_INSTALLED = "not installed"


def find_peers(*names: str) -> list[ModuleType] | None:
    """Import packages to compare with; None, with the reason on stderr, where one is missing or has no such device."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        modules = [importlib.import_module(name) for name in names]
        torch_device(importlib.import_module("torch"))
    except (ImportError, LookupError) as error:
        print(f"columns of {', '.join(names)} are left out: {error}", file=sys.stderr)
        return None
    return modules


def torch_device(torch: ModuleType) -> str:
    """Name the device of torch that is the same as jax's.

    Raises:
      LookupError: this torch has none.
    """
    platform = jax.default_backend()
    if platform == "cpu":
        return "cpu"
    if platform == "gpu" and torch.cuda.is_available():
        return "cuda"
    raise LookupError(f"this build of torch does not run on the {platform} that jax runs on")


def synchronized(torch: ModuleType, call: Callable[[], Any]) -> Callable[[], Any]:
    """Make a call of torch that returns when its work is done, as `jax.block_until_ready` does."""
    if torch_device(torch) == "cpu":
        return call

    def wait() -> Any:
        result = call()
        torch.cuda.synchronize()
        return result

    return wait


def missing_rows(setting: str, programs: Sequence[str], column: str) -> list[dict[str, Any]]:
    """Rows of a table for programs that are not installed."""
    return [{"setting": setting, "program": name, column: NOT_INSTALLED} for name in programs]
