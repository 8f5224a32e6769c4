"""`python -m train.plan --backbone=qwen2.5-1.5b --topology=v5e:2x4`: what a step takes on TPUs that are not there."""

import json
import os
import shlex
import sys
from collections.abc import Sequence

from smmd_jax import LOSSES
from smmd_jax.backbones import PRESETS
from train.exits import StorageError, UsageError, run_guarded
from train.files import replace_file
from train.flags import check_names, parse_flags
from train.optimizer import OPTIMIZERS
from train.plan_config import PlanConfig, complete
from train.plan_text import describe_config, describe_plan

USAGE = "usage: python -m train.plan --backbone=NAME [--topology=v5e:2x4] [--flag=value ...]"
TABLES = {"backbone": PRESETS, "loss": LOSSES, "optimizer": OPTIMIZERS}


def main(argv: Sequence[str]) -> None:
    given = parse_flags(PlanConfig, argv, tables=TABLES, usage=USAGE)
    check_names(given, PlanConfig, tables={name: TABLES[name] for name in TABLES if name in given})
    config = complete(given)
    folder = os.path.dirname(os.path.abspath(config.json))
    if config.json and not os.path.isdir(folder):
        raise UsageError(f"json={config.json}: there is no folder {folder}.")
    # The slice is compiled for; no device of this machine is used.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from train.planning import make_plan

    print(describe_config(config), flush=True)
    plan = make_plan(config, say=lambda line: print(line, flush=True))
    print(describe_plan(plan))
    if config.json:
        command = f"python -m train.plan {shlex.join(argv[1:])}"
        try:
            replace_file(config.json, json.dumps({**plan, "command": command}, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise StorageError(f"cannot write {config.json}: {error}.") from error


if __name__ == "__main__":
    run_guarded(main, sys.argv)
