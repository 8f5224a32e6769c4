"""`python -m train.main --task=arith`: parse the flags, train."""

import sys
from collections.abc import Sequence

from smmd_jax import KERNELS, LOSSES
from smmd_jax.numeric_vocab import POLICIES
from train.config import parse_command_line
from train.exits import run_guarded
from train.optimizer import OPTIMIZERS, SCHEDULES
from train.tasks import TASKS

BACKBONES = ("tiny", "tiny-vlm", "smollm2-135m")

TABLES = {
    "task": TASKS,
    "backbone": BACKBONES,
    "loss": LOSSES,
    "kernel": KERNELS,
    "numeric_policy": POLICIES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}


def main(argv: Sequence[str]) -> None:
    config = parse_command_line(argv, tables=TABLES)
    # Imported after parsing: --help and a mistyped flag answer at once.
    from train.loop import train

    train(config, argv)


if __name__ == "__main__":
    run_guarded(main, sys.argv)
