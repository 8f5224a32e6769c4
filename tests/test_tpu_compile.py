"""What the TPU compiler makes of the step: the plan of a slice, and the price of the losses. Needs libtpu, no TPU."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from train.topologies import NO_LIBTPU, has_libtpu

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(not has_libtpu(), reason=f"no libtpu: {NO_LIBTPU}"),
]

if has_libtpu():
    from smmd_jax.losses.chunked import _SMALLEST_CHUNK
    from tests.tpu_programs import SLICE, arrays_of, head_and_loss
    from train.plan_config import complete
    from train.planning import make_plan

ROOT = Path(__file__).parents[1]
ROWS, WIDTH = 8 * 1024, 2048
SETTINGS = {10: dict(vocab_size=151_936, numeric_tokens=10), 1110: dict(vocab_size=128_256, numeric_tokens=1110)}


def pair(tokens, **options):
    """The programs of cross entropy and of SMMD in one setting."""
    return (head_and_loss(loss, **SETTINGS[tokens], **options) for loss in ("ce", "smmd"))


# the price of the loss: head + loss, value and gradient, 8192 tokens over data:2, head over tensor:4


@pytest.mark.xdist_group("10")
def test_ten_digits_cost_next_to_nothing_beside_cross_entropy():
    plain, smmd = pair(10)
    assert smmd.flops <= 1.01 * plain.flops and smmd.dearest.flops <= 1.01 * plain.dearest.flops
    assert smmd.bytes <= 1.025 * plain.bytes and smmd.dearest.hbm_bytes <= 1.025 * plain.dearest.hbm_bytes
    assert smmd.temporaries <= 1.01 * plain.temporaries


@pytest.mark.xdist_group("1110")
def test_1110_numbers_cost_little_since_only_numeric_rows_are_computed():
    """cost_analysis counts what stays in fast memory too, and a scatter in place as a copy: traffic is what counts."""
    plain, smmd = pair(1110, tied=False)
    assert smmd.flops <= 1.02 * plain.flops and smmd.dearest.flops <= 1.02 * plain.dearest.flops
    assert smmd.dearest.hbm_bytes <= 1.05 * plain.dearest.hbm_bytes
    assert smmd.temporaries <= 1.01 * plain.temporaries


@pytest.mark.parametrize("tokens", [pytest.param(size, marks=pytest.mark.xdist_group(str(size))) for size in SETTINGS])
def test_a_head_over_the_vocabulary_adds_collectives_of_the_columns_only(tokens):
    plain, smmd = pair(tokens, tied=tokens == 10)
    added = smmd.dearest.collective_bytes - plain.dearest.collective_bytes
    assert 0 < added <= min(ROWS * tokens, 2 * tokens * WIDTH) * 4
    logits = ROWS // 2 * SETTINGS[tokens]["vocab_size"] // 4
    for each in smmd.dearest.collectives:
        assert each.kind != "all-gather" or each.bytes < logits


def test_chunks_never_hold_more_logits_than_a_chunk():
    """Of the 2048 rows of a chip a chunk takes 512, and of the vocabulary a chip has a quarter."""
    vocab_size, rows, length = 65_536, 4, 1024
    for loss in ("ce", "smmd"):
        measured = head_and_loss(
            loss, vocab_size=vocab_size, numeric_tokens=10, rows=rows, length=length, width=256, logits="chunked"
        )
        chunk = max(_SMALLEST_CHUNK, 2 ** int(math.log2(2**25 // vocab_size)))
        assert chunk < rows * length // 2
        wide = [array for array in arrays_of(measured) if array.dims and array.dims[-1] != 256]
        assert max(array.elements for array in wide) <= max(chunk * vocab_size // 4, vocab_size * 256 // 4)


# plans


def plan(**given):
    return make_plan(complete({"backbone": "tiny", "max_length": 64, **given}))


def test_one_chip_is_a_slice_and_its_plan_is_whole():
    found = plan(topology="v5e:1x1", batch_size=8)
    assert found["chips"] == 1 and found["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}
    assert found["fits"] and found["collectives"] == [] and found["unknown_loops"] == 0
    assert isinstance(found["bytes_per_chip"], int)
    assert sum(found["bytes_by_kind"].values()) == found["bytes_per_chip"]
    assert min(found["bytes_by_kind"].values()) >= 0
    assert found["bytes_by_kind"]["parameters"] == 4 * found["parameters"]
    assert found["roofline_seconds"] == max(found["roofline_parts"].values()) > 0
    assert 0 < found["mfu_at_most"] <= 1
    # 6 a parameter and token, 2 more for the layers that are computed again, and attention over 64 tokens.
    tokens, head = 8 * 64, 128 * 128
    layers = found["parameters"] - head
    attention = 4 * 3 * 2 * 2 * 128 * 64
    assert found["model_flops_per_step"] == pytest.approx(tokens * (6 * found["parameters"] + attention), rel=0.04)
    again = tokens * 2 * layers
    assert found["model_flops_per_step"] < found["flops_per_step"] <= found["model_flops_per_step"] + 1.1 * again
    json.dumps(found, allow_nan=False)


def test_eight_chips_gather_parameters_and_share_the_work():
    one, eight = plan(topology="v5e:1x1", batch_size=16), plan(topology=SLICE, batch_size=16)
    assert eight["flops_per_step"] == pytest.approx(one["flops_per_step"], rel=0.02)
    assert eight["model_flops_per_step"] == one["model_flops_per_step"]
    assert eight["bytes_by_kind"]["parameters"] < one["bytes_by_kind"]["parameters"] / 7
    kinds = {row["kind"]: row for row in eight["collectives"]}
    assert kinds["all-gather"]["count"] > 0 and kinds["all-gather"]["bytes"] > 0
    assert set(kinds["all-gather"]) >= {"kind", "count", "bytes"}


def test_what_does_not_fit_is_an_answer():
    """A model whose temporaries alone are more than a chip has: the compiler gives up within seconds."""
    found = plan(backbone="llama3-8b", topology=SLICE, batch_size=16, max_length=1024)
    assert found["fits"] is False and found["bytes_per_chip"] > found["hbm_bytes"]
    assert sum(found["bytes_by_kind"].values()) == found["bytes_per_chip"]
    assert found["flops_per_step"] > 0 and found["roofline_seconds"] > 0
    assert found["collectives"] == [] and found["largest_arrays"] == []


def command(*flags):
    line = [sys.executable, "-m", "train.plan", *flags]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topology=v5e:3x3"], "topology=v5e:3x3: the TPU compiler knows no such slice"),
        (["--topology=v5e:2x4", "--mesh=fsdp:4"], "mesh=fsdp:4 has 4 chips, topology=v5e:2x4 8: use all of them"),
        (["--topology=v5e:2x4", "--batch_size=9"], "batch_size=9 must be a multiple"),
        (["--topology=v5e:1x1", "--max_length=2048"], "more than the 1,024 positions"),
        (["--topology=v5e:1x1", "--lora_rank=2", "--lora_targets=qproj"], "named 'qproj'"),
    ],
)
def test_hostile_flags_end_with_one_sentence(flags, words):
    done = command("--backbone=tiny", *flags)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and words in done.stderr
    assert done.stderr.count("\n") == 1
