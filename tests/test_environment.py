"""The record of a start: versions and devices are there, secrets are not, earlier starts stay."""

import json
import os
import subprocess

import jax
import pytest

from train.environment import git_revision, installed_versions, redact, write_environment
from train.files import replace_file

TOKEN = "hf_" + "aB3" * 10


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"--x={TOKEN}", "--x=[redacted]"),
        ("ghp_0123456789abcdefghij.", "[redacted]."),
        ("https://me:secret@host/path?a=1", "https://[redacted]@host/path?a=1"),
        ("access_token=0123456789abcdef&x=1", "access_token=[redacted]&x=1"),
        ('{"api_key": "0123456789abcdef"}', '{"api_key": "[redacted]"}'),
        ("--num_tokens=5000000000000000", "--num_tokens=5000000000000000"),
        ("--eos_token=</s> user@host a hf_short", "--eos_token=</s> user@host a hf_short"),
    ],
)
def test_secrets_are_taken_out_and_nothing_else(text, expected):
    assert redact(text) == expected


def test_a_start_is_described_without_secrets_and_earlier_starts_stay(tmp_path, monkeypatch):
    jax.devices()  # the backend ends the process at flags it does not know, so it must be running before
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + f" --unused={TOKEN}")
    for seed in (0, 1, 2):
        write_environment(tmp_path, ["main", f"--seed={seed}", TOKEN])
    text = (tmp_path / "environment.json").read_text()
    environment = json.loads(text)
    assert TOKEN not in text
    assert environment["command"] == ["main", "--seed=2", "[redacted]"]
    assert [start["command"][1] for start in environment["earlier_starts"]] == ["--seed=0", "--seed=1"]
    assert "earlier_starts" not in environment["earlier_starts"][1]
    assert environment["platform"] == "cpu" and environment["device_count"] >= 1 and environment["cpu_count"] >= 1
    assert {"python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"} <= environment["versions"].keys()
    assert environment["date"].endswith("+00:00")


def test_a_package_that_is_not_there_has_no_version(monkeypatch):
    monkeypatch.setattr("train.environment.PACKAGES", ("jax", "no-such-package"))
    versions = installed_versions()
    assert versions["jax"] and versions["no-such-package"] is None


def test_the_revision_says_whether_files_differ_from_it(tmp_path):
    assert git_revision(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    revision = git_revision(tmp_path)
    assert len(revision["commit"]) == 40 and revision["changed"] is False
    (tmp_path / "new").write_text("")
    assert git_revision(tmp_path)["changed"] is True


def test_a_failed_replacement_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    replace_file(path, "old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.files.os.fsync", fail)
    with pytest.raises(OSError):
        replace_file(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["config.json"]
