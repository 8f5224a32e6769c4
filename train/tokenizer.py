"""Tokenizers: a thin class over the Hugging Face `tokenizers` library, and the digit-level one of the tiny backbone."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from smmd_jax.errors import TokenizerError
from smmd_jax.json_files import read_object
from smmd_jax.tokenizer_pieces import byte_level_alphabet
from train.chat import TEMPLATE_FILE, read_chat_template, render_chat
from train.tekken import EOS_TOKEN, PAD_TOKEN, is_tekken, tokenizer_json_of_tekken

FILE_NAME, TEKKEN_NAME = "tokenizer.json", "tekken.json"
END_OF_SEQUENCE, PADDING = "<eos>", "<pad>"
_NAMED_TOKENS = ("eos_token", "bos_token", "unk_token", "pad_token")

# Digits take the first ids in a scrambled order: id 0 is a real token, and ids neither equal the values nor run up or
# down with them, so taking id 0 for padding, or an id for a value, is seen at once.
_DIGITS = "7412093865"
# Each phrase becomes one token: it is merged from left to right, so every beginning of it is a token too. The signs
# merge from the right, because in " - -4" only the first minus has a blank behind it.
_PHRASES = ("What is the value of ", "Evaluate ", "Calculate ", "?\n", ".\n")
_SIGNS = (" + ", " - ")


class Tokenizer:
    """Encode and decode text with a ``tokenizer.json`` or Mistral's ``tekken.json``.

    Text is only ever text: "<eos>" written in a question becomes ordinary tokens. `encode` adds nothing in front or
    behind; `encode_prompt` adds what the family's models expect in front of a prompt.

    Args:
      backend: the `tokenizers.Tokenizer`.
      eos_token: the token that ends an answer: what training appends.
      pad_token: the token that fills rows; None uses the end-of-sequence token, which is safe because every mask here
        comes from lengths and never from token values.
      stop_ids: further tokens that end an answer when the model writes them.
      chat_template: Jinja text of the model's chats, or None.
      template_tokens: further names the template may use, such as {"bos_token": "<s>"}.
      chat: whether `encode_prompt` puts a prompt into the chat template, as one message of the user.

    Attributes:
      eos_id: what training appends.
      eos_ids: every token that stops generation, `eos_id` first.
      prefix_ids: what the file itself says stands in front of a text (Llama-3, Gemma and Mistral: one token; Qwen and
        SmolLM2: nothing).
      vocab_size: the largest id + 1; ids may have gaps, and a head must reach the largest.

    Raises:
      TokenizerError: a special token that the vocabulary lacks, or `chat` without a template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token: str = END_OF_SEQUENCE,
        pad_token: str | None = PADDING,
        stop_ids: Sequence[int] = (),
        chat_template: str | None = None,
        template_tokens: Mapping[str, str] | None = None,
        chat: bool = False,
    ) -> None:
        if chat and chat_template is None:
            raise TokenizerError(
                "this task asks its questions as chats, and the tokenizer has no chat template: choose an instruct "
                f"model, whose folder holds a {TEMPLATE_FILE} or a tokenizer_config.json with one."
            )
        self.backend = backend
        self.backend.encode_special_tokens = True
        self.backend.no_padding()
        self.backend.no_truncation()
        self.eos_id = self._special_id(eos_token)
        self.pad_id = self.eos_id if pad_token is None else self._special_id(pad_token)
        self.eos_ids = tuple(dict.fromkeys((self.eos_id, *stop_ids)))
        self.chat_template, self.chat = chat_template, chat
        self.template_tokens = dict(template_tokens or {})
        self.template_tokens |= {"eos_token": eos_token, "pad_token": self.backend.id_to_token(self.pad_id)}
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = {token.content: index for index, token in added.items() if token.special}
        self.prefix_ids = tuple(_leading_ids(self.backend))

    @classmethod
    def from_file(
        cls, path: str | Path, *, eos_token: str | None = None, pad_token: str | None = None, chat: bool = False
    ) -> "Tokenizer":
        """Read a ``tokenizer.json`` or ``tekken.json``, or the folder that holds one (the first, where it holds both).

        The end of sequence: ``eos_token_id`` of generation_config.json (a list counts whole), or else of config.json,
        names the tokens that stop generation. Training appends the ``eos_token`` of tokenizer_config.json, because that
        is the one the family ends a turn with (the list of Llama-3-Instruct begins with the end of a document); it
        stops generation too. Without it training appends the first of the list. A token that is not named anywhere is
        looked up under the names of the digit-level tokenizer (of Mistral's, for a tekken.json).

        Raises:
          TokenizerError: no such file, a file that is not a tokenizer, or no end-of-sequence token.
        """
        path = tokenizer_file(Path(path))
        backend, (default_eos, default_pad) = _read_backend(path)
        folder = path.parent
        config_path = folder / "tokenizer_config.json"
        config = _read_object(config_path)
        stop_ids = _eos_ids_of(folder, backend)
        named = {name: _token_text(config_path, config, name) for name in _NAMED_TOKENS}
        eos_token = eos_token or named["eos_token"]
        if eos_token is None:
            eos_token = backend.id_to_token(stop_ids[0]) if stop_ids else default_eos
        pad_token = pad_token or named["pad_token"]
        if pad_token is None and backend.token_to_id(default_pad) is not None:
            pad_token = default_pad
        return cls(
            backend,
            eos_token=eos_token,
            pad_token=pad_token,
            stop_ids=stop_ids,
            chat_template=read_chat_template(folder, config),
            template_tokens={name: text for name, text in named.items() if text is not None and name != "eos_token"},
            chat=chat,
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts; faster than one by one."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt: `prefix_ids` and the text, or with `chat` the text as the user's message."""
        return self.encode_prompts([text])[0]

    def encode_prompts(
        self, texts: Sequence[str], runs: Sequence[Sequence[str]] | None = None
    ) -> list[list[int]]:
        """Token ids of many prompts.

        Args:
          texts: one a prompt.
          runs: per prompt the special tokens that its image is, which come before its text; empty: no image.

        Raises:
          TokenizerError: the chat template cannot be applied or does not write the image, or an unknown token.
        """
        runs = [()] * len(texts) if runs is None else runs
        if self.chat:
            return [self._encode_chat(text, self.ids_of(run)) for text, run in zip(texts, runs, strict=True)]
        pairs = zip(self.encode_batch(texts), runs, strict=True)
        return [[*self.prefix_ids, *self.ids_of(run), *ids] for ids, run in pairs]

    def ids_of(self, names: Sequence[str]) -> list[int]:
        """Ids of special tokens by their names.

        Raises:
          TokenizerError: one that the vocabulary lacks.
        """
        known = {name: self._special_id(name) for name in dict.fromkeys(names)}
        return [known[name] for name in names]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out, bytes that are not UTF-8 become the replacement character."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=True)

    def save(self, folder: str | Path) -> Path:
        """Write ``tokenizer.json`` and what else `from_file` reads into the folder, which is made if need be.

        Returns:
          The path of ``tokenizer.json``.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        self.backend.save(str(path))
        name = self.backend.id_to_token
        config = self.template_tokens | {"pad_token": name(self.pad_id), "tokenizer_class": "PreTrainedTokenizerFast"}
        _write_object(folder / "tokenizer_config.json", config)
        _write_object(
            folder / "generation_config.json", {"eos_token_id": list(self.eos_ids), "pad_token_id": self.pad_id}
        )
        if self.chat_template is not None:
            (folder / TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")
        return path

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that encoding depends on: two tokenizers with one fingerprint encode alike."""
        text = f"{self.backend.to_str()}\n{self.eos_id} {self.pad_id}"
        if self.chat:
            text += f"\n{json.dumps(self.template_tokens, sort_keys=True)}\n{self.chat_template}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def missing_bytes(self) -> tuple[int, ...]:
        """Bytes that a byte-level tokenizer has no token for, and so drops; none for tokenizers of another kind."""
        vocabulary = self.backend.get_vocab(with_added_tokens=False)
        missing = tuple(byte for letter, byte in byte_level_alphabet().items() if letter not in vocabulary)
        return missing if isinstance(self.backend.decoder, decoders.ByteLevel) else ()

    def _encode_chat(self, message: str, run: Sequence[int] = ()) -> list[int]:
        pieces = render_chat(
            self.chat_template,
            message,
            specials=self.special_ids,
            variables=self.template_tokens,
            image=bool(run),
        )
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            ids += [self.special_ids[piece]] if index % 2 else self.encode(piece)
        return _with_run(ids, run) if run else ids

    def _special_id(self, token: str) -> int:
        token_id = self.backend.token_to_id(token)
        if token_id is None:
            raise TokenizerError(f"Tokenizer: the vocabulary has no {token!r}; pass the name of its special token.")
        return token_id


def make_task_tokenizer(more: Sequence[str] = ()) -> Tokenizer:
    """Build the digit-level tokenizer of the tiny backbones: bytes, single digits, and one token per template phrase.

    Any text survives encoding and decoding. A digit is always a token of its own, whatever stands beside it. Ids: the
    ten digits, the other 246 bytes, the merged phrases, ``<eos>``, ``<pad>``, and the further special tokens `more`.

    Example:
      >>> tokenizer = make_task_tokenizer()
      >>> [tokenizer.decode([token]) for token in tokenizer.encode("What is 40 - -5?")]
      ['What is ', '4', '0', ' - ', '-', '5', '?']
    """
    letters = [*_DIGITS, *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(_DIGITS))]
    merges: list[tuple[str, str]] = []
    for phrase in map(_byte_letters, _SIGNS):
        merges += [(phrase[1], phrase[2]), (phrase[0], phrase[1:])]
    for phrase in map(_byte_letters, _PHRASES):
        merges += [(phrase[:end], phrase[end]) for end in range(1, len(phrase))]
    vocabulary = {token: index for index, token in enumerate([*letters, *("".join(merge) for merge in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in (END_OF_SEQUENCE, PADDING, *more)]
    backend.add_special_tokens(specials)
    return Tokenizer(backend)


def _with_run(ids: list[int], run: Sequence[int]) -> list[int]:
    """Put the tokens of an image in the place of those that the chat template writes for one."""
    places = [place for place, token in enumerate(ids) if token in set(run)]
    if not places or places[-1] - places[0] + 1 != len(places):
        raise TokenizerError(
            f"the chat template writes {len(places)} special tokens of an image, wanted those of one: choose the "
            "template of a model with vision."
        )
    return [*ids[: places[0]], *run, *ids[places[-1] + 1 :]]


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer's file: the path itself, or the one in the folder it names.

    Raises:
      TokenizerError: there is none.
    """
    if path.is_file():
        return path
    for name in (FILE_NAME, TEKKEN_NAME):
        if (path / name).is_file():
            return path / name
    if path.is_dir():
        raise TokenizerError(f"Tokenizer: {path} holds neither {FILE_NAME} nor {TEKKEN_NAME}.")
    raise TokenizerError(f"Tokenizer: {path} does not exist; give a {FILE_NAME} or the folder that holds one.")


def check_head_width(tokenizer: Tokenizer, vocab_size: int) -> tuple[str, ...]:
    """Check that the head has a column for every token that a text or an answer can hold.

    A head may be wider (Qwen2.5: 151,936 columns for 151,665 tokens). Special tokens beyond its width are let pass with
    a note, since text never becomes one (Gemma-3's image token stands beyond the head of its text models).

    Returns:
      Sentences for the user, none where every token has a column.

    Raises:
      TokenizerError: ordinary tokens, or the end of sequence or padding, lie beyond the head.
    """
    if tokenizer.vocab_size <= vocab_size:
        return ()
    special = set(tokenizer.special_ids.values())
    beyond = {index for index in tokenizer.backend.get_vocab(with_added_tokens=True).values() if index >= vocab_size}
    needed = beyond - special | beyond & {*tokenizer.eos_ids, tokenizer.pad_id}
    if needed:
        raise TokenizerError(
            f"the head has {vocab_size:,} columns and the tokenizer's ids reach {max(needed):,}, so {len(needed):,} of "
            "its tokens have none: tokenizer and model do not belong together."
        )
    return (f"{len(beyond)} special tokens, up to id {max(beyond):,}, have no column in the head and are never used.",)


def _read_backend(path: Path) -> tuple[tokenizers.Tokenizer, tuple[str, str]]:
    """The tokenizer of a file, and the names its end-of-sequence and padding tokens go by unless others are given."""
    try:
        content = path.read_text(encoding="utf-8")
        # Reading 10 MB of JSON twice is for a file of that name only.
        data = json.loads(content) if path.name != FILE_NAME else None
        if is_tekken(data):
            content = json.dumps(tokenizer_json_of_tekken(data))
            return tokenizers.Tokenizer.from_str(content), (EOS_TOKEN, PAD_TOKEN)
        return tokenizers.Tokenizer.from_str(content), (END_OF_SEQUENCE, PADDING)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"Tokenizer: {path} is not a tokenizer file: {error}") from error


def _leading_ids(backend: tokenizers.Tokenizer) -> list[int]:
    """What the post-processor puts in front of a text."""
    encoding = backend.encode("0", add_special_tokens=True)
    added = encoding.special_tokens_mask
    return encoding.ids[: added.index(0)] if 0 in added else []


def _eos_ids_of(folder: Path, backend: tokenizers.Tokenizer) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        found = _read_object(folder / name).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not ids or any(type(token) is not int or token < 0 or backend.id_to_token(token) is None for token in ids):
            raise TokenizerError(
                f"Tokenizer: eos_token_id of {folder / name} is {found!r}, wanted the id of one or more of its tokens."
            )
        return ids
    return []


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"Tokenizer: {path} cannot be used: {error}.") from error


def _write_object(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _byte_letters(phrase: str) -> str:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(phrase)[0][0]


def _token_text(path: Path, config: Mapping[str, Any], name: str) -> str | None:
    """A special token of tokenizer_config.json: its text, or an object that holds it; None where it has none."""
    entry = config.get(name)
    content = entry.get("content") if isinstance(entry, dict) else entry
    if entry is not None and not isinstance(content, str):
        raise TokenizerError(f"Tokenizer: {name} of {path} is {entry!r}, wanted the text of a token.")
    return content
