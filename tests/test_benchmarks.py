"""The benchmarks: they run at tiny size, say what is not installed, and file what they found by device."""

import json
import os
import subprocess
import sys

import jax
import pytest

from benchmarks import decode, devices, input_wait, loss_cost, peers, run, step
from benchmarks.devices import UNMEASURED, goal_rows, write_measured
from benchmarks.goals import Goal, Measured
from benchmarks.report import BLOCKS, render
from benchmarks.timing import Times, summarise
from tests.runs import ROOT, shrink


def test_ratios_are_medians_within_a_round_so_that_a_slow_round_drops_out():
    times = {"base": Times([1.0, 10.0, 1.0], [1.0] * 3), "ours": Times([2.0, 20.0, 2.0], [3.0] * 3)}
    found = summarise(times, "base")["ours"]
    assert found["ratio"] == found["ratio_of_minima"] == 2.0
    assert found["median_ms"] == 2000.0 and found["processor_ms"] == 3000.0


@pytest.mark.parametrize(
    "goal, state",
    [
        (Goal("a", 1.02, at_most=1.02), "met"),
        (Goal("a", 1.024, at_most=1.02), "met"),  # printed with two decimals, and judged as printed
        (Goal("a", 1.03, at_most=1.02), "missed"),
        (Goal("a", 0.59, at_least=0.6), "missed"),
        (Goal("a", 0.6, at_least=0.6), "met"),
        (Goal("a", None, at_least=0.6), "not measured"),
    ],
)
def test_a_goal_is_met_missed_or_not_measured(goal, state):
    assert goal.state == state


def test_a_goal_has_one_bound():
    with pytest.raises(ValueError, match="one of at_most and at_least"):
        Goal("a", 1.0)


def without_peers(monkeypatch, *modules):
    for module in modules:
        monkeypatch.setattr(module, "find_peers", lambda *names: None)


@pytest.mark.slow
def test_a_quick_run_prints_the_tables_and_says_what_is_not_installed(tmp_path, monkeypatch, capsys):
    without_peers(monkeypatch, step, decode)
    path = tmp_path / "here.json"
    run.main(["--quick", "--only=step,decode", f"--json={path}"])
    text = capsys.readouterr().out
    assert "| transformers, CE | not installed |" in text and "| ours, CE + SMMD |" in text
    assert "| step, tiny, 16 rows of 128: speed to transformers | at least 0.6 | not measured |" in text
    written = json.loads(path.read_text())
    assert written["platform"] == "cpu" and set(written["measurements"]) == {"step", "decode"}
    assert written["measurements"]["step"]["quick"] and written["measurements"]["step"]["versions"]["jax"]


@pytest.mark.slow
def test_the_losses_run_at_tiny_size(monkeypatch):
    without_peers(monkeypatch, loss_cost)
    measured = loss_cost.measure(quick=True, rounds=1)
    assert len(measured.goals) == len(loss_cost.GOALS)
    # Torch is asked for in two of them.
    assert sum(goal.value is None for goal in measured.goals) == 2
    assert [row["program"] for row in measured.rows].count("torch CE") == 3


@pytest.mark.slow
def test_the_wait_for_input_is_read_from_the_records_of_a_run(monkeypatch):
    shrink(monkeypatch.setitem)
    measured = input_wait.measure(quick=True, rounds=1)
    assert 0 <= measured.rows[0]["input wait, %"] < 100 and measured.rows[0]["tokens/s"] > 0


@pytest.mark.parity
@pytest.mark.slow
def test_our_step_and_that_of_transformers_start_from_the_same_loss_and_generate_the_same_tokens():
    measured = step.measure(quick=True, rounds=1) + decode.measure(quick=True, rounds=1)
    for setting in step.SETTINGS:
        first = [row["first loss"] for row in measured.rows if row["setting"] == setting and row.get("first loss")]
        assert len(first) == 2 and first[0] == pytest.approx(first[1], abs=1e-4)
    assert [row["same tokens"] for row in measured.rows if row.get("same tokens") is not None] == [1.0, 1.0]


def test_an_unknown_measurement_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(["--only=speed"])
    assert stop.value.code == 2
    assert "wanted loss, step, decode, input" in capsys.readouterr().err


def test_a_torch_that_does_not_run_on_the_device_of_jax_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(LookupError, match="does not run on the tpu"):
        peers.torch_device(None)


MEASURED = Measured(rows=[{"program": "ours", "ms": 1.5}], goals=[Goal("step: speed", 0.8, at_least=0.6)])


def test_results_of_one_device_merge_and_those_of_another_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "device.json"
    write_measured(path, "step", MEASURED, command="c", quick=False)
    write_measured(path, "loss", MEASURED, command="d", quick=False)
    assert set(json.loads(path.read_text())["measurements"]) == {"step", "loss"}
    monkeypatch.setattr(devices, "describe_machine", lambda: "another machine")
    with pytest.raises(ValueError, match="choose another --json"):
        write_measured(path, "step", MEASURED, command="c", quick=False)
    monkeypatch.setattr(run, "MEASUREMENTS", {"step": run.Measurement(lambda **_: pytest.fail("measured"), "steps")})
    with pytest.raises(SystemExit, match=r"error: .* this is .*: choose another --json"):
        run.main([f"--json={path}"])
    path.write_text("[]")
    with pytest.raises(SystemExit, match=r"error: .* holds no results of benchmarks.run"):
        run.main([f"--json={path}"])


def test_platforms_without_results_are_unmeasured(tmp_path):
    path = tmp_path / "device.json"
    write_measured(path, "step", MEASURED, command="c", quick=False)
    device = json.loads(path.read_text())
    head, [row] = goal_rows([device])
    assert head == ["quantity", "goal", "CPU", "GPU", "TPU"]
    assert row == ["step: speed", "at least 0.6", "0.80, met", UNMEASURED, UNMEASURED]
    other = {**device, "platform": "gpu", "device_kind": "H100", "measurements": {}}
    head, [row] = goal_rows([device, other])
    assert head[2:] == ["CPU", "GPU, H100", "TPU"] and row[3] == UNMEASURED


def test_the_page_shows_each_measurement_with_its_command_and_refuses_quick_ones(tmp_path):
    path = tmp_path / "device.json"
    write_measured(path, "step", MEASURED, command="python -m benchmarks.run", quick=False)
    page = "<!-- results: measured-step -->\n<!-- end of results -->\n"
    text = render(page, {"device": json.loads(path.read_text())})
    assert "| ours | 1.5 |" in text and "Command: `python -m benchmarks.run`" in text
    assert {f"measured-{name}" for name in run.MEASUREMENTS} <= set(BLOCKS)
    write_measured(path, "step", MEASURED, command="python -m benchmarks.run --quick", quick=True)
    with pytest.raises(ValueError, match="quick runs of step"):
        render(page, {"device": json.loads(path.read_text())})


def device_script(*arguments, **variables):
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    command = ["bash", str(ROOT / "benchmarks" / "device.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_the_device_script_runs_here_at_tiny_size(tmp_path):
    done = device_script("cpu", "--quick", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "device_cpu.json").read_text())
    assert set(written["measurements"]) == {"step", "loss", "decode"}
    assert "3 passed" in done.stdout and f"results: {tmp_path / 'device_cpu.json'}" in done.stdout


def test_the_device_script_refuses_another_platform_before_any_work(tmp_path):
    done = device_script("tpu", "--quick", OUT=str(tmp_path))
    assert done.returncode != 0 and "tpu" in done.stderr and not list(tmp_path.iterdir())
    assert "=== tests" not in done.stdout
    assert device_script().returncode == 2
