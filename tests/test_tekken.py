"""tekken.json as a backend of `tokenizers`: merges worked out by hand, and what the real file is known to give."""

import base64
import json
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from smmd_jax import numeric_vocab_from_tokenizer
from smmd_jax.errors import TokenizerError
from train.tokenizer import Tokenizer

# Ranks 256 on: the lower one merges first.
MERGED = [b"ab", b"bc", b"abc", b" a", b"12", b"never"]
SPECIALS = 14


def tekken(**changes) -> dict:
    pieces = [*(bytes([byte]) for byte in range(256)), *MERGED]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    config = {
        "pattern": r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": SPECIALS + len(vocab) - 1,  # "never" has no row in the model
        "default_num_special_tokens": SPECIALS,
        "version": "v3",
    }
    return {"config": config | changes, "vocab": vocab}


def load(folder: Path, data: dict) -> Tokenizer:
    (folder / "tekken.json").write_text(json.dumps(data))
    return Tokenizer.from_file(folder)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("tekken"), tekken())


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", [b"abc"]),
        ("abcd", [b"abc", b"d"]),  # ab first, by its rank, and then with c
        ("bcbc", [b"bc", b"bc"]),
        ("aab", [b"a", b"ab"]),
        (" abc", [b" abc"[:1], b"abc"]),  # ab has a lower rank than " a"
        ("x ac", [b"x", b" a", b"c"]),
        ("12", [b"1", b"2"]),  # the pattern cuts between digits, so 12 is never merged
        ("never", [b"n", b"e", b"v", b"e", b"r"]),
        ("é", [b"\xc3", b"\xa9"]),
        ("<s>", [b"<", b"s", b">"]),
    ],
)
def test_pieces_merge_by_rank_as_worked_out_by_hand(toy, text, pieces):
    ids = {bytes([byte]): SPECIALS + byte for byte in range(256)}
    ids |= {piece: SPECIALS + 256 + index for index, piece in enumerate(MERGED)}
    assert toy.encode(text) == [ids[piece] for piece in pieces]


def test_special_tokens_take_the_first_ids(toy):
    assert (toy.eos_id, toy.eos_ids, toy.pad_id, toy.prefix_ids) == (2, (2,), 11, (1,))
    assert toy.special_ids == {toy.backend.id_to_token(index): index for index in range(SPECIALS)}
    assert toy.backend.id_to_token(3) == "[INST]" and toy.backend.id_to_token(13) == "[IMG_END]"
    assert toy.vocab_size == SPECIALS + 256 + len(MERGED) - 1


def test_its_list_of_special_tokens_is_used_where_it_has_one(tmp_path):
    data = tekken()
    names = ["<unk>", "<s>", "</s>", "[MINE]"]
    data["special_tokens"] = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    tokenizer = load(tmp_path, data)
    assert tokenizer.backend.id_to_token(3) == "[MINE]" and tokenizer.backend.id_to_token(11) == "<SPECIAL_11>"
    assert tokenizer.pad_id == tokenizer.eos_id == 2  # it has no <pad>


@given(st.text(max_size=30))
@example("<s> [INST] \x00 é ５ \U0001f600 \r\n")
def test_any_text_survives(toy, text):
    assert toy.decode(toy.encode(text)) == text
    assert not set(toy.encode(text)) & set(toy.special_ids.values())


def test_the_numeric_vocabulary_and_a_saved_copy_are_the_same(toy, tmp_path):
    vocab = numeric_vocab_from_tokenizer(toy.backend, vocab_size=toy.vocab_size)
    assert vocab.token_ids.tolist()[:10] == [SPECIALS + byte for byte in b"0123456789"]
    toy.save(tmp_path)
    again = Tokenizer.from_file(tmp_path)
    assert again.fingerprint == toy.fingerprint
    assert (again.eos_ids, again.pad_id, again.prefix_ids) == (toy.eos_ids, toy.pad_id, toy.prefix_ids)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data["config"].pop("pattern"),
        lambda data: data["config"].update(pattern="("),
        lambda data: data["config"].update(default_num_special_tokens="x"),
        lambda data: data["vocab"].pop(3),
        lambda data: data["vocab"][5].update(token_bytes="?"),
        lambda data: data["vocab"][5].update(rank=6),
        lambda data: data.update(special_tokens=[{"rank": 99, "token_str": "<s>"}]),
    ],
)
def test_damaged_files_are_refused_with_a_sentence(tmp_path, damage):
    data = tekken()
    damage(data)
    with pytest.raises(TokenizerError, match=r"tekken.json is not a tokenizer file: "):
        load(tmp_path, data)


# From mistral-common 1.13.1's own encoder (`Tekkenizer.encode(text, bos=False, eos=False)`).
KNOWN = {
    "Tom has 12 apples and buys 3.5 more.\n": [
        29177, 1934, 1032, 1049, 1050, 90767, 1321, 2513, 1890, 1032, 1051, 1046, 1053, 2081, 1626,
    ],
    "[INST]1,000[/INST]<s></s>": [
        1091, 3174, 3074, 1093, 1049, 1044, 1048, 1048, 1048,
        1091, 1047, 3174, 3074, 110501, 1115, 4468, 1115, 1062,
    ],
    "  aaaaaaaaaaaa\t\r\n\n x": [1032, 1261, 17498, 17498, 17498, 17498, 102728, 1009, 1013, 1267, 2460],
    "Ünïcödé 日本語 한국어 \U0001f600": [
        39453, 1110, 105678, 29487, 1337, 30367, 15199, 38243, 2897, 119685, 1152, 1128,
    ],
    "HelloWorld camelCase DON'T é ½ ３": [
        22177, 20249, 98537, 11139, 119801, 1039, 1084, 1324, 1204, 1129, 1032, 28504, 1032, 17979,
    ],
}


def real() -> Path:
    folder = os.environ.get("SMMD_TOKENIZER_DIR")
    path = Path(folder or ".") / "tekken_240911.json"
    if not folder or not path.is_file():
        pytest.skip("SMMD_TOKENIZER_DIR holds no tekken_240911.json: .ci/fetch_tokenizers fetches it")
    return path


@pytest.mark.realdata
def test_the_real_file_encodes_as_mistral_does():
    tokenizer = Tokenizer.from_file(real())
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id, tokenizer.prefix_ids) == (131_072, 2, 11, (1,))
    assert {text: tokenizer.encode(text) for text in KNOWN} == KNOWN
    assert all(tokenizer.decode(ids) == text for text, ids in KNOWN.items())
    for policy in ("digits", "integers", "all_integers"):
        vocab = numeric_vocab_from_tokenizer(tokenizer.backend, policy=policy, vocab_size=131_072)
        assert vocab.token_ids.tolist() == list(range(1048, 1058))
