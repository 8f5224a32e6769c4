"""What tasks of questions share: the two forms of a prompt, which questions count as one, disjoint splits."""

import hashlib
from collections.abc import Iterable

from train.exits import DataError
from train.tasks.base import Example

# {} is the question, as published. The chat form is the user's message; the model's own template goes around it.
PROMPTS = {"plain": "Question: {}\nAnswer:\n", "chat": "{}"}


def make_prompt(question: str, form: str) -> str:
    """Put a question into the fixed prompt of a form.

    Args:
      question: its text.
      form: "plain" or "chat".

    Example:
      >>> make_prompt("2 + 2?", "plain")
      'Question: 2 + 2?\\nAnswer:\\n'
    """
    return PROMPTS[form].format(question)


def question_hash(question: str) -> int:
    """Give 64 bits of a question, the same for any case and any blanks: what counts as one question everywhere here.

    Two questions of a million times a hundred thousand agree by chance with probability 5e-9.

    Example:
      >>> question_hash("How  many?\\n") == question_hash("how many?"), question_hash("a") == question_hash("b")
      (True, False)
    """
    text = " ".join(question.casefold().split())
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def name_question(question: str, image_sha256: str = "") -> str:
    """Add to a question what its image is, so that one question about two images counts as two.

    Args:
      question: its text, or a whole prompt.
      image_sha256: in hexadecimal; "": it has no image.

    Example:
      >>> name_question("What time is it?"), name_question("What time is it?", "5feceb66")
      ('What time is it?', 'What time is it? [image 5feceb66]')
    """
    return f"{question} [image {image_sha256}]" if image_sha256 else question


def name_example(example: Example) -> str:
    """Give the prompt of an example and what its image is; equal for two examples that ask the same."""
    return name_question(example.prompt, "" if example.image is None else hashlib.sha256(example.image).hexdigest())


def check_disjoint(name: str, train: Iterable[str], test: Iterable[str]) -> None:
    """Refuse splits that share a question.

    Args:
      name: of the data set, for the message.
      train, test: questions.

    Raises:
      DataError: a question of `test`, up to case and blanks, is in `train` too.
    """
    codes = {question_hash(question) for question in test}
    shared = [question for question in train if question_hash(question) in codes]
    if shared:
        raise DataError(
            f"{name}: {len(shared):,} training questions are in the test split too, for example {shared[0][:100]!r}; "
            "remove them from one of the files."
        )
