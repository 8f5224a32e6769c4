"""Greedy generation beside transformers.generate: the same random weights and prompts in both, turn by turn."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from benchmarks.goals import Goal, Measured
from benchmarks.peers import find_peers, missing_rows, synchronized, torch_device
from benchmarks.step import Setting
from benchmarks.timing import interleave, summarise
from smmd_jax.backbones import Decoder, save_pretrained
from train.generate import generate

PEER, OURS = "transformers.generate", "ours"
PRESET, BATCH, PROMPT, NEW = "smollm2-135m", 8, 64, 64
SETTING = f"SmolLM2-135M, float32, {BATCH} prompts of {PROMPT}, {NEW} new tokens"


def measure(*, quick: bool, rounds: int) -> Measured:
    """Time the whole generation: prefill and every new token."""
    config = Setting(preset=PRESET, rows=BATCH, length=PROMPT).config(quick=quick)
    prompt, new = (8, 8) if quick else (PROMPT, NEW)
    model = Decoder(config, rngs=nnx.Rngs(0))
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (BATCH, prompt))
    mask = np.ones_like(ids)
    programs = {OURS: lambda: np.asarray(generate(model, ids, attention_mask=mask, max_new_tokens=new))}
    peers = find_peers("torch", "transformers")
    if peers is not None:
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(model, Path(folder) / "model")
            programs[PEER] = _peer(*peers, str(Path(folder) / "model"), ids, new)
    tokens = [program() for program in programs.values()]
    times = summarise(interleave(programs, rounds=rounds), PEER if peers is not None else OURS)
    rows: list[dict[str, Any]] = missing_rows(SETTING, [PEER], "tokens/s") if peers is None else []
    for name, time in times.items():
        rows.append(
            {
                "setting": SETTING,
                "program": name,
                "tokens/s": round(BATCH * new / (1e-3 * time["median_ms"]), 1),
                "processor ms": round(time["processor_ms"], 1),
                "speed": None if peers is None else round(1 / time["ratio"], 3),
                "speed by minima": None if peers is None else round(1 / time["ratio_of_minima"], 3),
                "same tokens": None if peers is None else round(float((tokens[0] == tokens[-1]).mean()), 4),
            }
        )
    speed = None if peers is None else 1 / times[OURS]["ratio_of_minima"]
    return Measured(rows=rows, goals=[Goal("generation: speed to transformers.generate", speed, at_least=1.1)])


def _peer(torch: Any, transformers: Any, folder: str, ids: np.ndarray, new: int):
    device = torch_device(torch)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    theirs = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    inputs = torch.as_tensor(ids, device=device)

    def call() -> np.ndarray:
        with torch.no_grad():
            rows = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), generation_config=theirs)
        return rows[:, ids.shape[1] :].cpu().numpy()

    return synchronized(torch, call)
