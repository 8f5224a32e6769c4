"""A training step beside torch and transformers: the same weights, rows and optimizer in both, turn by turn."""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.goals import Goal, Measured
from benchmarks.loss_cost import draw_targets, make_kernel
from benchmarks.peers import find_peers, missing_rows, synchronized, torch_device
from benchmarks.timing import interleave, summarise
from smmd_jax.backbones import PRESETS, Decoder, DecoderConfig, save_pretrained
from train.data import Batch
from train.objective import make_objective
from train.optimizer import make_optimizer
from train.step import init_state, make_step

PEER, PLAIN, OURS = "transformers, CE", "ours, CE", "ours, CE + SMMD"
_RATE, _DECAY, _CLIP = 3e-4, 0.01, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A shape: random weights of a preset, full rows of random tokens, all of them supervised."""

    preset: str
    rows: int
    length: int

    def config(self, *, quick: bool) -> DecoderConfig:
        config = PRESETS[self.preset]
        if not quick:
            return config
        return dataclasses.replace(
            config, num_layers=1, hidden_size=72, intermediate_size=128, vocab_size=min(config.vocab_size, 512)
        )


# The default run of arith, and a pretrained model of the same task with short rows.
SETTINGS = {
    "tiny, 16 rows of 128": Setting(preset="tiny", rows=16, length=128),
    "SmolLM2-135M, 8 rows of 128": Setting(preset="smollm2-135m", rows=8, length=128),
}


def measure(*, quick: bool, rounds: int) -> Measured:
    """Time whole steps (loss, gradient, clipping, AdamW, float32), in every setting one after the other."""
    measured = Measured(rows=[], goals=[])
    for name, setting in SETTINGS.items():
        if quick:
            setting = dataclasses.replace(setting, rows=2, length=32)
        measured += _measure_setting(name, setting, setting.config(quick=quick), rounds)
    return measured


def _measure_setting(name: str, setting: Setting, config: DecoderConfig, rounds: int) -> Measured:
    model = Decoder(config, rngs=nnx.Rngs(0))
    kernel = make_kernel(10, config.vocab_size, contiguous=True)
    batch = make_batch(setting, config, kernel)
    peers, firsts = find_peers("torch", "transformers"), {}
    programs: dict[str, Callable[[], Any]] = {}
    if peers is not None:
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(model, Path(folder) / "model")
            programs[PEER] = peer_step(*peers, str(Path(folder) / "model"), batch)
    ours, compiled = our_steps(model, batch, kernel)
    programs |= ours
    # Before anything moved: the loss of one batch at equal weights must be one number.
    firsts = {program: call() for program, call in programs.items() if program in (PEER, PLAIN)}
    times = summarise(interleave(programs, rounds=rounds), PEER if peers is not None else PLAIN)
    tokens = setting.rows * setting.length
    rows: list[dict[str, Any]] = missing_rows(name, [PEER], "median ms") if peers is None else []
    for program, time in times.items():
        rows.append(
            {
                "setting": name,
                "program": program,
                "median ms": round(time["median_ms"], 1),
                "processor ms": round(time["processor_ms"], 1),
                "tokens/s": round(1e3 * tokens / time["median_ms"], 1),
                "speed": None if peers is None else round(1 / time["ratio"], 3),
                "temporaries MiB": round(compiled[program] / 2**20, 1) if program in compiled else None,
                "first loss": round(firsts[program], 5) if program in firsts else None,
            }
        )
    with_smmd = times[OURS]["min_ms"] / times[PLAIN]["min_ms"]
    speed = None if peers is None else times[PEER]["min_ms"] / times[PLAIN]["min_ms"]
    return Measured(
        rows=rows,
        goals=[
            Goal(f"step, {name}: with SMMD / without", with_smmd, at_most=1.02),
            Goal(f"step, {name}: speed to transformers", speed, at_least=0.6),
        ],
    )


def make_batch(setting: Setting, config: DecoderConfig, kernel: Any) -> Batch:
    """Rows without padding; 15 % of the targets are numbers."""
    shape = (setting.rows, setting.length)
    targets = draw_targets(kernel, setting.rows * setting.length, config.vocab_size).reshape(shape)
    ids = np.concatenate([np.full((setting.rows, 1), 3, np.int32), targets[:, :-1]], axis=1)
    return Batch(
        input_ids=ids,
        targets=targets,
        target_mask=np.ones(shape, bool),
        positions=np.broadcast_to(np.arange(setting.length, dtype=np.int32), shape),
        segment_ids=np.ones(shape, np.int32),
    )


def our_steps(model: Decoder, batch: Batch, kernel: Any) -> tuple[dict[str, Callable[[], float]], dict[str, int]]:
    """Our step with both losses, over one state that they hand on, and the bytes of their temporaries."""
    graphdef, parameters = nnx.split(model)
    optimizer = make_optimizer("adamw", optax.constant_schedule(_RATE), weight_decay=_DECAY, clip_norm=_CLIP)
    # A copy: the state is donated, and the model's own arrays must outlive it.
    state = jax.tree.map(jnp.copy, init_state(nnx.to_pure_dict(parameters), optimizer))
    batch = jax.device_put(batch)
    held, programs, temporaries = [state], {}, {}
    for name, loss in {PLAIN: "ce", OURS: "smmd"}.items():
        step = jax.jit(make_step(graphdef, make_objective(loss), optimizer), donate_argnums=0)
        compiled = step.lower(state, batch, kernel, {}).compile()
        temporaries[name] = compiled.memory_analysis().temp_size_in_bytes

        def call(compiled=compiled) -> float:
            held[0], metrics = compiled(held[0], batch, kernel, {})
            jax.block_until_ready(held[0])
            return float(metrics["loss"])

        programs[name] = call
    return programs, temporaries


def peer_step(torch: Any, transformers: Any, folder: str, batch: Batch) -> Callable[[], float]:
    """The same step as users of transformers write it: its attention, torch's fused AdamW, clipping by the norm."""
    device = torch_device(torch)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
    matrices = [leaf for leaf in model.parameters() if leaf.ndim >= 2]
    vectors = [leaf for leaf in model.parameters() if leaf.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": _DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=_RATE, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    ids = torch.as_tensor(np.array(batch.input_ids), dtype=torch.int64, device=device)
    targets = torch.as_tensor(np.array(batch.targets), dtype=torch.int64, device=device)

    def call() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        return loss.item()

    return synchronized(torch, call)
