"""`python -m train.export --workdir=RUN --out=FOLDER`: write a run's checkpoint as a Hugging Face folder."""

import dataclasses
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from train.exits import StoppedError, UsageError, run_guarded
from train.flags import check_values, flag_field, parse_flags

USAGE = "usage: python -m train.export --workdir=RUN --out=FOLDER [--flag=value ...]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """The flags of the command."""

    workdir: str = flag_field("Folder of the run")
    out: str = flag_field("Folder to write; is made, and must be empty where it exists")
    step: int | None = flag_field("Step of the checkpoint; none: the newest", None, at_least=0)
    adapter: bool = flag_field("Write the adapters alone, in the format of PEFT, instead of merging them", False)
    verify: bool = flag_field(
        "Load what was written and compare its logits with the run's; beyond the tolerance nothing is written", False
    )
    debug: bool = flag_field("Show the trace of an error", False)


def main(argv: Sequence[str]) -> None:
    given = parse_flags(ExportFlags, argv, tables={}, usage=USAGE)
    if missing := [f"--{name}" for name in ("workdir", "out") if not given.get(name)]:
        raise UsageError(f"{' and '.join(missing)} must be given. {USAGE}")
    flags = ExportFlags(**given)
    check_values(flags)
    from train.hf_folder import export

    # By default SIGTERM would end the process at once and leave gigabytes of an unfinished folder behind.
    former = signal.signal(signal.SIGTERM, _stop)
    try:
        trained, agreement = export(
            flags.workdir, flags.out, step=flags.step, adapter=flags.adapter, verify=flags.verify
        )
    finally:
        signal.signal(signal.SIGTERM, former)
    kind = "adapters" if flags.adapter else "model"
    print(f"wrote the {kind} of step {trained.step} of {flags.workdir} to {flags.out}")
    if agreement is not None:
        print(f"verified: {agreement}")


def _stop(number: int, frame: FrameType | None) -> None:
    raise StoppedError("the export was ended by a signal, nothing of it is left: run the same command again.", number)


if __name__ == "__main__":
    run_guarded(main, sys.argv)
