"""A plan in words: what is planned, and what it takes."""

from collections.abc import Mapping
from typing import Any

from train.plan_config import PlanConfig

GIB = 2**30
MIB = 2**20


def describe_config(config: PlanConfig) -> str:
    """Return the step and the slice in a few lines, defaults included."""
    rows = "largest that fits" if config.find_batch else config.batch_size
    trained = f"adapters of rank {config.lora_rank}" if config.lora_rank else "all parameters"
    layers = "in one loop" if config.scan_layers else "unrolled"
    return "\n".join([
        f"step       {config.backbone}, {trained}, loss {config.loss} over {config.numeric_tokens} numeric tokens",
        f"           batch_size={rows} max_length={config.max_length} grad_accum={config.grad_accum} "
        f"optimizer={config.optimizer}",
        f"           dtype={config.dtype} param_dtype={config.param_dtype or 'default'} remat={config.remat}, "
        f"layers {layers}",
        f"slice      {config.topology}, mesh {config.mesh}",
    ])  # fmt: skip


def describe_plan(plan: Mapping[str, Any]) -> str:
    """Return what a plan found: memory, time, collectives, largest arrays."""
    usable = plan["hbm_bytes"] * (1 - plan["margin"])
    lines = [_describe_batch(plan, usable)] if "tried_batches" in plan else []
    verdict = "fits" if plan["fits"] else "DOES NOT FIT"
    lines.append(
        f"memory     {plan['bytes_per_chip'] / GIB:.2f} GiB a chip of {plan['hbm_bytes'] / GIB:.0f}, of which "
        f"{usable / GIB:.1f} may be used: {verdict}"
    )
    lines += [f"           {kind:<13}{size / GIB:8.2f} GiB" for kind, size in plan["bytes_by_kind"].items()]
    parts = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in plan["roofline_parts"].items())
    lines += [
        f"parameters {plan['parameters']:,}, trained {plan['trained_parameters']:,}",
        f"products   {plan['flops_per_step']:.4g} FLOPs a step on {plan['chips']} chips, "
        f"{plan['model_flops_per_step']:.4g} without what is computed again",
        f"roofline   {1e3 * plan['roofline_seconds']:.3g} ms a step ({parts})",
        f"at most    {plan['tokens_per_second_at_most']:,.0f} tokens/s, MFU {100 * plan['mfu_at_most']:.0f} %",
    ]
    lines += [
        f"{'collective' if number == 0 else '':<11}{row['kind']:<19}{row['count']:6} x, "
        f"{row['bytes'] / MIB:10.1f} MiB a chip, largest {row['largest'] / MIB:.1f} MiB"
        for number, row in enumerate(plan["collectives"])
    ]
    lines += [
        f"{'largest' if number == 0 else '':<11}{row['shape']:<26}{row['bytes'] / MIB:9.1f} MiB, "
        f"made {row['count']} x: {_tail(row['source'])}"
        for number, row in enumerate(plan["largest_arrays"])
    ]
    if plan["unknown_loops"]:
        lines.append(f"note       {plan['unknown_loops']} loops of unknown length were counted as one turn.")
    if not plan["collectives"] and not plan["largest_arrays"]:
        lines.append("note       the compiler stopped for lack of memory: traffic and collectives are not known.")
    lines.append(f"compiled   in {plan['compile_seconds']:.0f} s by libtpu {plan['versions']['libtpu']}")
    return "\n".join(lines)


def _describe_batch(plan: Mapping[str, Any], usable: float) -> str:
    tried = {int(size): used for size, used in plan["tried_batches"].items()}
    too_large = [size for size, used in tried.items() if used > usable]
    if not plan["fits"]:
        verdict = "the smallest there is does not fit"
    elif too_large:
        verdict = f"largest found to fit; {min(too_large)} do not"
    else:
        verdict = "largest tried, and more may fit"
    return f"batch      {plan['batch_size']} rows: {verdict}, after {len(tried)} compilations"


def _tail(source: str, longest: int = 70) -> str:
    return source if len(source) <= longest else "..." + source[-longest:]
