"""Tokenizers: a thin class over the Hugging Face `tokenizers` library, and the digit-level one of the tiny backbone."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from smmd_jax.errors import TokenizerError

FILE_NAME = "tokenizer.json"
END_OF_SEQUENCE, PADDING = "<eos>", "<pad>"

# Digits take the first ids in a scrambled order: id 0 is a real token, and ids neither equal the values nor run up or
# down with them, so taking id 0 for padding, or an id for a value, is seen at once.
_DIGITS = "7412093865"
# Each phrase becomes one token: it is merged from left to right, so every beginning of it is a token too. The signs
# merge from the right, because in " - -4" only the first minus has a blank behind it.
_PHRASES = ("What is the value of ", "Evaluate ", "Calculate ", "?\n", ".\n")
_SIGNS = (" + ", " - ")


class Tokenizer:
    """Encode and decode text with a ``tokenizer.json``.

    Text is only ever text: "<eos>" written in a question becomes ordinary tokens. Nothing is added in front or behind.

    Args:
      backend: the `tokenizers.Tokenizer`.
      eos_token: the token that ends an answer.
      pad_token: the token that fills rows; None uses the end-of-sequence token, which is safe because every mask here
        comes from lengths and never from token values.

    Raises:
      TokenizerError: a special token that the vocabulary lacks.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_token: str = END_OF_SEQUENCE, pad_token: str | None = PADDING
    ) -> None:
        self.backend = backend
        self.backend.encode_special_tokens = True
        self.backend.no_padding()
        self.backend.no_truncation()
        self.eos_id = self._special_id(eos_token)
        self.pad_id = self.eos_id if pad_token is None else self._special_id(pad_token)
        # The largest id and not the count: ids may have gaps, and a head must reach the largest.
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def from_file(cls, path: str | Path, *, eos_token: str | None = None, pad_token: str | None = None) -> "Tokenizer":
        """Read a ``tokenizer.json`` or the folder that holds one.

        Special tokens that are not given are looked up in a ``tokenizer_config.json`` beside it, and then under the
        names of the digit-level tokenizer.

        Raises:
          TokenizerError: no such file, a file that is not a tokenizer, or no end-of-sequence token.
        """
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise TokenizerError(f"Tokenizer: {path} does not exist; give a {FILE_NAME} or the folder that holds one.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"Tokenizer: {path} is not a tokenizer file: {error}") from error
        config_path = path.with_name("tokenizer_config.json")
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        eos_token = eos_token or _token_text(config.get("eos_token")) or END_OF_SEQUENCE
        pad_token = pad_token or _token_text(config.get("pad_token"))
        if pad_token is None and backend.token_to_id(PADDING) is not None:
            pad_token = PADDING
        return cls(backend, eos_token=eos_token, pad_token=pad_token)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts; faster than one by one."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out, bytes that are not UTF-8 become the replacement character."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=True)

    def save(self, folder: str | Path) -> Path:
        """Write ``tokenizer.json`` into the folder, which is made if need be; returns its path."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        self.backend.save(str(path))
        return path

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer and its special ids: two tokenizers with one fingerprint encode alike."""
        text = f"{self.backend.to_str()}\n{self.eos_id} {self.pad_id}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _special_id(self, token: str) -> int:
        token_id = self.backend.token_to_id(token)
        if token_id is None:
            raise TokenizerError(f"Tokenizer: the vocabulary has no {token!r}; pass the name of its special token.")
        return token_id


def make_task_tokenizer() -> Tokenizer:
    """Build the digit-level tokenizer of the tiny backbone: bytes, single digits, and one token per template phrase.

    Any text survives encoding and decoding. A digit is always a token of its own, whatever stands beside it. Ids: the
    ten digits, the other 246 bytes, the merged phrases, ``<eos>``, ``<pad>``.

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
    specials = [AddedToken(token, special=True, normalized=False) for token in (END_OF_SEQUENCE, PADDING)]
    backend.add_special_tokens(specials)
    return Tokenizer(backend)


def _byte_letters(phrase: str) -> str:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(phrase)[0][0]


def _token_text(entry: object) -> str | None:
    """A special token of tokenizer_config.json: its text, or an object that holds it."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None
