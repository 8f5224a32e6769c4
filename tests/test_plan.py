"""The flags of a plan and its search for the largest batch; what needs the compiler is in test_tpu_compile.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from train.exits import UsageError
from train.plan_config import PlanConfig, complete
from train.planning import largest_batch, read_shortage
from train.topologies import find_topology, has_libtpu

ROOT = Path(__file__).parents[1]


def command(*flags):
    line = [sys.executable, "-m", "train.plan", *flags]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--backbone is required"),
        (["--backbone=qwen2.5-0.5"], "did you mean qwen2.5-0.5b?"),
        (["--backbone=no/such/folder"], "backbone=no/such/folder:"),
        (["--backbone=tiny", "--topology=v9:2x4"], "topology=v9:2x4: v9 is not known. Known: v5e, v5p, v6e"),
        (["--backbone=tiny", "--topology=v5e"], "wanted KIND:SHAPE"),
        (["--backbone=tiny", "--topology=v5e:0x4"], "wanted KIND:SHAPE"),
        (["--backbone=tiny", "--topology=v5e:2x2x2"], "the shape of a v5e slice has 2 axes"),
        (["--backbone=tiny", "--find_batch", "--batch_size=8"], "leave one out"),
        (["--backbone=tiny", "--loss=smd"], "did you mean smmd?"),
        (["--backbone=tiny", "--batch_size=-1"], "batch_size=-1"),
        (["--backbone=tiny", "--json=/no/such/folder/plan.json"], "there is no folder /no/such/folder"),
        (["--backbone=tiny", "--bach_size=8"], "did you mean --batch_size?"),
    ],
)
def test_flags_that_cannot_be_end_with_one_sentence(flags, words):
    done = command(*flags)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and words in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(has_libtpu(), reason="libtpu is installed")
def test_without_the_compiler_the_extra_is_named():
    done = command("--backbone=tiny", "--topology=v5e:1x1")
    assert done.returncode == 2 and "pip install -e '.[tpu-compile]'" in done.stderr
    assert "slice      v5e:1x1, mesh fsdp:1" in done.stdout


def test_defaults_follow_the_backbone_and_the_slice():
    config = complete({"backbone": "llama3-8b", "topology": "v5e:4x4"})
    assert (config.mesh, config.batch_size, config.numeric_tokens, config.scan_layers) == ("fsdp:16", 128, 1000, True)
    assert complete({"backbone": "qwen2.5-0.5b"}).numeric_tokens == 10
    assert not complete({"backbone": "llama-3.2-11b-vision"}).scan_layers
    assert complete({"backbone": "tiny", "numeric_tokens": 7, "batch_size": 3}).numeric_tokens == 7


def test_every_value_is_checked():
    with pytest.raises(UsageError, match="lora_rank=-1"):
        PlanConfig(backbone="tiny", lora_rank=-1)
    with pytest.raises(UsageError, match="dtype"):
        PlanConfig(backbone="tiny", dtype="float16")


@pytest.mark.parametrize("name", ["v5e:1x1", "v5p:2x2x1", "v6e:16x16"])
def test_slices_are_read_without_a_compiler(name):
    topology = find_topology(name)
    assert topology.chips == {"v5e:1x1": 1, "v5p:2x2x1": 4, "v6e:16x16": 256}[name]


@pytest.mark.parametrize("fixed, slope, unit", [(100, 7, 8), (0, 3, 1), (900, 1, 4), (10, 0, 2)])
def test_the_largest_batch_is_found_in_few_compilations(fixed, slope, unit):
    asked = []

    def bytes_of(rows):
        asked.append(rows)
        return fixed + slope * rows

    found = largest_batch(bytes_of, 1000, unit=unit)
    if slope:
        assert found == (1000 - fixed) // slope // unit * unit
    assert len(asked) <= 7 and found in asked and all(rows % unit == 0 for rows in asked)


def test_a_batch_of_one_row_a_chip_may_be_too_large():
    assert largest_batch(lambda rows: 2000, 1000, unit=8) == 0


def test_steps_in_memory_do_not_mislead_the_search():
    """Memory that jumps where the compiler changes its mind: the answer fits and the next one does not."""
    bytes_of = lambda rows: 10 * rows + (300 if rows > 40 else 0)
    assert largest_batch(bytes_of, 750, unit=1) == 45


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("XLA:TPU compile permanent error. Used 20.5G of 15.75G hbm. Exceeded hbm capacity by 4.8G.", 20.5),
        ("the total memory required for HLO temporaries (17.50G) exceeds available HBM (15.75G)", 29.5),
    ],
)
def test_a_refusal_for_lack_of_memory_says_how_much_is_needed(message, wanted):
    """Temporaries alone come on top of the arguments."""
    assert read_shortage(message, arguments=12 * 2**30) == (int(wanted * 2**30), int(15.75 * 2**30))
    assert read_shortage("UNIMPLEMENTED: something else", arguments=0) is None
