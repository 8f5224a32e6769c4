"""Checkpoints: exact restore, damage passed over, failed saves said aloud, one writer, readers that only read."""

import functools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from train.checkpoint import Checkpoints
from train.data import check_fingerprint
from train.exits import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    DataError,
    NonFiniteError,
    StorageError,
    UsageError,
    WriterLockError,
)
from train.manifest import MANIFEST

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def make_state(value=0.0, width=8):
    params = {"dense": {"kernel": jnp.full((width, 4), float(value)), "bias": jnp.full((4,), value, jnp.bfloat16)}}
    return {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.int32(0), "key": jax.random.key(3)}


def same(left, right):
    def raw(leaf):
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(raw(a)).tobytes() == np.asarray(raw(b)).tobytes() for a, b in pairs)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """A folder with the verified steps 10, 20 and 30; copied before it is damaged."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, make_state(step), {"position": step})
    return folder


@pytest.fixture
def folder(three_steps, tmp_path):
    return shutil.copytree(three_steps, tmp_path / "checkpoints")


def files_of(step_folder):
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def test_restore_gives_back_bytes_tree_types_and_data(folder):
    with Checkpoints(folder, writer=False) as checkpoints:
        restored = checkpoints.restore(make_state())
    assert restored.step == 30 and restored.data == {"position": 30} and restored.skipped == ()
    assert same(restored.state, make_state(30))
    assert jax.tree.structure(restored.state) == jax.tree.structure(make_state())


def test_nothing_saved_is_none_and_a_reader_makes_no_folder(tmp_path):
    with Checkpoints(tmp_path / "none", writer=False) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.restore(make_state()) is None
    assert not (tmp_path / "none").exists()


def test_donating_the_state_right_after_save_does_not_change_what_is_saved(tmp_path):
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = {"w": jnp.zeros((512, 512)), "b": jnp.zeros(3)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, None)
        for _ in range(10):
            state = step(state)
        checkpoints.wait()
        assert same(checkpoints.restore(state).state, {"w": jnp.zeros((512, 512)), "b": jnp.zeros(3)})


def test_saved_step_names_a_step_only_after_its_manifest_is_written(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.saved_step is None
        checkpoints.save(5, make_state(), {})
        assert checkpoints.saved_step is None or (tmp_path / "5" / MANIFEST).exists()
        checkpoints.wait()
        assert checkpoints.saved_step == 5


def test_only_the_newest_verified_steps_stay(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, {"w": jnp.zeros(2)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


@pytest.mark.parametrize("damage", ["flip", "half", "empty", "remove"])
def test_every_damaged_file_of_the_newest_step_is_found_and_the_older_step_taken(folder, damage):
    for path in files_of(folder / "30"):
        content = path.read_bytes()
        if damage == "remove":
            path.unlink()
        elif not content:
            continue  # an empty file has nothing to flip or cut
        elif damage == "flip":
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        else:
            path.write_bytes(content[: len(content) // 2] if damage == "half" else b"")
        with Checkpoints(folder, writer=False) as checkpoints:
            assert checkpoints.latest() == 20, path
        path.write_bytes(content)
    with Checkpoints(folder, writer=False) as checkpoints:
        assert checkpoints.latest() == 30


def test_an_empty_file_that_gains_bytes_and_an_unknown_file_are_damage(folder):
    (folder / "30" / "state" / "more").write_bytes(b"x")
    with Checkpoints(folder, writer=False) as checkpoints:
        restored = checkpoints.restore(make_state())
    assert restored.step == 20 and "state/more" in restored.skipped[0]


def test_a_writer_sets_damaged_steps_aside_and_saves_them_again(folder):
    (files_of(folder / "30")[0]).write_bytes(b"damaged")
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(make_state())
        assert restored.step == 20 and same(restored.state, make_state(20))
        assert any("30" in note and "set_aside" in note for note in checkpoints.notes)
        checkpoints.save(30, make_state(31), {"position": 31})
    assert (folder / "set_aside" / "30-0").is_dir()
    with Checkpoints(folder, writer=False) as checkpoints:
        assert checkpoints.restore(make_state()).data == {"position": 31}


@pytest.mark.parametrize("entry", ["stray", "link", "future", "foreign", "file"])
def test_strange_entries_are_passed_over_and_named(folder, tmp_path, entry):
    place = folder / "77"
    if entry == "stray":
        place.mkdir()
    elif entry == "link":
        place.symlink_to(folder / "30", target_is_directory=True)
    elif entry == "future":
        shutil.copytree(folder / "30", place)
    elif entry == "foreign":
        shutil.copytree(folder / "30", place)
        (place / MANIFEST).unlink()
    else:
        place.write_text("x")
    (folder / "notes.txt").write_text("x")
    with Checkpoints(folder, writer=False) as checkpoints:
        restored = checkpoints.restore(make_state())
    assert restored.step == 30
    assert any(text.startswith("step 77") for text in restored.skipped)
    assert any(text.startswith("notes.txt") for text in restored.skipped)
    with Checkpoints(folder) as checkpoints:  # a writer may go on from there
        checkpoints.restore(make_state())
        checkpoints.save(40, make_state(), {})
    assert not os.path.lexists(place) and (folder / "40" / MANIFEST).exists()


def test_one_error_with_every_reason_when_no_step_can_be_used(folder):
    for step in (10, 20, 30):
        (folder / str(step) / MANIFEST).unlink()
    with Checkpoints(folder, writer=False) as checkpoints:
        for use in (checkpoints.latest, lambda: checkpoints.restore(make_state())):
            with pytest.raises(CheckpointCorruptError, match=r"(?s)step 30.*step 20.*step 10") as caught:
                use()
            assert caught.value.exit_code == 4


def test_a_step_that_orbax_cannot_read_is_passed_over(folder, monkeypatch):
    read = Checkpoints._read

    def fail_on_newest(self, step, like, *, partial):
        if step == 30:
            raise ValueError("DATA_LOSS")
        return read(self, step, like, partial=partial)

    monkeypatch.setattr(Checkpoints, "_read", fail_on_newest)
    with Checkpoints(folder, writer=False) as checkpoints:
        restored = checkpoints.restore(make_state())
    assert restored.step == 20 and "DATA_LOSS" in restored.skipped[0]


def test_a_reader_finds_the_newer_step_when_the_writer_deletes_the_one_it_reads(folder, monkeypatch):
    import train.checkpoint

    verify = train.checkpoint.verify

    def delete_then_verify(path, *, step):
        if step == 30 and (folder / "30").exists():
            for old in ("10", "20"):
                shutil.rmtree(folder / old)
            os.replace(folder / "30", folder / "kept")
            shutil.copytree(folder / "kept", folder / "40")
            manifest = folder / "40" / MANIFEST
            (folder / "40" / MANIFEST).unlink()
            train.checkpoint.write_manifest(folder / "40", step=40, leaves=json.loads(manifest_text(folder))["leaves"])
            assert manifest.exists()
        return verify(path, step=step)

    def manifest_text(place):
        return (place / "kept" / MANIFEST).read_text()

    monkeypatch.setattr(train.checkpoint, "verify", delete_then_verify)
    with Checkpoints(folder, writer=False) as checkpoints:
        assert checkpoints.latest() == 40


def test_all_differing_leaves_are_listed_in_one_error(folder):
    like = make_state(width=16)
    like["params"]["dense"]["bias"] = jnp.zeros(4, jnp.float32)
    like["params"]["extra"] = jnp.zeros(2)
    del like["key"]
    with (
        Checkpoints(folder, writer=False) as checkpoints,
        pytest.raises(CheckpointMismatchError) as caught,
    ):
        checkpoints.restore(like)
    lines = str(caught.value)
    assert "params/dense/kernel: float32[8,4] in the checkpoint, wanted float32[16,4]" in lines
    assert "params/dense/bias: bfloat16[4] in the checkpoint, wanted float32[4]" in lines
    assert "params/extra: not in the checkpoint" in lines
    assert "key: " in lines and "not wanted" in lines
    assert caught.value.exit_code == 4


def test_a_part_of_the_tree_restores_alone_when_asked(folder):
    with Checkpoints(folder, writer=False) as checkpoints:
        restored = checkpoints.restore({"params": make_state()["params"]}, partial=True)
        assert same(restored.state, {"params": make_state(30)["params"]})
        with pytest.raises(CheckpointMismatchError):
            checkpoints.restore({"params": {"other": jnp.zeros(1)}}, partial=True)


@pytest.mark.parametrize("target", [(1, 1), (2, 2), (8, 1)])
def test_restore_onto_another_mesh_keeps_the_bytes(tmp_path, target):
    if len(jax.devices()) < 8:
        pytest.skip("needs eight simulated devices")

    def shaped(sizes):
        devices = jax.devices()[: sizes[0] * sizes[1]]
        mesh = jax.make_mesh(sizes, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices)
        return NamedSharding(mesh, P("data", "fsdp"))

    values = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jax.device_put(values, shaped((4, 2)))}, {})
        checkpoints.wait()
        like = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=shaped(target))}
        state = checkpoints.restore(like).state
    assert state["w"].sharding == like["w"].sharding
    assert np.asarray(state["w"]).tobytes() == values.tobytes()


def test_parameters_that_are_not_finite_are_never_saved(tmp_path):
    state = make_state()
    state["params"]["dense"]["kernel"] = state["params"]["dense"]["kernel"].at[1, 1].set(jnp.nan)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(NonFiniteError, match="dense/kernel") as caught:
            checkpoints.save(1, state, {}, must_be_finite=state["params"])
        assert checkpoints.latest() is None and caught.value.exit_code == 6


def test_misuse_of_save_is_refused(folder):
    with Checkpoints(folder, writer=False) as checkpoints, pytest.raises(UsageError, match="writer=True"):
        checkpoints.save(40, make_state(), {})
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(UsageError, match="step 30"):
            checkpoints.save(30, make_state(), {})
        for data in ({"a": float("nan")}, {"a": np.zeros(2)}):
            with pytest.raises(TypeError):
                checkpoints.save(40, make_state(), data)
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(folder, keep=0)


def test_a_second_writer_is_refused_at_once_and_readers_are_not(folder):
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(WriterLockError, match=f"process {os.getpid()}") as caught:
            Checkpoints(folder)
        assert caught.value.exit_code == 8
        with Checkpoints(folder, writer=False) as reader:
            assert reader.latest() == 30
        checkpoints.save(40, make_state(), {})
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest() == 40


def test_the_lock_of_a_dead_process_is_taken_over_that_of_another_machine_is_not(folder):
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    (folder / "writer.lock").write_text(json.dumps({"pid": dead.pid, "host": socket.gethostname()}))
    Checkpoints(folder).close()
    (folder / "writer.lock").write_text(json.dumps({"pid": dead.pid, "host": "elsewhere"}))
    with pytest.raises(WriterLockError, match="elsewhere"):
        Checkpoints(folder)


def test_a_reader_changes_nothing(folder):
    (folder / "40.orbax-checkpoint-tmp").mkdir()
    (files_of(folder / "30")[0]).write_bytes(b"damaged")
    before = sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))
    with Checkpoints(folder, writer=False) as checkpoints:
        assert checkpoints.restore(make_state()).step == 20
    assert sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


@pytest.fixture
def no_space():
    """A limit on the size of files, which makes a write fail like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, former)


def test_a_save_without_space_fails_aloud_and_a_later_one_succeeds(tmp_path, no_space):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {"w": jax.random.normal(jax.random.key(0), (512, 1024))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, big, {})
        checkpoints.wait()
        no_space((100_000, before[1]))
        try:
            with pytest.raises(StorageError, match="step 2 was not saved") as caught:
                checkpoints.save(2, big, {})
                checkpoints.wait()
        finally:
            no_space(before)
        assert caught.value.exit_code == 5
        assert checkpoints.saved_step == 1 and checkpoints.latest() == 1
        checkpoints.save(2, big, {})
        checkpoints.wait()
        assert checkpoints.latest() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_failed_save_is_raised_on_leaving_but_never_hides_the_first_error(tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.checkpoint.write_manifest", fail)
    with pytest.raises(StorageError, match="No space"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(2)}, {})
    with pytest.raises(KeyError), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(2)}, {})
        raise KeyError("first")
    assert "step 1 was not saved" in capsys.readouterr().err
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--workdir"):
        Checkpoints(tmp_path / "file" / "checkpoints")


KILLED = """
    import os, signal, sys
    import jax.numpy as jnp
    import train.checkpoint as checkpoint, train.manifest as manifest
    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)
    phase, folder = sys.argv[1:]
    checkpoints = checkpoint.Checkpoints(folder, keep=1)
    state = {"w": jnp.arange(1_000_000.0)}
    checkpoints.save(1, state, {"position": 1}); checkpoints.wait()
    if phase == "writing":
        import orbax.checkpoint as ocp
        ocp.CheckpointManager.wait_until_finished = die
    elif phase == "hashing":
        manifest._sha256 = die
    elif phase == "manifest":
        checkpoint.write_manifest = die
    elif phase == "deleting":
        checkpoint.shutil.rmtree = die
    checkpoints.save(2, state, {"position": 2}); checkpoints.wait()
    print("not reached")
"""


@pytest.mark.slow
@pytest.mark.parametrize("phase, newest", [("writing", 1), ("hashing", 1), ("manifest", 1), ("deleting", 2)])
def test_kill_in_any_phase_of_a_save_leaves_a_verified_step_and_a_usable_folder(tmp_path, phase, newest):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), phase, str(tmp_path)]
    died = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[1])
    assert died.returncode == -signal.SIGKILL and "not reached" not in died.stdout, died.stderr
    like = {"w": jnp.zeros(1_000_000)}
    with Checkpoints(tmp_path, writer=False) as checkpoints:
        assert checkpoints.restore(like).step == newest
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        restored = checkpoints.restore(like)
        assert restored.data == {"position": newest} and same(restored.state, {"w": jnp.arange(1_000_000.0)})
        checkpoints.save(newest + 1, like, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(newest + 1)]


def test_a_kill_in_the_very_first_save_starts_from_the_beginning(tmp_path):
    (tmp_path / "pending.json").write_text('{"step": 1}')
    (tmp_path / "1").mkdir()
    (tmp_path / "1.orbax-checkpoint-tmp-7").mkdir()
    with Checkpoints(tmp_path, writer=False) as checkpoints:
        assert checkpoints.latest() is None
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None and len(checkpoints.notes) == 2
        checkpoints.save(1, {"w": jnp.zeros(2)}, {})


def test_another_data_fingerprint_is_refused_with_a_diff_unless_allowed():
    saved = {"files": "abc", "seed": 0, "splits": ["train"]}
    assert check_fingerprint(saved, {"files": "abc", "seed": 0, "splits": ("train",)}) == []
    changed = {"files": "abd", "seed": 0, "splits": ("train",)}
    with pytest.raises(DataError, match='files: "abc" -> "abd"') as caught:
        check_fingerprint(saved, changed)
    assert caught.value.exit_code == 3
    assert check_fingerprint(saved, changed, allow_change=True) == ['files: "abc" -> "abd"']
