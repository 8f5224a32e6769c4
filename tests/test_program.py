"""The jitted step with its shapes: what a mesh makes of it."""

import dataclasses
import math

import jax
import pytest

from smmd_jax.backbones import DecoderConfig
from train.backbone import Backbone
from train.config import TrainConfig
from train.hlo_text import read_program
from train.objective import make_objective
from train.optimizer import make_optimizer, make_schedule
from train.parameters import make_parameters
from train.partition import make_mesh, replicated
from train.plan_config import PlanConfig
from train.planning import SHARED_FLAGS, kernel_like
from train.program import batch_like, make_program

ROWS, LENGTH, WIDTH, VOCAB = 8, 32, 64, 1024
MODEL = DecoderConfig(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=128, num_layers=2, num_heads=4)


def compiled_step(sizes, **flags):
    mesh = make_mesh(sizes)
    run = TrainConfig(task="plan", batch_size=ROWS, max_length=LENGTH, **flags)
    backbone = Backbone(name="small", tokenizer=None, config=MODEL, folder=None)
    parameters = make_parameters(run, backbone, mesh)
    schedule = make_schedule("constant", learning_rate=1e-3, warmup_steps=0, steps=1)
    optimizer = make_optimizer("adamw", schedule, weight_decay=0.0, clip_norm=1.0)
    program = make_program(parameters, make_objective("smmd"), optimizer, mesh, grad_accum=run.grad_accum)
    kernel = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(mesh)),
        kernel_like(10, terms="smmd"),
    )
    return program.lower(batch_like(ROWS, LENGTH, mesh), kernel).compile()


SLOW = pytest.mark.slow
CASES = [
    ({"fsdp": 4, "tensor": 2}, True),
    pytest.param({"fsdp": 4, "tensor": 2}, False, marks=SLOW),
    pytest.param({"fsdp": 8}, True, marks=SLOW),
    pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, False, marks=SLOW),
]


@pytest.mark.parametrize(("sizes", "scan_layers"), CASES)
def test_each_device_computes_its_own_rows_only(sizes, scan_layers):
    """Left to itself XLA splits activations over D as the parameters are, and every device makes logits of all rows."""
    text = compiled_step(sizes, scan_layers=scan_layers, remat="full").as_text()
    shards = math.prod(size for axis, size in sizes.items() if axis != "tensor")
    logits_of_own_rows = ROWS * LENGTH // shards * VOCAB // sizes.get("tensor", 1)
    arrays = [
        array for computation in read_program(text).computations.values()
        for each in computation.instructions.values() for array in each.arrays
    ]  # fmt: skip
    # The head's gradient has as many elements as a few rows of logits; nothing else may be larger.
    allowed = max(logits_of_own_rows, WIDTH * VOCAB)
    assert max(array.elements for array in arrays) <= allowed, max(arrays, key=lambda array: array.elements)


def test_a_plan_and_a_run_take_the_same_flags():
    of_run, of_plan = ({field.name for field in dataclasses.fields(cls)} for cls in (TrainConfig, PlanConfig))
    assert set(SHARED_FLAGS) <= of_run & of_plan
