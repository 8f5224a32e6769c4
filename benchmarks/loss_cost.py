"""What the losses cost beside cross entropy, value and gradient: ratios to optax's cross entropy on the same arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.goals import Goal, Measured
from benchmarks.naive import naive_smmd_loss
from benchmarks.peers import find_peers, missing_rows, synchronized, torch_device
from benchmarks.timing import interleave, summarise
from smmd_jax import (
    LOSSES,
    chunked_cross_entropy_and_numeric,
    chunked_loss_sums,
    cross_entropy_loss,
    make_numeric_kernel,
    make_numeric_vocab,
    mean_from,
    numeric_mask,
    smmd_loss,
    sum_and_count,
)
from train.chunked_head import chunked_losses

WEIGHT, NUMERIC_SHARE = 3.0, 0.15

# name -> (rows T, vocabulary V, numeric tokens N, dtype, ids next to one another?)
LOGIT_SETTINGS = {
    "logits, float32, N = 10, V = 32,000": (2048, 32_000, 10, "float32", True),
    "logits, float32, N = 1110, V = 32,000": (2048, 32_000, 1110, "float32", False),
    "logits, float32, N = 1110, V = 128,256": (2048, 128_256, 1110, "float32", False),
    "logits, bfloat16, N = 10, V = 32,000": (2048, 32_000, 10, "bfloat16", True),
}
HIDDEN_SETTING = ("hidden, float32, D = 576, N = 10, V = 49,152", 2048, 576, 49_152, 10)

# (setting, program, quantity of `quantities`) -> goal, an upper bound.
GOALS = {
    ("logits, float32, N = 10, V = 32,000", "CE + SMMD", "time"): 1.02,
    ("logits, float32, N = 10, V = 32,000", "CE + SMMD", "to torch CE + ntloss"): 0.7,
    ("logits, float32, N = 1110, V = 32,000", "CE + SMMD", "time"): 1.08,
    ("logits, float32, N = 1110, V = 32,000", "CE + SMMD", "SMMD part to naive"): 0.1,
    ("logits, float32, N = 1110, V = 32,000", "CE + SMMD", "added temporaries / (T N 4 bytes)"): 2.0,
    ("logits, float32, N = 1110, V = 128,256", "CE + SMMD", "time"): 1.05,
    ("logits, float32, N = 1110, V = 128,256", "CE + SMMD", "SMMD part to naive"): 0.1,
    ("logits, float32, N = 1110, V = 128,256", "CE + SMMD", "to torch CE + ntloss"): 0.7,
    ("logits, bfloat16, N = 10, V = 32,000", "CE + SMMD", "time"): 1.00,
    ("logits, bfloat16, N = 10, V = 32,000", "CE + SMMD", "temporaries"): 0.5,
    (HIDDEN_SETTING[0], "sums in chunks", "time"): 1.05,
    (HIDDEN_SETTING[0], "sums in chunks", "temporaries"): 0.20,
    (HIDDEN_SETTING[0], "total in chunks, as a step takes it", "time"): 1.05,
    (HIDDEN_SETTING[0], "total in chunks, as a step takes it", "temporaries"): 0.30,
}

TORCH = ("torch CE", "torch CE + ntloss")

Program = Callable[..., Any]


def measure(*, quick: bool, rounds: int) -> Measured:
    """Measure every setting; `quick` takes a sixteenth of the rows and of the vocabulary."""
    measured, part = Measured(rows=[], goals=[]), 16 if quick else 1
    for setting, (count, width, numbers, dtype, contiguous) in LOGIT_SETTINGS.items():
        count, width = count // part, width // part
        kernel = make_kernel(numbers, width, contiguous=contiguous)
        logits = jnp.asarray(np.random.default_rng(2).normal(size=(count, width)), dtype)
        operands = (logits, jnp.asarray(draw_targets(kernel, count, width)), kernel)
        measured += _measure_setting(setting, logit_programs(), operands, 0, rounds)
    setting, count, depth, width, numbers = HIDDEN_SETTING
    count, width, rng = count // part, width // part, np.random.default_rng(3)
    kernel = make_kernel(numbers, width, contiguous=True)
    hidden = jnp.asarray(rng.normal(size=(count, depth)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(depth, width)) / depth**0.5, jnp.float32)
    operands = (hidden, head, jnp.asarray(draw_targets(kernel, count, width)), kernel)
    return measured + _measure_setting(setting, hidden_programs(), operands, (0, 1), rounds)


def make_kernel(count: int, width: int, *, contiguous: bool):
    """A kernel over `count` digit strings (as Llama-3 has 1110 of them), ids in order or scattered."""
    texts = [f"{value:0{digits}d}" for digits in (1, 2, 3) for value in range(10**digits)][:count]
    ids = 100 + np.arange(count) if contiguous else np.random.default_rng(0).permutation(width)[:count]
    vocab = make_numeric_vocab(dict(zip(texts, ids.tolist(), strict=True)), policy="all_integers")
    return make_numeric_kernel(vocab)


def draw_targets(kernel: Any, rows: int, width: int) -> np.ndarray:
    """Targets of which 15 % are numeric."""
    rng, ids = np.random.default_rng(1), np.asarray(kernel.token_ids)
    text = np.setdiff1d(np.arange(width), ids)
    return np.where(rng.random(rows) < NUMERIC_SHARE, rng.choice(ids, rows), rng.choice(text, rows)).astype(np.int32)


def paper_mean(losses: jax.Array, targets: jax.Array, kernel: Any) -> jax.Array:
    return mean_from(*sum_and_count(losses, numeric_mask(targets, kernel)))


def logit_programs() -> dict[str, Program]:
    def optax_ce(logits, targets, kernel):
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def own_ce(logits, targets, kernel):
        return cross_entropy_loss(logits, targets).mean()

    def ce_and_smmd(logits, targets, kernel):
        smmd = paper_mean(smmd_loss(logits, targets, kernel), targets, kernel)
        return own_ce(logits, targets, kernel) + WEIGHT * smmd

    def ce_and_naive(logits, targets, kernel):
        smmd = paper_mean(naive_smmd_loss(logits, targets, kernel), targets, kernel)
        return optax_ce(logits, targets, kernel) + WEIGHT * smmd

    return {"CE (optax)": optax_ce, "CE": own_ce, "CE + SMMD": ce_and_smmd, "CE + naive SMMD": ce_and_naive}


def hidden_programs() -> dict[str, Program]:
    def full(hidden, head, targets, kernel):
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ head, targets).mean()

    def full_and_smmd(hidden, head, targets, kernel):
        logits = hidden @ head
        smmd = paper_mean(smmd_loss(logits, targets, kernel), targets, kernel)
        return cross_entropy_loss(logits, targets).mean() + WEIGHT * smmd

    def in_chunks(hidden, head, targets, kernel):
        ce, numeric = chunked_cross_entropy_and_numeric(hidden, head, targets, kernel)
        return ce.mean() + WEIGHT * paper_mean(numeric, targets, kernel)

    def sums_in_chunks(hidden, head, targets, kernel):
        numeric = numeric_mask(targets, kernel)
        weights = jnp.full(targets.shape, 1 / targets.size), WEIGHT * numeric / jnp.maximum(numeric.sum(), 1)
        ce, smmd = chunked_loss_sums(hidden, head, targets, kernel, ce_weights=weights[0], numeric_weights=weights[1])
        return ce + smmd

    def as_a_step(hidden, head, targets, kernel):
        numeric = numeric_mask(targets, kernel)
        weights = jnp.full(targets.shape, 1 / targets.size), WEIGHT * numeric / jnp.maximum(numeric.sum(), 1)
        total, _, _ = chunked_losses(
            hidden[None],
            head,
            targets[None],
            kernel,
            spec=LOSSES["smmd"],
            ce_weights=weights[0][None],
            numeric_weights=weights[1][None],
            mask=jnp.ones(targets.shape, bool)[None],
        )
        return total

    return {
        "full logits, CE (optax)": full,
        "full logits, CE + SMMD": full_and_smmd,
        "positions in chunks": in_chunks,
        "sums in chunks": sums_in_chunks,
        "total in chunks, as a step takes it": as_a_step,
    }


def _measure_setting(
    setting: str, programs: dict[str, Program], operands: tuple, differentiated, rounds: int
) -> Measured:
    """Compile, time and weigh the programs of one setting; one row each."""
    compiled = {
        name: jax.jit(jax.value_and_grad(program, argnums=differentiated)).lower(*operands).compile()
        for name, program in programs.items()
    }
    bytes_of = {name: program.memory_analysis().temp_size_in_bytes for name, program in compiled.items()}
    calls = {
        name: (lambda program=program: jax.block_until_ready(program(*operands))) for name, program in compiled.items()
    }
    has_peers = setting.startswith("logits, float32")
    peers = _torch_programs(operands) if has_peers else None
    base = next(iter(programs))
    times = summarise(interleave(calls | (peers or {}), rounds=rounds), base)
    rows = [
        {
            "setting": setting,
            "program": name,
            "median ms": round(time["median_ms"], 1),
            "time ratio": round(time["ratio"], 3),
            "of minima": round(time["ratio_of_minima"], 3),
            "temporaries MiB": round(bytes_of[name] / 2**20, 1) if name in bytes_of else None,
        }
        for name, time in times.items()
    ]
    if has_peers and peers is None:
        rows += missing_rows(setting, TORCH, "median ms")
    goals = []
    for (place, name, what), bound in GOALS.items():
        if place == setting:
            found = quantities(name, base, times, bytes_of, operands)
            goals.append(Goal(f"{name}, {setting}: {what}", found.get(what), at_most=bound))
    return Measured(rows=rows, goals=goals)


def quantities(name: str, base: str, times: dict, bytes_of: dict[str, int], operands: tuple) -> dict[str, float]:
    """What the goals of one program speak of, from the minima of the times: the least disturbed."""
    least = {program: time["min_ms"] for program, time in times.items()}
    found = {"time": least[name] / least[base], "temporaries": bytes_of.get(name, 0) / max(bytes_of[base], 1)}
    if "CE + naive SMMD" in least:
        found["SMMD part to naive"] = (least[name] - least["CE"]) / (least["CE + naive SMMD"] - least[base])
        kernel_columns = operands[1].size * operands[-1].token_ids.size * 4
        found["added temporaries / (T N 4 bytes)"] = (bytes_of.get(name, 0) - bytes_of["CE"]) / kernel_columns
    if TORCH[1] in least:
        found[f"to {TORCH[1]}"] = least[name] / least[TORCH[1]]
    return found


def _torch_programs(operands: tuple) -> dict[str, Callable[[], Any]] | None:
    """Torch's cross entropy and ntloss on the same float32 logits, where both are installed."""
    peers = find_peers("torch", "ntloss", "tokenizers", "transformers")
    if peers is None:
        return None
    torch, ntloss, tokenizers, transformers = peers
    device = torch_device(torch)
    logits, targets, kernel = operands
    width, ids = logits.shape[-1], np.asarray(kernel.token_ids)
    numbers = set(ids.tolist())
    words = {f"word{index}": index for index in range(width) if index not in numbers}
    for value, token in zip(np.asarray(kernel.values), ids.tolist(), strict=True):
        # "7", "07" and "007" are three tokens of one value
        text = next(text for text in (f"{int(value):0{digits}d}" for digits in (1, 2, 3)) if text not in words)
        words[text] = token
    words = tokenizers.models.WordLevel(words, unk_token="word0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="word0")
    ntl = ntloss.NTLoss(tokenizer, reweigh=False, digit_level=len(ids) == 10)
    scores = torch.tensor(np.asarray(logits), device=device)[None].requires_grad_()
    labels = torch.tensor(np.asarray(targets), dtype=torch.int64, device=device)[None]

    def run(loss: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            scores.grad = None
            loss().backward()

        return synchronized(torch, call)

    ce = lambda: torch.nn.functional.cross_entropy(scores[0], labels[0])
    return dict(zip(TORCH, (run(ce), run(lambda: ce() + 0.3 * ntl(scores, labels))), strict=True))
