"""Compiled programs are kept by default, where only their owner can write, and a choice made elsewhere stands."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.runs import ROOT
from train.compilation_cache import private_cache_folder, use_compilation_cache


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_folder_is_made_for_its_owner_alone_whatever_it_was(home):
    folder = private_cache_folder()
    assert folder == home / "smmd_jax" / "xla"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert private_cache_folder() == folder and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_somebody_else_or_behind_a_link_is_not_used(home, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        assert private_cache_folder() is None
    (home / "smmd_jax" / "xla").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (home / "smmd_jax" / "xla").symlink_to(tmp_path / "elsewhere")
    assert private_cache_folder() is None


def test_a_place_where_no_folder_can_be_made_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert private_cache_folder() is None


def test_a_folder_that_was_chosen_before_stands(home, monkeypatch):
    chosen = jax.config.jax_compilation_cache_dir  # the test run's own
    assert chosen and use_compilation_cache() == Path(chosen)
    assert jax.config.jax_compilation_cache_dir == chosen and not home.exists()


@pytest.mark.slow
def test_a_run_keeps_its_programs_and_the_next_start_compiles_none_anew(home, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.runs", "-", "-", "--", "--task=arith", "--steps=1", "--batch_size=2",
               "--max_length=64", "--eval_examples=4"]  # fmt: skip

    def kept(folder: str) -> set[str]:
        argv = [*command, f"--workdir={tmp_path / folder}"]
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        # Each program has a file that is written once, and another that tells when it was last read.
        return {path.name for path in (home / "smmd_jax" / "xla").iterdir() if not path.name.endswith("-atime")}

    first = kept("first")
    assert any(name.startswith("jit_step") for name in first)
    assert kept("second") == first
