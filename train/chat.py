"""A model's chat template: one user message in, the text of a prompt and its special tokens out."""

import datetime
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from smmd_jax.errors import TokenizerError

TEMPLATE_FILE = "chat_template.jinja"
# Some templates tell the model the date. A fixed one: an example must encode alike today and when the run is resumed.
_TODAY = datetime.date(2024, 7, 26)


def read_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a model folder: chat_template.jinja, or what tokenizer_config.json holds, or None.

    Of several named templates it is the one called "default".

    Raises:
      TokenizerError: a file that is not text in UTF-8.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path} is not a chat template: {error}.") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def render_chat(
    template: str, message: str, *, specials: Collection[str], variables: Mapping[str, str], image: bool = False
) -> list[str]:
    """Render a chat of one user message, up to where the model's answer begins, and cut it at the special tokens.

    Only the template writes special tokens: "<|im_end|>" inside the message stays text. The pieces alternate, text and
    special token, and their concatenation is what the template makes of the message.

    Args:
      template: Jinja text; it runs in a sandbox.
      message: what the user says.
      specials: the special tokens of the tokenizer.
      variables: further names the template may use, such as `bos_token`.
      image: whether the message begins with an image, which the template writes as its special tokens.

    Returns:
      An odd number of pieces: text, special token, text, ..., text; texts may be empty.

    Raises:
      TokenizerError: jinja2 is missing, or the template fails or leaves the message out.

    Example:
      >>> render_chat("{{ bos_token }}Q: {{ messages[0].content }} A:", "2<s>", specials=["<s>"],
      ...             variables={"bos_token": "<s>"})
      ['', '<s>', 'Q: 2<s> A:']
    """
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError as error:
        raise TokenizerError("a chat template needs the package jinja2: pip install jinja2.") from error

    def raise_exception(text: str) -> None:
        raise jinja2.TemplateError(text)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    long_first = sorted((special for special in specials if len(special) > 1), key=len, reverse=True)
    either = re.compile("|".join(map(re.escape, long_first)) or r"(?!)")
    marker = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in message)
    hidden = message
    while either.search(hidden):
        hidden = either.sub(lambda found: found[0][0] + marker + found[0][1:], hidden)
    content = [{"type": "image"}, {"type": "text", "text": hidden}] if image else hidden
    try:
        text = environment.from_string(template).render(
            messages=[{"role": "user", "content": content}], add_generation_prompt=True, tools=None, documents=None,
            **variables,
        )  # fmt: skip
    except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
        raise TokenizerError(f"the chat template cannot be applied: {type(error).__name__}: {error}") from error
    if hidden.strip() not in text:
        raise TokenizerError("the chat template leaves the user's message out, or changes it.")
    pieces = re.split(f"({either.pattern})", text)
    return [piece.replace(marker, "") for piece in pieces]
