"""Evaluation by generating: answers to the prompts of a split, graded one by one."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from train.generate import generate
from train.graders import GRADERS, Grade
from train.metrics import Metrics, score
from train.prompts import PromptBatch
from train.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Scored:
    """The scores of an evaluation and one row for each prediction."""

    metrics: Metrics
    predictions: list[dict[str, Any]]


def answer_prompts(
    model: Any,
    tokenizer: Tokenizer,
    batches: Iterable[PromptBatch],
    *,
    max_new_tokens: int,
    mesh: Mesh | None = None,
) -> list[tuple[Any, str]]:
    """Generate greedily for every prompt; returns (example, text up to the end of the sequence).

    Args:
      model: takes `train.generate.generate`'s call.
      tokenizer: decodes the answers.
      batches: from `make_prompt_batches`.
      max_new_tokens: length of an answer that does not end by itself; it is graded as it stands.
      mesh: of the model; its devices share the prompts. None: each does all.
    """
    answers = []
    for batch in batches:
        tokens = answer_tokens(model, tokenizer, batch, max_new_tokens=max_new_tokens, mesh=mesh)
        # Rows past the examples only fill the shape.
        for example, row in zip(batch.examples, tokens[: len(batch.examples)].tolist(), strict=True):
            answers.append((example, answer_text(tokenizer, row)))
    return answers


def answer_tokens(
    model: Any, tokenizer: Tokenizer, batch: PromptBatch, *, max_new_tokens: int, **sampling: Any
) -> Int[np.ndarray, "B new"]:
    """Generate for a batch of prompts, as the tokenizer ends and pads; `sampling`: `generate`'s own options."""
    return np.asarray(
        generate(
            model,
            batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=max_new_tokens,
            eos_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
            **batch.vision(),
            **sampling,
        )
    )


def answer_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Decode a generated answer up to the first token that ends it."""
    end = next((place for place, token in enumerate(tokens) if token in tokenizer.eos_ids), len(tokens))
    return tokenizer.decode(tokens[:end])


def grade_answers(answers: Sequence[tuple[Any, str]], grader: str) -> Scored:
    """Grade (example, prediction) pairs with a grader of the table."""
    grades = [GRADERS[grader](prediction, example.answer) for example, prediction in answers]
    rows = [_row(example, text, grade) for (example, text), grade in zip(answers, grades, strict=True)]
    return Scored(score(grades), rows)


def _row(example: Any, prediction: str, grade: Grade) -> dict[str, Any]:
    as_float = lambda value: None if value is None else float(value)
    return {
        "key": example.key,
        "prompt": example.prompt,
        "answer": example.answer,
        "prediction": prediction,
        "correct": grade.correct,
        "parsed": grade.parsed,
        "value": as_float(grade.value),
        "gold_value": as_float(grade.gold_value),
    }
