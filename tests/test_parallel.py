"""Every family on eight simulated devices: one step of data, fsdp and tensor parallel runs is that of one device."""

import dataclasses
import functools
import math
import re

import jax
import optax
import pytest

from smmd_jax.backbones import parameter_shardings
from tests.decoders import FAMILIES
from tests.steps import assert_same_step, take_step
from tests.test_step import VOCAB, pack
from train.partition import make_mesh

MESHES = [{"data": 8}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}]
NAMES = ("tiny", "qwen2", "qwen3", "llama3.1", "smollm3", "mistral", "ministral3", "gemma3_text")
LENGTH, ROWS = 64, 16
# All that a large run turns on at once.
LARGE = {"grad_accum": 2, "scan_layers": True, "remat": "full", "logits": "chunked"}


def config_of(name):
    """The family at sizes that every mesh divides."""
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8)
    return dataclasses.replace(FAMILIES[name], **sizes)


@functools.cache
def packed():
    """Sixteen rows, several examples in some, others one, others nothing but padding."""
    return pack([[3, 6, 0], [7, 2], [1, 5, 4], [2], [6, 1], [0, 3], [7], [4, 5, 2], [3], [1, 0]], LENGTH, ROWS)


@functools.cache
def on_one_device(name, **options):
    return take_step(config_of(name), packed(), **options)


# Every mesh for the decoder that has least of its own, the one with all axes for every family.
CASES = [(name, mesh) for name in NAMES for mesh in (MESHES if name == "tiny" else MESHES[-1:])]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), CASES, ids=str)
def test_a_step_with_everything_on_is_that_of_one_device(name, mesh):
    """Against dense logits, one batch, and layers that keep everything, which is what one device does by default."""
    wanted = on_one_device(name, scan_layers=True)
    found = take_step(config_of(name), packed(), mesh=mesh, **LARGE)
    # Float32 sums in another order, through three layers: a few units in the last place of the largest entry.
    assert_same_step(found, wanted, rtol=1e-5)
    assert_nothing_whole_moves(found, config_of(name), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
@pytest.mark.parametrize("options", [{"lora_rank": 4}, {"grad_accum": 2, "loss": "ntil"}], ids=str)
def test_adapters_and_ratios_are_those_of_one_device(options, mesh):
    one = {name: value for name, value in options.items() if name != "grad_accum"}
    found = take_step(config_of("tiny"), packed(), mesh=mesh, **options)
    assert_same_step(found, on_one_device("tiny", **one), rtol=1e-5)
    assert_nothing_whole_moves(found, config_of("tiny"), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_parameters_and_moments_stay_in_shards(mesh):
    config = config_of("qwen3")
    state = take_step(config, packed(), mesh=mesh, optimizer=optax.adamw(1e-3), **LARGE).state
    wanted = parameter_shardings(state.parameters, make_mesh(mesh))
    moments = next(part for part in jax.tree.leaves(state.optimizer, is_leaf=lambda x: hasattr(x, "mu")))
    parts = mesh.get("fsdp", 1) * mesh.get("tensor", 1)
    for tree in (state.parameters, moments.mu, moments.nu):
        for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        matrices = [leaf for leaf in jax.tree.leaves(tree) if leaf.shape[-1] > 8]
        held = sum(leaf.addressable_shards[0].data.size for leaf in matrices)
        # Norms are kept whole; all matrices lie over all parts of the model.
        assert held <= 1.1 * sum(leaf.size for leaf in matrices) / parts + 32 * 8


def assert_nothing_whole_moves(stepped, config, mesh):
    """No collective is larger than one parameter, or than what a device's own rows need.

    The failure looked for: rows or logits of all devices gathered on each, which computes the right thing in the memory
    of one device.
    """
    tokens = ROWS * LENGTH // (mesh.get("data", 1) * mesh.get("fsdp", 1))
    largest = max(leaf.size for leaf in jax.tree.leaves(stepped.gradient))
    bound = max(largest, tokens * max(config.hidden_size, config.intermediate_size))
    for line in stepped.program.as_text().splitlines():
        kind = re.search(r" (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(-start)?\(", line)
        if kind is None:
            continue
        for shape in re.findall(r"[a-z0-9]+\[([0-9,]*)\]", line.split("=", 1)[1].split(kind[1])[0]):
            assert math.prod(int(size) for size in shape.split(",") if size) <= bound, line
