"""Exact numeric vocabularies of real tokenizers, in the folder SMMD_TOKENIZER_DIR (see `.ci/fetch_tokenizers`)."""

import base64
import functools
import os
from pathlib import Path

import pytest

from smmd_jax.numeric_vocab import NumericVocab, make_numeric_vocab, numeric_vocab_from_tokenizer
from smmd_jax.tokenizer_pieces import byte_level_alphabet

pytestmark = pytest.mark.realdata


def real_file(name: str) -> Path:
    folder = os.environ.get("SMMD_TOKENIZER_DIR")
    if not folder:
        pytest.skip("SMMD_TOKENIZER_DIR is unset: fill a folder with .ci/fetch_tokenizers and name it there")
    found = sorted(Path(folder).glob(name))
    if not found:
        pytest.skip(f"SMMD_TOKENIZER_DIR holds no {name}: .ci/fetch_tokenizers fetches it")
    return found[0]


@functools.cache
def tiktoken_ranks(path: Path) -> dict[bytes, int]:
    lines = filter(None, path.read_bytes().split(b"\n"))
    return {base64.b64decode(text): int(rank) for text, rank in map(bytes.split, lines)}


@functools.cache
def gguf_tokens(path: Path) -> tuple[list[bytes], list[int]]:
    """Every token's bytes, and the ids of the special ones."""
    fields = pytest.importorskip("gguf").GGUFReader(path).fields
    alphabet = byte_level_alphabet()
    pieces, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    control = 3  # GGUF's token type of special tokens
    return (
        [bytes(alphabet[character] for character in str(bytes(pieces.parts[i]), "utf-8")) for i in pieces.data],
        [token_id for token_id, i in enumerate(kinds.data) if kinds.parts[i][0] == control],
    )


def smollm2(policy: str) -> NumericVocab:
    tokens, special = gguf_tokens(real_file("smollm2/*.gguf"))
    return make_numeric_vocab(tokens, policy=policy, exclude_ids=special)


SOURCES = {
    "qwen2.5": lambda policy: numeric_vocab_from_tokenizer(real_file("qwen2_5"), policy=policy, vocab_size=151_936),
    "qwen.tiktoken": lambda policy: make_numeric_vocab(tiktoken_ranks(real_file("qwen.tiktoken")), policy=policy),
    "llama3": lambda policy: numeric_vocab_from_tokenizer(real_file("llama3"), policy=policy, vocab_size=128_256),
    "tekken": lambda policy: numeric_vocab_from_tokenizer(
        real_file("tekken_240911.json"), policy=policy, vocab_size=131_072
    ),
    "smollm2": smollm2,
}


@pytest.mark.parametrize(
    ("source", "tokens_seen", "count", "all_count", "first_digit"),
    [
        ("qwen2.5", 151_665, 10, 10, 15),
        ("qwen.tiktoken", 151_643, 10, 10, 15),
        ("llama3", 128_256, 1000, 1110, 15),
        ("tekken", 151_000, 10, 10, 1048),  # 131,072 of them are used
        ("smollm2", 49_152, 10, 10, 32),
    ],
)
def test_counts_and_digit_ids(source, tokens_seen, count, all_count, first_digit):
    vocabs = {policy: SOURCES[source](policy) for policy in ("digits", "integers", "all_integers", "float")}
    assert {policy: vocab.report.count for policy, vocab in vocabs.items()} == {
        "digits": 10,
        "integers": count,
        "all_integers": all_count,
        "float": all_count,
    }
    for vocab in vocabs.values():
        assert vocab.report.tokens_seen == tokens_seen
        assert vocab.report.distinct_values == (10 if vocab.policy == "digits" else count)
        assert vocab.values.tolist() == sorted(vocab.values.tolist())
    assert vocabs["digits"].token_ids.tolist() == list(range(first_digit, first_digit + 10))
    assert vocabs["integers"].values.tolist() == list(range(count))
    assert vocabs["integers"].token_ids.tolist()[:10] == vocabs["digits"].token_ids.tolist()


def test_llama3_duplicates_are_the_padded_numbers():
    canonical, vocab = SOURCES["llama3"]("integers"), SOURCES["llama3"]("all_integers")
    assert (canonical.token_ids[10], canonical.token_ids[999]) == (605, 5500)
    expected = {float(i): {str(i), f"{i:02d}", f"{i:03d}"} for i in range(100)}
    assert {value: set(tokens) for value, tokens in vocab.report.duplicates} == expected


def test_poison_of_float_is_reported_and_left_out():
    left_out = {reason: count for reason, count, _ in SOURCES["qwen2.5"]("float").report.left_out}
    assert (left_out["nan or infinity"], left_out["special token"], left_out["added token"]) == (18, 14, 8)
    assert left_out["numeral outside ASCII"] >= 12


def test_file_and_loaded_tokenizer_agree():
    tokenizers = pytest.importorskip("tokenizers")
    path = real_file("qwen2_5/tokenizer.json")
    loaded = numeric_vocab_from_tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    assert loaded.report == numeric_vocab_from_tokenizer(path).report
    assert loaded.token_ids.tolist() == list(range(15, 25))
