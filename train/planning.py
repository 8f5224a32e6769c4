"""What a training step takes on a slice of TPUs that is not there: the step is compiled for it and its program read."""

import dataclasses
import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from smmd_jax import make_numeric_kernel, make_numeric_vocab
from train.backbone import Backbone
from train.config import TrainConfig, parse_mesh
from train.environment import installed_versions
from train.exits import UsageError
from train.hlo_costs import Costs, costs_of
from train.hlo_memory import bytes_for_backward, largest_arrays
from train.hlo_text import read_program
from train.jaxpr_costs import product_flops
from train.objective import make_objective
from train.optimizer import make_optimizer, make_schedule
from train.parameters import make_parameters
from train.partition import check_batch_size, make_mesh, replicated
from train.plan_config import DIGITS, PlanConfig, find_model
from train.program import Program, batch_like, make_program
from train.topologies import Topology, find_topology

# Share of a chip's memory that must stay free: the runtime, the next batch and an evaluation live there too.
MARGIN = 0.05
_AMOUNT = r"([\d.]+)([KMGT])"
# What the compiler says of a program that a chip cannot hold: all of it, or its temporaries, which it lays out first.
_FULL = re.compile(rf"Used {_AMOUNT} of {_AMOUNT} hbm|\({_AMOUNT}\) exceeds available HBM \({_AMOUNT}\)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Flags that a plan and a run share.
SHARED_FLAGS = (
    "backbone", "batch_size", "grad_accum", "max_length", "mesh", "optimizer", "loss", "lora_rank", "lora_targets",
    "dtype", "param_dtype", "remat", "scan_layers",
)  # fmt: skip


def plan_program(config: PlanConfig, devices: list[jax.Device]) -> tuple[Program, Mesh, Any]:
    """Make the step of a plan as a run makes it, for devices that need not be there.

    Returns:
      The program, its mesh, and the shapes of its kernel.

    Raises:
      UsageError: what a run would refuse.
    """
    model = find_model(config.backbone)
    run = TrainConfig(task="plan", **{name: getattr(config, name) for name in SHARED_FLAGS})
    if config.max_length > model.max_positions:
        raise UsageError(
            f"max_length={config.max_length:,} is more than the {model.max_positions:,} positions of "
            f"backbone={config.backbone}."
        )
    try:
        mesh = make_mesh(parse_mesh(run.mesh), devices)
        if mesh.size != len(devices):
            raise UsageError(
                f"mesh={run.mesh} has {mesh.size} chips, topology={config.topology} {len(devices)}: use all of them."
            )
        check_batch_size(mesh, run.batch_size, run.grad_accum)
        objective = make_objective(run.loss).placed(
            config.logits,
            rows=run.batch_size // run.grad_accum,
            length=run.max_length,
            width=model.vocab_size,
            mesh=mesh,
        )
        parameters = make_parameters(run, Backbone(name=run.backbone, tokenizer=None, config=model, folder=None), mesh)
        schedule = make_schedule(
            run.schedule, learning_rate=run.learning_rate, warmup_steps=run.warmup, steps=run.steps
        )
        optimizer = make_optimizer(run.optimizer, schedule, weight_decay=run.weight_decay, clip_norm=run.clip_norm)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    program = make_program(parameters, objective, optimizer, mesh, grad_accum=run.grad_accum, seed=run.seed)
    kernel = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(mesh)),
        kernel_like(config.numeric_tokens, terms=objective.spec.terms),
    )
    return program, mesh, kernel


def kernel_like(numeric_tokens: int, *, terms: str | None) -> Any:
    """Return a kernel, or a numeric vocabulary, of that many tokens, as shapes: their values change no cost."""
    vocab = make_numeric_vocab({str(digit): digit for digit in range(DIGITS)})
    small = vocab if terms is None else make_numeric_kernel(vocab, terms=terms)
    grown = lambda shape: tuple(numeric_tokens if length == DIGITS else length for length in shape)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(grown(leaf.shape), leaf.dtype), small)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """What the compiler made of a step.

    Attributes:
      bytes_per_chip: at the peak; also where they are more than a chip has.
      compiled: None where the compiler gave up for lack of memory.
      usable_bytes: of a chip's memory, as far as the compiler said.
    """

    bytes_per_chip: int
    compiled: Any
    seconds: float
    usable_bytes: int | None = None


def compile_step(program: Program, batch: Any, kernel: Any) -> CompiledStep:
    """Compile a step ahead of time; a program that is too large for the chip is an answer, not an error."""
    lowered = program.lower(batch, kernel)
    began = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        arguments = _bytes_on_a_chip((program.state_like, program.frozen_like))
        shortage = read_shortage(str(error), arguments=arguments)
        if shortage is None:
            raise
        used, usable = shortage
        return CompiledStep(
            bytes_per_chip=used, compiled=None, seconds=time.monotonic() - began, usable_bytes=usable
        )
    seconds = time.monotonic() - began
    return CompiledStep(bytes_per_chip=_peak(compiled.memory_analysis()), compiled=compiled, seconds=seconds)


def read_shortage(message: str, *, arguments: int) -> tuple[int, int] | None:
    """Read the bytes that a program needs, and those that it may use, from the compiler's refusal.

    Args:
      message: of the compiler; None comes back where it is about something else.
      arguments: bytes of the program's arguments, which its temporaries come on top of.

    Example:
      >>> read_shortage("total memory required for HLO temporaries (2.5G) exceeds available HBM (2G)", arguments=2**30)
      (3758096384, 2147483648)
    """
    found = _FULL.search(message)
    if not found:
        return None
    amount = lambda at: int(float(found[at]) * _UNITS[found[at + 1]])
    return (amount(1), amount(3)) if found[1] else (arguments + amount(5), amount(7))


def _peak(memory: Any) -> int:
    return (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    )  # fmt: skip


def make_plan(config: PlanConfig, *, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Plan a step; with `find_batch` the largest batch that fits.

    Args:
      config: of `complete`.
      say: told of every compilation.

    Returns:
      What `train.plan --json` writes.

    Raises:
      UsageError: a slice, a mesh or flags that no run could have; no compiler.
    """
    topology = find_topology(config.topology)
    devices = topology.devices()
    if len(devices) != topology.chips:
        raise UsageError(f"topology={topology.name} has {topology.chips} chips and {len(devices)} devices.")
    if not config.find_batch:
        return _plan_one(config, topology, devices)
    plans: dict[int, dict[str, Any]] = {}

    def bytes_of(batch_size: int) -> int:
        plans[batch_size] = _plan_one(dataclasses.replace(config, batch_size=batch_size), topology, devices)
        found = plans[batch_size]
        say(f"batch_size={batch_size}: {found['bytes_per_chip'] / 2**30:.2f} GiB a chip")
        return found["bytes_per_chip"]

    mesh = parse_mesh(config.mesh)
    unit = mesh.get("data", 1) * mesh.get("fsdp", 1) * config.grad_accum
    best = largest_batch(bytes_of, int(topology.chip.hbm_bytes * (1 - MARGIN)), unit=unit)
    return {**plans[best or unit], "tried_batches": {str(size): plan["bytes_per_chip"] for size, plan in plans.items()}}


def largest_batch(bytes_of: Callable[[int], int], limit: int, *, unit: int, tries: int = 7) -> int:
    """Return the largest multiple of `unit` whose bytes stay within the limit; 0 where not even one unit does.

    Memory grows about linearly with the batch, so each guess is where the line through the two nearest known batches
    meets the limit. Ends where the next multiple is known not to fit, or after `tries`, with the largest that fits.

    Example:
      >>> largest_batch(lambda rows: 100 + 7 * rows, 1000, unit=8)
      128
    """
    known = {1: bytes_of(unit)}
    if known[1] > limit:
        return 0
    known[2] = bytes_of(2 * unit)
    while len(known) < tries:
        fitting = max(size for size, used in known.items() if used <= limit)
        too_large = min((size for size, used in known.items() if used > limit), default=None)
        if too_large == fitting + 1:
            break
        first, second = sorted(known, key=lambda size: abs(known[size] - limit))[:2]
        slope = (known[second] - known[first]) / (second - first)
        guess = first + int((limit - known[first]) // slope) if slope > 0 else 2 * fitting
        upper = too_large - 1 if too_large else 64 * fitting
        size = min(max(guess, fitting + 1), upper)
        known[size] = bytes_of(size * unit)
    return unit * max(size for size, used in known.items() if used <= limit)


def _plan_one(config: PlanConfig, topology: Topology, devices: list[jax.Device]) -> dict[str, Any]:
    program, mesh, kernel = plan_program(config, devices)
    batch = batch_like(config.batch_size, config.max_length, mesh)
    flops_of = lambda program: product_flops(program.step, program.state_like, batch, kernel, program.frozen_like)
    plain = program
    if config.remat != "none":
        plain, _, _ = plan_program(dataclasses.replace(config, remat="none"), devices)
    model_flops = flops_of(plain)
    step = compile_step(program, batch, kernel)
    read = None if step.compiled is None else read_program(step.compiled.as_text())
    costs = None if read is None else costs_of(read)
    flops = flops_of(program) if costs is None else costs.flops * topology.chips
    chip = topology.chip
    fits = step.compiled is not None and step.bytes_per_chip <= chip.hbm_bytes * (1 - MARGIN)
    return {
        "backbone": config.backbone,
        "topology": config.topology,
        "chips": topology.chips,
        "mesh": {axis: size for axis, size in mesh.shape.items()},
        **{name: getattr(config, name) for name in (
            "batch_size", "grad_accum", "max_length", "optimizer", "loss", "numeric_tokens", "lora_rank", "dtype",
            "param_dtype", "remat", "scan_layers",
        )},
        "parameters": _count(program.state_like.parameters) + _count(program.frozen_like),
        "trained_parameters": _count(program.state_like.parameters),
        "bytes_per_chip": step.bytes_per_chip,
        "bytes_by_kind": _bytes_by_kind(program, step, read),
        "hbm_bytes": chip.hbm_bytes,
        "margin": MARGIN,
        "fits": fits,
        "flops_per_step": flops,
        "model_flops_per_step": model_flops,
        **_speed(costs, flops, model_flops, config, topology),
        "collectives": [] if costs is None else _collectives(costs),
        "largest_arrays": [] if read is None else [each._asdict() for each in largest_arrays(read)],
        "unknown_loops": 0 if costs is None else costs.unknown_loops,
        "compile_seconds": round(step.seconds, 1),
        "versions": {name: installed_versions()[name] for name in ("python", "jax", "jaxlib", "libtpu")},
    }  # fmt: skip


def _speed(costs: Costs | None, flops: float, model_flops: float, config: PlanConfig, topology: Topology) -> dict:
    """The least time that products, memory traffic or links need, each at its peak, and what follows from it."""
    chip = topology.chip
    parts = {"products": flops / topology.chips / chip.flops}
    if costs is not None:
        parts |= {"memory": costs.hbm_bytes / chip.hbm_bandwidth, "links": costs.wire_bytes / chip.link_bandwidth}
    seconds = max(parts.values())
    return {
        "hbm_traffic_bytes_per_chip": None if costs is None else int(costs.hbm_bytes),
        "roofline_seconds": seconds,
        "roofline_parts": parts,
        "tokens_per_second_at_most": config.batch_size * config.max_length / seconds,
        "mfu_at_most": model_flops / (topology.chips * chip.flops * seconds),
    }


def _bytes_by_kind(program: Program, step: CompiledStep, read: Any) -> dict[str, int]:
    """Parts of the peak; they add up to it.

    Gradients exist all at once, in float32, since the update waits for their norm. What the forward pass keeps is
    largest before they are there: where both together are more than the temporaries, gradients give way.
    """
    parameters = _bytes_on_a_chip(program.state_like.parameters) + _bytes_on_a_chip(program.frozen_like)
    kinds = {"parameters": parameters, "optimizer": _bytes_on_a_chip(program.state_like.optimizer)}
    gradients = _bytes_on_a_chip(program.state_like.parameters, itemsize=4)
    if step.compiled is None:
        rest = max(step.bytes_per_chip - sum(kinds.values()), 0)
        kinds["gradients"] = min(gradients, rest)
        return {**kinds, "temporaries": rest - kinds["gradients"]}
    memory = step.compiled.memory_analysis()
    kinds["batch"] = memory.argument_size_in_bytes - sum(kinds.values())
    activations = min(bytes_for_backward(read), memory.temp_size_in_bytes)
    gradients = min(gradients, memory.temp_size_in_bytes - activations)
    kinds |= {"gradients": gradients, "activations": activations}
    kinds["temporaries"] = memory.temp_size_in_bytes - gradients - activations
    kinds["outputs"] = memory.output_size_in_bytes - memory.alias_size_in_bytes
    kinds["code"] = memory.generated_code_size_in_bytes
    return kinds


def _bytes_on_a_chip(like: Any, *, itemsize: int | None = None) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * (itemsize or leaf.dtype.itemsize)
        for leaf in jax.tree.leaves(like)
    )


def _count(like: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(like))


def _collectives(costs: Costs) -> list[dict[str, Any]]:
    """One row a kind: how many run in one step, and the bytes they move on one chip in all."""
    kinds: dict[str, dict[str, Any]] = {}
    for each, count in costs.collectives.items():
        row = kinds.setdefault(each.kind, {"kind": each.kind, "count": 0, "bytes": 0, "largest": 0, "largest_from": ""})
        row["count"] += count
        row["bytes"] += each.bytes * count
        if each.bytes > row["largest"]:
            row["largest"], row["largest_from"] = each.bytes, each.source
    return sorted(kinds.values(), key=lambda row: -row["bytes"])
