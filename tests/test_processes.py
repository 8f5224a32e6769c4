"""Several processes as one run: how they meet, share rows, agree, stop together, and end when one of them is lost."""

import signal
import time

import jax
import numpy as np
import pytest

from tests import runs
from tests.runs import rows_of, state_of, steps_of, train_here, train_there, train_together
from train.exits import UsageError
from train.partition import data_shard, make_mesh, place_everywhere, place_prompts, place_rows, smallest_block
from train.processes import AnyProcess, Watchdog, check_agreement, check_shared_folder, from_primary, join_processes

EIGHT = ("--mesh=data:2,fsdp:4", "--batch_size=8", "--max_length=32", "--steps=6", "--checkpoint_every=3")

# a lone process


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"num_processes": 2}, "need --coordinator"),
        ({"process_id": 0}, "need --coordinator"),
        ({"coordinator": "node-0", "num_processes": 2, "process_id": 0}, "wanted HOST:PORT"),
        ({"coordinator": ":8476", "num_processes": 2, "process_id": 0}, "wanted HOST:PORT"),
        ({"coordinator": "node-0:99999", "num_processes": 2, "process_id": 0}, "wanted HOST:PORT"),
        ({"coordinator": "node-0:8476"}, "needs --num_processes and --process_id"),
        ({"coordinator": "node-0:8476", "num_processes": 2, "process_id": 2}, "count from 0 to 1"),
    ],
)
def test_flags_that_do_not_belong_together_are_refused_before_anything_is_opened(flags, part):
    with pytest.raises(UsageError, match=part):
        join_processes(**flags)


def test_the_environment_stands_in_for_the_flags(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "node-0:8476")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "5")
    with pytest.raises(UsageError, match="process_id=5 of num_processes=2"):
        join_processes()
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(UsageError, match="JAX_PROCESS_ID=one"):
        join_processes()


def test_a_lone_process_agrees_with_itself_and_waits_for_nobody(tmp_path):
    join_processes()
    assert not jax.distributed.is_initialized()
    check_agreement({"anything": object()})
    check_shared_folder(tmp_path / "not there")
    assert from_primary(7) == 7
    asked = AnyProcess(make_mesh({"data": 8}))
    assert asked(True) is True and asked(False) is False
    with Watchdog(0.01) as watchdog:
        time.sleep(0.1)  # alone it watches nothing
        watchdog.progress()


@pytest.mark.parametrize(
    ("own", "shards", "wanted"),
    [
        ([0], 1, (0, 1)),
        ([0, 1, 2, 3], 8, (0, 2)),
        ([4, 5, 6, 7], 8, (1, 2)),
        ([3], 8, (3, 8)),
        ([3, 3, 3], 8, (3, 8)),  # the tensor axis crosses processes: another one feeds the same rows
        ([0, 4], 8, (0, 1)),  # rows far apart: the whole batch
        ([2, 3], 6, (1, 3)),
        ([1, 2], 6, (0, 2)),
    ],
)
def test_a_process_feeds_the_smallest_block_with_the_rows_of_its_devices(own, shards, wanted):
    index, count = smallest_block(own, shards)
    assert (index, count) == wanted
    block = shards // count
    assert all(index * block <= shard < (index + 1) * block for shard in own)


def test_rows_prompts_and_values_reach_the_devices():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    rows = np.arange(24).reshape(8, 3)
    assert data_shard(mesh) == (0, 1)
    placed = place_rows({"rows": rows}, mesh)["rows"]
    assert placed.addressable_shards[0].data.shape == (2, 3)
    np.testing.assert_array_equal(placed, rows)
    assert place_prompts(rows, mesh).addressable_shards[0].data.shape == (2, 3)
    assert place_prompts(rows[:7], mesh).is_fully_replicated  # seven rows do not divide by four
    assert place_everywhere(rows, mesh).is_fully_replicated


# two processes


def assert_together(ended, code):
    for number, child in enumerate(ended):
        assert child.returncode == code, (number, child.returncode, child.stdout[-2000:], child.stderr[-4000:])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.shrink(monkeypatch.setitem)


@pytest.fixture(scope="module")
def alone(data_dir, tmp_path_factory):
    """The run of one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        runs.shrink(patch.setitem)
        train_here(folder, data_dir, *EIGHT)
    return folder


def assert_same_run(folder, alone, data_dir, *flags):
    """Every step once, losses and parameters within float32 rounding, the same answers."""
    found, wanted = rows_of(folder), rows_of(alone)
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for name in ("loss", "ce", "numeric", "grad_norm", "ce_count", "numeric_count", "epoch"):
        # Adam divides by the root of the second moment: rounding of small gradients grows with the steps.
        np.testing.assert_allclose([row[name] for row in found], [row[name] for row in wanted], rtol=1e-4)
    (step, leaves), (other_step, others) = state_of(folder, data_dir, *flags), state_of(alone, data_dir, *EIGHT)
    assert step == other_step == 6
    for path, leaf in leaves.items():
        if "parameters" in path:
            np.testing.assert_allclose(leaf, others[path], rtol=0, atol=1e-3 * np.abs(others[path]).max(), err_msg=path)
    assert rows_of(folder, "eval.jsonl") == rows_of(alone, "eval.jsonl")
    assert rows_of(folder, "predictions/6.jsonl") == rows_of(alone, "predictions/6.jsonl")


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_processes_train_stop_resume_and_evaluate_as_one(alone, data_dir, tmp_path):
    folder = tmp_path / "run"
    stopped = train_together(folder, data_dir, *EIGHT, faults=("-", "SIGTERM@batch:2"))
    assert_together(stopped, 143)
    [saved] = steps_of(folder)
    assert 2 <= saved <= 4  # the others hear of the signal a step later
    assert all(f"step {saved} is saved and verified" in child.stderr for child in stopped)
    resumed = train_together(folder, data_dir, *EIGHT)
    assert_together(resumed, 0)
    assert f"resumed from step {saved}" in resumed[0].stdout
    # one process speaks for both
    assert not any(word in resumed[1].stdout + resumed[1].stderr for word in ("resumed", "tokens/s", "accuracy"))
    assert_same_run(folder, alone, data_dir, *EIGHT)


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_model_axis_that_crosses_processes_and_chunked_logits_are_the_same_run(alone, data_dir, tmp_path):
    folder = tmp_path / "run"
    flags = (*EIGHT, "--mesh=tensor:8", "--logits=chunked")
    assert_together(train_together(folder, data_dir, *flags), 0)
    assert_same_run(folder, alone, data_dir, *flags)


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_run_of_two_processes_goes_on_in_one(alone, data_dir, tmp_path):
    folder = tmp_path / "run"
    assert_together(train_together(folder, data_dir, *EIGHT, faults=("SIGTERM@batch:1", "-")), 143)
    train_here(folder, data_dir, *EIGHT)
    assert_same_run(folder, alone, data_dir, *EIGHT)


@pytest.mark.slow
@pytest.mark.multiproc
def test_processes_with_other_flags_are_refused(data_dir, tmp_path):
    ended = train_together(tmp_path / "run", data_dir, *EIGHT, own_flags=((), ("--seed=1",)))
    assert 7 in {child.returncode for child in ended}
    assert any("process 1 differs from process 0 in --seed" in child.stderr for child in ended)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_killed_process_ends_the_other_with_a_message(data_dir, tmp_path):
    folder = tmp_path / "run"
    began = time.monotonic()
    killed = ("-", "SIGKILL@batch:5")
    survivor, lost = train_together(folder, data_dir, *EIGHT, "--peer_timeout=10", faults=killed)
    assert lost.returncode == -signal.SIGKILL and survivor.returncode not in (0, 143)
    assert any(word in survivor.stderr for word in ("another process was lost", "JAX distributed service"))
    assert time.monotonic() - began < 200
    assert steps_of(folder) == [3]
    assert_together(train_together(folder, data_dir, *EIGHT), 0)
    assert max(steps_of(folder)) == 6


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_process_whose_peers_never_come_gives_up_in_time(data_dir, tmp_path):
    flags = ("--num_processes=2", "--process_id=1", "--join_timeout=3")
    began = time.monotonic()
    ended = train_there(tmp_path / "run", data_dir, f"--coordinator=localhost:{runs.free_port()}", *flags)
    assert ended.returncode == 7, ended.stderr[-3000:]
    assert "process 1 of 2 did not meet the others" in ended.stderr and "--join_timeout" in ended.stderr
    assert time.monotonic() - began < 100
