"""How long the training loop waits for its input: the share that its own records give, over the default run."""

import contextlib
import io
import tempfile
from pathlib import Path

from benchmarks.goals import Goal, Measured
from train.config import parse_command_line
from train.log import METRICS, read_jsonl
from train.loop import train
from train.main import TABLES

SETTING = "train.main --task=arith"


def measure(*, quick: bool, rounds: int) -> Measured:
    """Train for some steps and read the last row of metrics.jsonl; `rounds` is of no use here."""
    steps = 6 if quick else 200
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        argv = ["train.main", "--task=arith", f"--steps={steps}", "--eval_every=0", "--eval_examples=4",
                f"--workdir={workdir}"]  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            train(parse_command_line(argv, tables=TABLES), argv)
        last = read_jsonl(workdir / METRICS)[-1]
    percent = 100 * last["input_wait"]
    row = {
        "setting": f"{SETTING} --steps={steps}",
        "tokens/s": round(last["tokens_per_second"], 1),
        "input wait, %": round(percent, 2),
    }
    return Measured(rows=[row], goals=[Goal("input wait of the default run, % of the time", percent, at_most=2)])
