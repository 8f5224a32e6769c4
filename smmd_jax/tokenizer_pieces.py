"""Read the table token id -> bytes of text out of a tokenizer, without loading a tokenizer library."""

import json
import os
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from smmd_jax.errors import TokenizerError

SPECIAL = "special token"
ADDED = "added token"
BYTE_FALLBACK = "byte-fallback piece"
CONTINUATION = "continuation piece, never the text of a whole word"
BEYOND_DEFAULT_SIZE = "beyond the tokenizer's default vocabulary size"

_BYTE_FALLBACK_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_FILE_NAMES = ("tokenizer.json", "tekken.json")
_PARTS = ("normalizer", "pre_tokenizer", "decoder")


class Piece(NamedTuple):
    """One token: its id, its text as bytes, and why it can never be a number (None: its text decides)."""

    token_id: int
    text: bytes
    left_out: str | None = None


def read_pieces(tokenizer: object) -> list[Piece]:
    """Read every token of a tokenizer as bytes, ordered by token id.

    Byte-level pieces go through the GPT-2 byte alphabet; in all others the SentencePiece sign U+2581 and an end-of-word
    suffix stand for a blank and the rest is UTF-8. Special tokens (the unknown token among them), added tokens,
    byte-fallback pieces such as `<0x35>` and continuation pieces such as WordPiece's `##5` are kept in the list with
    the reason that rules them out.

    Args:
      tokenizer: path to a tokenizer.json (Hugging Face) or tekken.json (Mistral), a folder that holds one, a
        `tokenizers.Tokenizer`, or a Hugging Face fast tokenizer. It is read, never changed.

    Returns:
      One `Piece` per token id.

    Raises:
      TokenizerError: the file is missing, is not JSON or is no tokenizer.
      TypeError: the object is none of the above.

    Example:
      >>> import os, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with open(os.path.join(folder, "tokenizer.json"), "w") as file:
      ...         _ = file.write('{"model": {"vocab": {"7": 0, "x": 1}}, "added_tokens": []}')
      ...     [(piece.token_id, piece.text) for piece in read_pieces(folder)]
      [(0, b'7'), (1, b'x')]
    """
    if isinstance(tokenizer, str | os.PathLike):
        try:
            path = _tokenizer_file(Path(tokenizer))
            data = path.read_bytes()
        except OSError as error:  # a name too long for the file system, no permission
            shown = os.fspath(tokenizer)[:80]
            raise TokenizerError(f"cannot read a tokenizer at {shown!r}: {error.strerror}") from error
        return _pieces_of_json(_load_json(data, f"{path}"), f"{path}")
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    name = type(tokenizer).__name__
    if not callable(getattr(backend, "to_str", None)):
        raise TypeError(
            f"cannot read the tokens of a {name}: pass a path to tokenizer.json or tekken.json, its folder, a "
            "tokenizers.Tokenizer or a Hugging Face fast tokenizer, or give {text: id} to make_numeric_vocab"
        )
    try:
        text = backend.to_str()
    except Exception as error:  # `tokenizers` raises a bare Exception for parts written in Python
        raise TokenizerError(
            f"the {name} cannot be written as JSON ({error}): give {{text: id}} to make_numeric_vocab instead"
        ) from error
    return _pieces_of_json(_load_json(text, f"the {name}"), f"the {name}")


def byte_level_alphabet() -> dict[str, int]:
    """Make the table character -> byte of byte-level BPE.

    Printable Latin-1 bytes stand for themselves; each of the others, in order, takes the next character from U+0100 on,
    so that a blank is U+0120.

    Returns:
      256 characters with their bytes.

    Example:
      >>> alphabet = byte_level_alphabet()
      >>> alphabet["7"], alphabet["\\u0120"], len(alphabet)
      (55, 32, 256)

    References:
      Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _tokenizer_file(path: Path) -> Path:
    if path.is_file():
        return path
    if path.is_dir():
        for name in _FILE_NAMES:
            if (path / name).is_file():
                return path / name
        raise TokenizerError(f"the folder {path} holds neither {' nor '.join(_FILE_NAMES)}")
    raise TokenizerError(
        f"there is no file or folder {path}: pass the path of a tokenizer.json or tekken.json, or of its folder "
        "(names of models on a hub are not looked up)"
    )


def _load_json(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError covers bad syntax and bad UTF-8
        raise TokenizerError(f"{where} is not JSON ({error}): wanted a tokenizer.json or tekken.json") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{where} holds a JSON {type(data).__name__}, not the object of a tokenizer.json")
    return data


def _pieces_of_json(data: dict[str, Any], where: str) -> list[Piece]:
    if isinstance(data.get("model"), dict) and "vocab" in data["model"]:
        read = _hugging_face_pieces
    elif isinstance(data.get("config"), dict) and isinstance(data.get("vocab"), list):
        read = _tekken_pieces
    else:
        raise TokenizerError(
            f"{where} has the keys {sorted(data)[:8]}: wanted 'model' with a 'vocab' (tokenizer.json) or 'config' and "
            "'vocab' (tekken.json)"
        )
    try:
        return sorted(read(data))
    except TokenizerError as error:
        raise TokenizerError(f"{where}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(f"{where} is a damaged tokenizer file: {type(error).__name__}: {error}") from error


def _hugging_face_pieces(data: dict[str, Any]) -> list[Piece]:
    model = data["model"]
    items = _hugging_face_items(model["vocab"])
    decode = _piece_decoder(data)
    pieces: dict[int, Piece] = {}
    for piece, token_id in items:
        _check_id(token_id, piece, pieces)
        pieces[token_id] = Piece(token_id, *decode(piece))

    ids = dict(items)
    unknown = model.get("unk_id", ids.get(model.get("unk_token")))
    if unknown in pieces:
        pieces[unknown] = pieces[unknown]._replace(left_out=SPECIAL)
    for token in data.get("added_tokens") or ():
        reason = SPECIAL if token.get("special") else ADDED
        text = token["content"].encode("utf-8", "surrogatepass")
        # The text of an added token never reaches the model's own piece, so a piece of that text is ruled out too.
        for token_id in {token["id"], ids.get(token["content"], token["id"])}:
            _check_id(token_id, token["content"], {})
            pieces[token_id] = Piece(token_id, text, reason)
    return list(pieces.values())


def _hugging_face_items(vocab: object) -> list[tuple[str, Any]]:
    """(piece, id) of each entry: Unigram lists [piece, score] by id; the other models map piece to id."""
    if isinstance(vocab, dict):
        return list(vocab.items())
    if not isinstance(vocab, list):
        kind = type(vocab).__name__
        raise TokenizerError(f"its vocab is a JSON {kind}: wanted {{piece: id}} or [[piece, score], ...]")
    for entry in vocab:
        if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
            raise TokenizerError(f"its vocab holds {entry!r}: wanted [piece, score]")
    return [(entry[0], token_id) for token_id, entry in enumerate(vocab)]


def _piece_decoder(data: dict[str, Any]) -> Callable[[str], tuple[bytes, str | None]]:
    """Make the function piece -> (text, reason to leave it out or None) of one tokenizer.json."""
    model = data["model"]
    byte_level = any(part["type"] == "ByteLevel" for key in _PARTS for part in _parts(data.get(key)))
    alphabet = byte_level_alphabet()
    characters, to_latin_1 = frozenset(alphabet), str.maketrans({c: chr(byte) for c, byte in alphabet.items()})
    prefix, suffix = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")

    def decode(piece: str) -> tuple[bytes, str | None]:
        if prefix and piece.startswith(prefix) and piece != prefix:
            return piece.encode("utf-8", "surrogatepass"), CONTINUATION
        text = piece
        blank = ""
        if suffix and piece.endswith(suffix):
            text, blank = piece[: -len(suffix)], " "
        if byte_level and characters.issuperset(text):
            return text.translate(to_latin_1).encode("latin-1") + blank.encode(), None
        reason = BYTE_FALLBACK if _BYTE_FALLBACK_PIECE.fullmatch(text) else None
        return (text.replace("\u2581", " ") + blank).encode("utf-8", "surrogatepass"), reason

    return decode


def _parts(node: object) -> Iterator[dict[str, Any]]:
    """Walk a normalizer, pre-tokenizer or decoder, through sequences of any depth."""
    if isinstance(node, dict):
        if "type" in node:
            yield node
        for value in node.values():
            yield from _parts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _parts(value)


def _tekken_pieces(data: dict[str, Any]) -> list[Piece]:
    special, size = data["config"]["default_num_special_tokens"], data["config"]["default_vocab_size"]
    names = {token["rank"]: token["token_str"] for token in data.get("special_tokens") or ()}
    pieces = {i: Piece(i, names.get(i, f"<SPECIAL_{i}>").encode(), SPECIAL) for i in range(special)}
    for entry in data["vocab"]:
        # Ranks start after the special tokens; those at or beyond the default size have no row in the model.
        rank, text = entry["rank"], b64decode(entry["token_bytes"], validate=True)
        _check_id(rank, text, {})
        _check_id(rank + special, text, pieces)
        reason = None if rank + special < size else BEYOND_DEFAULT_SIZE
        pieces[rank + special] = Piece(rank + special, text, reason)
    return list(pieces.values())


def _check_id(token_id: object, token: object, taken: Mapping[int, Piece]) -> None:
    if type(token_id) is not int or not 0 <= token_id < 2**31:
        raise TokenizerError(f"the id of token {token!r} is {token_id!r}: wanted an integer, 0 <= id < 2**31")
    if token_id in taken:
        raise TokenizerError(f"id {token_id} is given to two tokens, {taken[token_id].text!r} and {token!r}")
