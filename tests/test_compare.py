"""The grid of runs: what it runs and skips, what it refuses, and its arithmetic against a hand calculation."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import train.compare
import train.config
from train.aggregate import comparison, mean_and_deviation, paired_difference, to_markdown
from train.compare import main
from train.config import save_config
from train.exits import RunError, StoppedError, UsageError
from train.grid import ATTEMPTS, LOG, launch_process, make_cells, read_outcome
from train.log import read_jsonl, write_jsonl
from train.main import TABLES

ROOT = Path(__file__).parents[1]
ACCURACY = {("ce", 0): 0.5, ("ce", 1): 0.7, ("smmd", 0): 0.6, ("smmd", 1): 0.9}


class Launcher:
    """Stands for the trainings: writes what a run leaves behind, and remembers which cells it ran."""

    def __init__(self, failing=(), stop_at=None, eval_rows=True):
        self.failing, self.stop_at, self.eval_rows = set(failing), stop_at, eval_rows
        self.ran = []

    def __call__(self, cell, stop):
        key = (cell.config.loss, cell.config.seed)
        self.ran.append(key)
        save_config(cell.config)
        starts = read_jsonl(cell.folder / ATTEMPTS)
        environment = {"command": ["/home/me/main.py"], "system": "Linux", "cpu_count": 2, "device_count": 1,
                       "device_kind": "cpu", "versions": {"python": "3", "jax": "1", "flax": "2", "optax": "3"},
                       "git": {"commit": "abc"}, "earlier_starts": starts}  # fmt: skip
        (cell.folder / "environment.json").write_text(json.dumps(environment))
        if key in self.failing:
            (cell.folder / LOG).write_text("step 3\nerror: the loss of step 4 is not finite.\n\n")
            return 6
        if key == self.stop_at:
            write_jsonl(cell.folder / "metrics.jsonl", [{"step": 1}, {"step": 5}])
            stop.received = signal.SIGTERM
            return 143
        if self.eval_rows:
            row = {"step": cell.config.steps, "split": "interpolate", "n": 40, "accuracy": ACCURACY.get(key, 0.25),
                   "mae": 2.0 + cell.config.seed, "median_error": 1.0, "r2": 0.5, "parse_failures": 4}  # fmt: skip
            write_jsonl(cell.folder / "eval.jsonl", [{**row, "step": 3}, row])
        return 0


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Run `train.compare` with stubbed trainings."""
    folder = tmp_path / "grid"

    def run(*flags, launcher=None):
        launcher = launcher or Launcher()
        monkeypatch.setattr(train.compare, "launch_process", launcher)
        default = ("--task=arith", "--losses=ce,smmd", "--seeds=0,1", "--steps=10", f"--workdir={folder}")
        main(["compare.py", *default, *flags])
        return launcher

    run.folder = folder
    run.result = lambda: json.loads((folder / "compare.json").read_text())
    return run


def test_every_cell_runs_once_in_complete_pairs_and_is_not_repeated(grid, capsys):
    assert grid().ran == [("ce", 0), ("smmd", 0), ("ce", 1), ("smmd", 1)]
    assert grid().ran == []
    assert "[4/4] smmd seed 1: finished before" in capsys.readouterr().out


def test_aggregates_equal_a_hand_calculation(grid):
    grid()
    result = grid.result()
    summary = result["summary"]["smmd"]["metrics"]
    assert result["summary"]["smmd"]["n"] == 2
    assert summary["accuracy"]["mean"] == pytest.approx(0.75)
    assert summary["accuracy"]["deviation"] == pytest.approx(0.15 * 2**0.5)  # sqrt(2 * 0.15^2 / 1)
    assert summary["mae"] == {"mean": 2.5, "deviation": pytest.approx(0.5**0.5)}
    difference = result["differences"]["smmd"]["accuracy"]
    assert (difference["n"], difference["seeds"]) == (2, [0, 1])
    assert difference["mean"] == pytest.approx(0.15)
    # Of the four resamples of two seeds one is the smaller difference twice, one the larger twice: the 95 % interval
    # runs from one to the other.
    assert [difference["low"], difference["high"]] == pytest.approx([0.1, 0.2])


def test_the_table_shows_means_differences_command_and_machine(grid, capsys):
    grid("--learning_rate=0.002")
    text = (grid.folder / "compare.md").read_text()
    assert capsys.readouterr().out.endswith(text)
    assert "| smmd | 2 | 75.00 ± 21.21 | 2.500 ± 0.707 | 1.00 ± 0.00 | 0.5000 ± 0.0000 | 4.0 ± 0.0 |" in text
    assert "| smmd | 2 | +15.00 [+10.00, +20.00] | +0.000 [+0.000, +0.000] |" in text
    assert "python -m train.compare --task=arith" in text and "--learning_rate=0.002" in text
    assert "Machine: Linux, 2 processors, 1 x cpu; python 3, jax 1, flax 2, optax 3." in text
    assert "Not in any mean" not in text


def test_the_time_gap_has_a_column_where_answers_are_times(grid):
    grid()
    text = (grid.folder / "compare.md").read_text()
    assert "time gap" not in text
    for path in grid.folder.glob("*/eval.jsonl"):
        write_jsonl(path, [{**row, "time_gap": 30.0} for row in read_jsonl(path)])
    grid("--report_only")
    head, first = ((grid.folder / "compare.md").read_text().splitlines()[row] for row in (2, 4))
    assert head.startswith("| loss | seeds | accuracy, % | MAE | median error | time gap | R2 |")
    assert "| 1.00 ± 0.00 | 30.00 ± 0.00 | 0.5000" in first
    assert "| loss - ce | n | accuracy, points | MAE | time gap |" in (grid.folder / "compare.md").read_text()


def test_the_record_of_a_cell_says_how_to_get_it_and_holds_no_path_of_the_machine(grid):
    grid("--sigma=1,2", "--tensorboard", "--warmup_steps=none")
    cell = grid.result()["cells"][1]
    assert (cell["loss"], cell["seed"], cell["state"], cell["exit_code"]) == ("smmd", 0, "finished", 0)
    assert cell["config"]["sigma"] == [1.0, 2.0] and cell["metrics"]["step"] == 10
    assert cell["versions"]["jax"] == "1" and cell["machine"]["cpu_count"] == 2 and cell["seconds"] >= 0
    assert cell["command"].startswith("python -m train.main --task=arith --sigma=1.0,2.0 --steps=10 --warmup_steps=")
    assert "/home/me" not in (grid.folder / "compare.json").read_text()


def test_the_flags_of_a_cell_give_its_config():
    given = {"task": "arith", "sigma": (1.0, 2.5), "alpha": None, "tensorboard": True, "learning_rate": 1e-5}
    (cell,) = make_cells(given, losses=["smmd"], seeds=[3], workdir="runs/x", tables=TABLES)
    assert train.config.parse_command_line(["main", *cell.flags], tables=TABLES) == cell.config
    assert (cell.config.seed, cell.config.workdir, cell.config.sigma) == (3, "runs/x/smmd-seed3", (1.0, 2.5))


def test_a_failed_cell_is_shown_with_code_and_last_line_never_averaged_and_tried_again(grid, capsys):
    with pytest.raises(RunError, match=r"1 of 4 cells failed \(smmd seed 0\)") as caught:
        grid(launcher=Launcher(failing=[("smmd", 0)]))
    assert caught.value.exit_code == 1
    ending = "failed, exit code 6: error: the loss of step 4 is not finite."
    assert f"- smmd seed 0: {ending}" in capsys.readouterr().out
    result = grid.result()
    assert result["summary"]["smmd"]["n"] == 1
    assert result["summary"]["smmd"]["metrics"]["accuracy"] == {"mean": 0.9, "deviation": None}
    assert result["differences"]["smmd"]["accuracy"]["seeds"] == [1]
    assert result["differences"]["smmd"]["accuracy"]["low"] is None
    text = to_markdown(result)
    assert "| smmd | 1 | 90.00 | 3.000 |" in text and "| smmd | 1 | +20.00 | +0.000 |" in text
    with pytest.raises(RunError, match="The same command without --report_only tries them again"):
        grid("--report_only")
    assert grid().ran == [("smmd", 0)]
    assert grid.result()["summary"]["smmd"]["n"] == 2


def test_an_interrupted_grid_goes_on_where_it_stopped(grid):
    with pytest.raises(StoppedError) as caught:
        grid(launcher=Launcher(stop_at=("smmd", 0)))
    assert caught.value.exit_code == 143
    endings = {(cell["loss"], cell["seed"]): cell["ending"] for cell in grid.result()["cells"]}
    assert endings["smmd", 0] == "unfinished: stopped after step 5 of 10"
    assert endings["ce", 1] == endings["smmd", 1] == "missing: not begun"
    assert grid().ran == [("smmd", 0), ("ce", 1), ("smmd", 1)]
    assert len(read_jsonl(grid.folder / "smmd-seed0" / ATTEMPTS)) == 2


def test_a_run_that_ends_well_without_its_evaluation_has_failed(grid):
    with pytest.raises(RunError):
        grid("--losses=ce", "--seeds=0", launcher=Launcher(eval_rows=False))
    assert grid.result()["cells"][0]["ending"] == (
        "failed, exit code 0: ended without an evaluation of interpolate at step 10"
    )


def test_more_steps_continue_the_cells_of_a_shorter_grid(grid):
    grid("--losses=ce", "--seeds=0")
    assert grid("--losses=ce", "--seeds=0", "--steps=20").ran == [("ce", 0)]


def test_a_report_of_steps_that_no_cell_holds_is_refused_and_the_former_one_stays(grid):
    grid("--losses=ce")
    before = (grid.folder / "compare.md").read_text()
    with pytest.raises(UsageError, match=r"run with --steps=12 .*: give --steps=10 --eval_split=interpolate, as they"):
        grid("--losses=ce", "--steps=12", "--report_only")
    assert (grid.folder / "compare.md").read_text() == before
    write_jsonl(grid.folder / "ce-seed0" / "metrics.jsonl", [{"step": 10}])
    with pytest.raises(UsageError, match="holds step 10 and --steps=6 asks for fewer"):
        grid("--losses=ce", "--steps=6")
    assert (grid.folder / "compare.md").read_text() == before


def test_the_report_of_a_grid_that_is_being_prolonged_says_which_cells_are_behind(grid):
    grid("--losses=ce")
    grid("--losses=ce", "--seeds=0", "--steps=20")
    grid("--losses=ce", "--steps=20", "--report_only")
    assert [cell["ending"] for cell in grid.result()["cells"]] == [
        "finished, accuracy 50.0%", "unfinished: ended with step 10, evaluated on interpolate"
    ]  # fmt: skip
    assert grid.result()["summary"]["ce"]["n"] == 1


def test_seconds_are_left_out_where_an_attempt_was_not_timed(grid):
    grid("--losses=ce", "--seeds=0")
    (grid.folder / "ce-seed0" / ATTEMPTS).unlink()  # as after a kill of the grid, or a run begun by hand
    grid("--losses=ce", "--seeds=0", "--report_only")
    assert grid.result()["cells"][0]["seconds"] is None
    assert grid.result()["summary"]["ce"]["metrics"]["minutes"] == {"mean": None, "deviation": None}


def test_report_only_runs_nothing(grid):
    assert grid("--report_only").ran == []
    assert {cell["state"] for cell in grid.result()["cells"]} == {"missing"}
    assert "| ce | 0 | - |" in (grid.folder / "compare.md").read_text()
    assert "--report_only" not in grid.result()["command"]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--losses=ce,smd"], "loss=smd: not known; did you mean smmd? Known: ce, smmd"),
        (["--losses="], "wanted at least one"),
        (["--losses=ce,ce"], "each named once"),
        (["--seeds=0,x"], "seeds=x: wanted a whole number"),
        (["--seeds=-1"], "seed=-1: wanted a whole number of at least 0"),
        (["--loss=ce"], "--loss is not a flag; did you mean --losses?"),
        (["--learning_rte=1"], "did you mean --learning_rate?"),
        (["--batch_size=7", "--grad_accum=2"], "multiple"),
        (["--task=arit"], "did you mean arith?"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(grid, flags, words):
    launcher = Launcher()
    with pytest.raises(UsageError) as caught:
        grid(*flags, launcher=launcher)
    assert words in str(caught.value) and launcher.ran == [] and not grid.folder.exists()


def test_a_folder_that_holds_another_grid_is_refused(grid):
    grid()
    with pytest.raises(UsageError, match=r"learning_rate: \S+ -> 0.01"):
        grid("--learning_rate=0.01")
    with pytest.raises(UsageError, match=r"was evaluated with --eval_examples=\d+"):
        grid("--eval_examples=0", "--seeds=0,1,2")


def test_mean_and_deviation_match_numpy():
    values = np.random.default_rng(0).normal(size=7)
    mean, deviation = mean_and_deviation(values.tolist())
    assert mean == pytest.approx(values.mean()) and deviation == pytest.approx(values.std(ddof=1))


def test_the_bootstrap_interval_of_many_seeds_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    found = paired_difference(dict.fromkeys(range(400), 0.0), dict(enumerate(values)))
    half = 1.96 * values.std() / 20
    assert [found["low"], found["high"]] == pytest.approx([values.mean() - half, values.mean() + half], abs=0.02)


def test_a_metric_that_some_cell_lacks_has_no_mean_and_no_pair(grid):
    grid()
    path = grid.folder / "smmd-seed1" / "eval.jsonl"
    write_jsonl(path, [{**row, "mae": None} for row in read_jsonl(path)])
    grid("--report_only")
    assert grid.result()["summary"]["smmd"]["metrics"]["mae"] == {"mean": None, "deviation": None}
    assert grid.result()["differences"]["smmd"]["mae"]["seeds"] == [0]


def test_there_are_no_differences_without_cross_entropy(grid):
    grid("--losses=smmd,mmd")
    assert grid.result()["differences"] == {} and "Difference" not in (grid.folder / "compare.md").read_text()


def test_a_grid_of_losses_of_ones_own_has_folders_that_can_be_names(tmp_path):
    cells = make_cells({"task": "arith"}, losses=["my.losses:huber"], seeds=[0], workdir=str(tmp_path), tables=TABLES)
    assert cells[0].folder == tmp_path / "my.losses-huber-seed0"
    assert comparison(cells, [read_outcome(cells[0])], command="x")["cells"][0]["state"] == "missing"


SLEEPER = """
import signal, sys, time
def stop(number, frame):
    print("stopping", number, flush=True)
    time.sleep(1)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("running", flush=True)
time.sleep(60)
"""


def test_a_signal_reaches_the_running_cell_once(tmp_path, monkeypatch):
    """A second one would end a run before it has saved."""
    (cell,) = make_cells({"task": "arith"}, losses=["ce"], seeds=[0], workdir=str(tmp_path), tables=TABLES)
    cell.folder.mkdir()
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: real([sys.executable, "-c", SLEEPER], **options))

    class Stop:
        @property
        def received(self):
            return signal.SIGTERM if "running" in (cell.folder / LOG).read_text().splitlines() else None

    assert launch_process(cell, Stop()) == 143
    lines = (cell.folder / LOG).read_text().splitlines()
    assert lines == [f"$ {cell.command}", "running", "stopping 15"]


@pytest.mark.slow
def test_two_real_trainings_and_their_table(tmp_path):
    flags = ["--task=arith", "--losses=ce,smmd", "--seeds=0", "--steps=4", "--batch_size=4", "--eval_examples=8",
             f"--workdir={tmp_path}"]  # fmt: skip
    environment = {**os.environ, "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "train.compare", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "compare.json").read_text())
    assert [cell["state"] for cell in result["cells"]] == ["finished", "finished"]
    assert all(cell["metrics"]["n"] == 8 and cell["seconds"] > 1 for cell in result["cells"])
    assert "| smmd | 1 | " in done.stdout
    began = time.monotonic()
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0 and again.stdout.count("finished before") == 2
    assert time.monotonic() - began < sum(cell["seconds"] for cell in result["cells"])
