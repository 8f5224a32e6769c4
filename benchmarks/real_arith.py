"""`python -m benchmarks.real_arith RUN_FOLDER EXTRACT.jsonl`: score a run on questions of the original generator.

The extract holds one JSON object a line with `question` and `answer`, as DeepMind's `arithmetic__add_sub_multiple`
prints them; it is not part of this project.
"""

import dataclasses
import json
import sys
from pathlib import Path

from train.assembly import assemble
from train.checkpoint import Checkpoints
from train.config import config_from_json
from train.log import read_jsonl
from train.prompts import make_prompt_batches
from train.scoring import answer_prompts, grade_answers
from train.tasks.arith import ANSWER_SEPARATOR
from train.tasks.base import Example


class Extract:
    """The rows of a file in random access."""

    def __init__(self, path: Path):
        self.fingerprint = str(path)
        self._rows = read_jsonl(path)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        row = self._rows[index]
        return Example(key=str(index), prompt=row["question"] + ANSWER_SEPARATOR, answer=row["answer"])


def main(folder: str, path: str) -> None:
    config = dataclasses.replace(config_from_json((Path(folder) / "config.json").read_text()), workdir=folder)
    run = assemble(config)
    with Checkpoints(Path(folder) / "checkpoints", writer=False) as checkpoints:
        restored = checkpoints.restore(run.state_like)
    if restored is None:
        raise SystemExit(f"{folder} holds no checkpoint.")
    batches = make_prompt_batches(Extract(Path(path)), run.tokenizer, batch_size=config.eval_batch_size)
    answers = answer_prompts(run.model(restored.state.parameters), run.tokenizer, batches, max_new_tokens=32)
    scored = grade_answers(answers, run.task.grader)
    print(json.dumps({"step": restored.step, "extract": Path(path).name, **dataclasses.asdict(scored.metrics)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
