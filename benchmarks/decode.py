"""`python -m benchmarks.decode`: greedy generation beside transformers.generate, the same random weights in both.

A decoder of SmolLM2-135M's shape, float32, 8 prompts of 64 tokens and 64 new ones; the two take turns in one process.
Needs the parity extra.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers

from benchmarks.timing import interleave, summarise, write_result
from smmd_jax.backbones import PRESETS, load_pretrained
from smmd_jax.backbones.hf_fields import hf_fields
from train.generate import generate

BATCH, PROMPT, NEW = 8, 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of both programs")
    parser.add_argument("--preset", default="smollm2-135m", help="shape of the decoder")
    parser.add_argument("--json", type=Path, help="write rows, command, machine and versions to this file")
    options = parser.parse_args()
    config = PRESETS[options.preset]
    torch.manual_seed(0)
    fields = hf_fields(config)
    reference = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float32
    ).eval()
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        port = load_pretrained(folder)
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (BATCH, PROMPT))
    mask = np.ones_like(ids)
    theirs = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)

    def run_reference() -> np.ndarray:
        with torch.no_grad():
            inputs = {"input_ids": torch.as_tensor(ids), "attention_mask": torch.as_tensor(mask)}
            rows = reference.generate(**inputs, generation_config=theirs)
        return rows[:, PROMPT:].numpy()

    def run_port() -> np.ndarray:
        return np.asarray(generate(port, ids, attention_mask=mask, max_new_tokens=NEW))

    agreement = float((run_port() == run_reference()).mean())
    times = summarise(
        interleave({"transformers.generate": run_reference, "ours": run_port}, rounds=options.rounds),
        "transformers.generate",
    )
    rows = [
        {
            "program": name,
            "tokens/s": BATCH * NEW / (1e-3 * row["median_ms"]),
            "speed": 1 / row["ratio"],
            "speed by minima": 1 / row["ratio_of_minima"],
            "same tokens": agreement,
        }
        for name, row in times.items()
    ]
    for row in rows:
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else value for key, value in row.items()))
    if options.json:
        write_result(options.json, "benchmarks.decode", rows, ("jax", "jaxlib", "torch", "transformers"))


if __name__ == "__main__":
    main()
