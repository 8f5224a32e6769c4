"""Runs of `train.main` at tiny size, in this process or in one of its own, with a signal sent at a chosen place.

    python -m tests.runs SIGKILL@evaluate:2 examples.jsonl -- --task=arith --steps=12

is `python -m train.main --task=arith --steps=12` with the tiny model and data of `shrink` that kills itself when it
begins its second evaluation, and that writes down which examples it trains on; `-` leaves either out.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

import train.assembly
import train.checkpoint
import train.loop
from smmd_jax.backbones import PRESETS
from train.checkpoint import Checkpoints
from train.config import parse_command_line
from train.data import Batches
from train.exits import run_guarded
from train.log import read_jsonl
from train.main import TABLES, main
from train.tasks import TASKS

ROOT = Path(__file__).parents[1]
# About eleven examples fill a batch of two rows of 64, so an epoch of 84 ends within the eighth batch.
SIZES = {"train": 84, "interpolate": 24, "longer": 24}
FLAGS = ("--task=arith", "--steps=12", "--batch_size=2", "--max_length=64", "--log_every=1", "--eval_examples=8",
         "--eval_batch_size=4", "--checkpoint_every=4", "--learning_rate=0.01")  # fmt: skip
# What the resume tests must not lose: dropout's draws and the sums over micro-batches.
HARD = ("--dropout=0.1", "--grad_accum=2")

# Place -> the call that a fault is tied to, and whether it strikes before or after it.
PLACES = {
    "compile": (train.assembly.Run, "lower_step", "before"),
    "batch": (Batches, "__next__", "before"),
    "evaluate": (train.loop, "answer_prompts", "before"),
    "save begun": (Checkpoints, "save", "after"),
    "state written": (train.checkpoint, "write_manifest", "before"),
    "manifest written": (train.checkpoint, "write_manifest", "after"),
    "old step renamed": (train.checkpoint.shutil, "rmtree", "before"),
    "plots": (train.loop, "write_plots", "before"),
}


def shrink(setitem=dict.__setitem__, *, sizes=SIZES):
    """Make the tiny backbone smaller still and the arithmetic data few."""
    small = dict(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16)
    setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], **small))
    make_source = functools.partial(TASKS["arith"].make_source, examples=dict(sizes))
    setitem(TASKS, "arith", dataclasses.replace(TASKS["arith"], make_source=make_source))


def inject(fault, setattr=setattr):
    """Send this process the signal of `SIGTERM@place:n` (`SIGTERMx2` sends two) at the n-th call of the place."""
    what, _, where = fault.partition("@")
    name, _, times = what.partition("x")
    place, _, count = where.partition(":")
    owner, attribute, moment = PLACES[place]
    original = getattr(owner, attribute)
    calls = itertools.count(1)

    @functools.wraps(original)
    def faulty(*args, **kwargs):
        strikes = next(calls) == int(count or 1)
        result = original(*args, **kwargs) if moment == "after" else None
        for _ in range(int(times or 1) if strikes else 0):
            os.kill(os.getpid(), signal.Signals[name])
        return result if moment == "after" else original(*args, **kwargs)

    setattr(owner, attribute, faulty)


def record_examples(path, setattr=setattr):
    """Append {position in the stream: examples of the batch that begins there} to a file, for every batch."""
    original = Batches.__next__

    def recorded(self):
        position = self.get_state()["position"]
        batch = original(self)
        with open(path, "a") as file:
            file.write(json.dumps({str(position): self.examples.tolist()}) + "\n")
        return batch

    setattr(Batches, "__next__", recorded)


def examples_of(path):
    """Position -> examples; a batch that was drawn twice must have been the same."""
    found = {}
    for row in read_jsonl(path):
        for position, examples in row.items():
            assert found.setdefault(position, examples) == examples
    return found


def train_here(workdir, data_dir, *flags):
    """Call the loop in this process, on one of its devices unless --mesh says otherwise."""
    argv = ["main", *FLAGS, f"--workdir={workdir}", f"--data_dir={data_dir}", *flags]
    train.loop.train(parse_command_line(argv, tables=TABLES), argv)


def captured(function, *args):
    """Call a function; returns what it wrote to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        function(*args)
    return out.getvalue(), err.getvalue()


def start_child(command, **variables):
    """Start `python COMMAND` with the environment of this test run and these variables."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_child(command, **variables):
    """Run `python COMMAND` to its end; returns it with its return code, stdout and stderr."""
    with start_child(command, **variables) as child:
        stdout, stderr = child.communicate(timeout=600)
    return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


def tiny_command(workdir, data_dir, *flags, fault="-", examples="-"):
    """The arguments of a python that trains as `train_here` does."""
    folders = [f"--workdir={workdir}", f"--data_dir={data_dir}"]
    return ["-m", "tests.runs", fault, examples, "--", *FLAGS, *folders, *flags]


def train_there(workdir, data_dir, *flags, fault="-", examples="-", **variables):
    """Run the tiny training in a process of its own."""
    return run_child(tiny_command(workdir, data_dir, *flags, fault=fault, examples=examples), **variables)


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def train_together(workdir, data_dir, *flags, faults=("-", "-"), own_flags=((), ()), devices=4, timeout=300):
    """Run the tiny training in two processes of `devices` simulated devices each; returns how each of them ended."""
    port = free_port()
    children = []
    for number, (fault, own) in enumerate(zip(faults, own_flags, strict=True)):
        place = (f"--coordinator=localhost:{port}", "--num_processes=2", f"--process_id={number}")
        command = tiny_command(workdir, data_dir, *flags, *place, *own, fault=fault)
        children.append(start_child(command, XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}"))
    ended = []
    try:
        # Read both at once: a child whose pipe is full stops, and the other one waits for it.
        with concurrent.futures.ThreadPoolExecutor(len(children)) as pool:
            for child, (stdout, stderr) in zip(
                children, pool.map(lambda child: child.communicate(timeout=timeout), children), strict=True
            ):
                ended.append(subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr))
    finally:
        for child in children:
            child.kill()
    return ended


def contents(folder):
    """Every file below a folder with its bytes."""
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def rows_of(workdir, name="metrics.jsonl"):
    return read_jsonl(Path(workdir) / name)


def numbers_of(workdir):
    """What of `metrics.jsonl` does not depend on the clock: floats as hex, so that equal means bitwise equal."""
    clock = {"tokens_per_second", "input_wait", "compile_seconds"}
    return [
        {name: value.hex() if isinstance(value, float) else value for name, value in row.items() if name not in clock}
        for row in rows_of(workdir)
    ]


def steps_of(workdir):
    """The saved steps, verified or not."""
    folder = Path(workdir) / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.exists() else []


def state_of(workdir, data_dir, *flags):
    """The newest verified state as path -> array, and its step."""
    argv = ["main", *FLAGS, f"--workdir={workdir}", f"--data_dir={data_dir}", *flags]
    run = train.assembly.assemble(parse_command_line(argv, tables=TABLES))
    with Checkpoints(Path(workdir) / "checkpoints", writer=False) as checkpoints:
        restored = checkpoints.restore(run.state_like)
    leaves = jax.tree_util.tree_leaves_with_path(restored.state)
    return restored.step, {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def same_state(left, right):
    """Whether two results of `state_of` are the same bytes."""
    (step, leaves), (other_step, others) = left, right
    return step == other_step and {k: v.tobytes() for k, v in leaves.items()} == {
        k: v.tobytes() for k, v in others.items()
    }


if __name__ == "__main__":
    fault, examples, separator, *rest = sys.argv[1:]
    if separator != "--":
        sys.exit(__doc__)
    shrink()
    if fault != "-":
        inject(fault)
    if examples != "-":
        record_examples(examples)
    run_guarded(main, ["main", *rest])
