"""Numbers out of tokenizers: toy ones of every kind, damaged files, the width of the head."""

import base64
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from smmd_jax.errors import TokenizerError, TokenRangeError
from smmd_jax.numeric_vocab import make_numeric_vocab, numeric_vocab_from_tokenizer
from smmd_jax.tokenizer_pieces import byte_level_alphabet, read_pieces

DIGITS = [str(digit) for digit in range(10)]


def word_level(words: list[str]) -> Tokenizer:
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))


def byte_level(merges: list[tuple[str, str]]) -> Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def unigram(pieces: list[str]) -> Tokenizer:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = [(piece, 0.0 if piece == "<unk>" else -1.0) for piece in ["<unk>", *bytes_, *pieces]]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def word_piece(pieces: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(["[UNK]", *pieces])}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def numbers(tokenizer, **options) -> dict[int, float]:
    vocab = numeric_vocab_from_tokenizer(tokenizer, **options)
    return dict(zip(vocab.token_ids.tolist(), vocab.values.tolist(), strict=True))


def left_out(tokenizer, **options) -> dict[str, int]:
    return {reason: count for reason, count, _ in numeric_vocab_from_tokenizer(tokenizer, **options).report.left_out}


def test_the_byte_alphabet_is_that_of_byte_level_bpe():
    alphabet = byte_level_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    tokenizer = byte_level([])
    for byte_text in ("\n", " ", "7", "~"):
        assert alphabet[tokenizer.encode(byte_text).tokens[0]] == ord(byte_text)


def test_byte_level_pieces_are_decoded_to_bytes():
    tokenizer = byte_level([("1", "2"), ("\u0120", "7"), ("0", "0"), ("\u00c2", "\u00b2"), ("\u010a", "5")])
    texts = {piece.token_id: piece.text for piece in read_pieces(tokenizer)}
    assert [texts[tokenizer.token_to_id(p)] for p in ("12", "\u01207", "\u00c2\u00b2", "\u010a5")] == [
        b"12",
        b" 7",
        "\u00b2".encode(),
        b"\n5",
    ]
    found = numbers(tokenizer)
    assert found == {tokenizer.token_to_id(text): float(text) for text in [*DIGITS, "12"]}
    assert {tokenizer.decode([token_id]) for token_id in found} == {*DIGITS, "12"}
    assert len(numbers(tokenizer, policy="all_integers")) == 12
    reasons = left_out(tokenizer)
    assert (reasons["blank around the number"], reasons["leading zero"], reasons["numeral outside ASCII"]) == (2, 1, 1)


def test_word_level():
    tokenizer = word_level(["[UNK]", *DIGITS, "12", "twelve", "-5", "0.5"])
    assert numbers(tokenizer) == {i: float(word) for i, word in enumerate(["", *DIGITS, "12"]) if word}
    assert sorted(numbers(tokenizer, policy="float").values()) == [-5, 0, 0.5, *range(1, 10), 12]


def test_sentencepiece_byte_fallback_and_leading_blanks_are_left_out():
    tokenizer = unigram([*DIGITS, "\u25815", "\u2581", "12"])
    found = numbers(tokenizer)
    assert found == {tokenizer.token_to_id(text): float(text) for text in [*DIGITS, "12"]}
    assert tokenizer.token_to_id("<0x35>") not in found
    assert left_out(tokenizer) == {
        "byte-fallback piece": 256,
        "blank around the number": 1,
        "special token": 1,
        "not a number": 1,
    }


def test_sentencepiece_like_bpe_with_replace_decoder():
    pieces = ["<unk>", "<0x35>", "\u2581", *DIGITS, "\u25817"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert list(numbers(tokenizer)) == list(range(3, 13))


def test_a_tokenizer_with_blank_led_numbers_only_says_so():
    tokenizer = unigram([f"\u2581{digit}" for digit in DIGITS])
    with pytest.raises(TokenizerError, match=r"10 blank around the number: ' 0', ' 1'"):
        numeric_vocab_from_tokenizer(tokenizer)


def test_wordpiece_continuations_are_left_out():
    tokenizer = word_piece([*DIGITS, "12", "##5", "##12", "##"])
    assert numbers(tokenizer) == {i + 1: float(text) for i, text in enumerate([*DIGITS, "12"])}
    assert left_out(tokenizer)["continuation piece, never the text of a whole word"] == 2


def test_end_of_word_suffix_is_a_blank():
    pieces = [*DIGITS, "5</w>", "</w>"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], end_of_word_suffix="</w>"))
    assert list(numbers(tokenizer)) == list(range(10))
    assert left_out(tokenizer)["blank around the number"] == 1


def test_special_added_and_unknown_tokens_are_never_numbers():
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["0", *DIGITS[1:], "x"])}, unk_token="0"))
    tokenizer.add_special_tokens(["3", AddedToken("42", special=True)])
    tokenizer.add_tokens(["7", "77"])
    assert numbers(tokenizer) == {i: float(i) for i in (1, 2, 4, 5, 6, 8, 9)}
    assert left_out(tokenizer) == {"special token": 3, "added token": 2, "not a number": 1}


def test_an_added_token_with_an_id_of_its_own_rules_out_the_piece_of_that_text(tmp_path):
    data = {
        "model": {"type": "WordLevel", "vocab": {"1": 0, "2": 1, "7": 2}, "unk_token": "?"},
        "added_tokens": [{"id": 9, "content": "7", "special": False}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert numbers(tmp_path) == {0: 1, 1: 2}
    assert left_out(tmp_path) == {"added token": 2}


def test_path_folder_object_and_fast_tokenizer_agree(tmp_path):
    tokenizer = byte_level([("1", "2")])
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    before = tokenizer.to_str()
    vocabs = [
        numeric_vocab_from_tokenizer(given)
        for given in (
            tmp_path,
            str(tmp_path),
            tmp_path / "tokenizer.json",
            tokenizer,
            SimpleNamespace(backend_tokenizer=tokenizer),
        )
    ]
    assert len({vocab.report for vocab in vocabs}) == 1
    assert len({tuple(vocab.token_ids.tolist()) for vocab in vocabs}) == 1
    assert tokenizer.to_str() == before


@pytest.mark.parity
def test_a_real_fast_tokenizer():
    transformers = pytest.importorskip("transformers")
    tokenizer = byte_level([("1", "2")])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    assert numbers(fast) == numbers(tokenizer)
    assert left_out(fast)["special token"] == 1


def write_tekken(path, texts: list[bytes], special: int, size: int, **extra) -> None:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(texts)]
    config = {"default_num_special_tokens": special, "default_vocab_size": size, "pattern": ""}
    path.write_text(json.dumps({"config": config, "vocab": vocab, **extra}))


def test_tekken_ids_start_after_the_special_tokens(tmp_path):
    texts = [b"0", b"\xff", b"1", b" 1", b"12", b"13"]
    names = [{"rank": 0, "token_str": "<unk>", "is_control": True}, {"rank": 1, "token_str": "7", "is_control": True}]
    write_tekken(tmp_path / "tekken.json", texts, special=5, size=10, special_tokens=names)
    assert numbers(tmp_path) == {5: 0, 7: 1, 9: 12}
    assert left_out(tmp_path) == {
        "special token": 5,
        "beyond the tokenizer's default vocabulary size": 1,
        "blank around the number": 1,
        "not a number": 1,
    }


def test_tokenizer_json_is_taken_before_tekken_json(tmp_path):
    write_tekken(tmp_path / "tekken.json", [b"1", b"2", b"3"], special=5, size=10)
    assert len(numbers(tmp_path)) == 3
    word_level(DIGITS).save(str(tmp_path / "tokenizer.json"))
    assert len(numbers(tmp_path)) == 10


def test_a_head_wider_than_the_tokenizer_is_fine_and_a_narrow_one_is_refused():
    words = ["[UNK]", *(f"w{i}" for i in range(1, 56)), "1", "2", "3", "x"]
    assert len(words) == 60 and words[58] == "3"
    tokenizer = word_level(words)
    vocab = numeric_vocab_from_tokenizer(tokenizer, vocab_size=64)
    assert vocab.token_ids.tolist() == [56, 57, 58] and vocab.min_vocab_size == 59
    assert jax.jit(lambda vocab, logits: logits[vocab.token_ids])(vocab, jnp.arange(64.0)).tolist() == [56, 57, 58]
    with pytest.raises(TokenRangeError, match="numeric token id 58 does not fit a head of width 56"):
        numeric_vocab_from_tokenizer(tokenizer, vocab_size=56)
    with pytest.raises(TokenRangeError, match="width 58"):
        numeric_vocab_from_tokenizer(tokenizer, vocab_size=58)
    just_wide_enough = numeric_vocab_from_tokenizer(tokenizer, vocab_size=59)
    assert just_wide_enough.report.notes == ("the head's width 59 is less than the tokenizer's 60 ids",)


@pytest.mark.parametrize(
    ("size", "error"), [(0, ValueError), (-1, ValueError), (64.0, TypeError), (True, TypeError), ("64", TypeError)]
)
def test_a_bad_head_width_is_refused(size, error):
    with pytest.raises(error, match="vocab_size"):
        numeric_vocab_from_tokenizer(word_level(["1", "2"]), vocab_size=size)


@pytest.mark.parametrize(
    ("words", "policy", "match"),
    [
        (["[UNK]", "one", "two"], "integers", "none of 3 tokens is a number"),
        (["[UNK]", "7", "x"], "integers", r"one number only \(7\) among 3 tokens"),
        (["[UNK]", "7", "07"], "all_integers", r"one number only \(7\)"),
        (["[UNK]", "<0x35>", "\u0663", "\uff13"], "float", "2 numeral outside ASCII"),
    ],
)
def test_a_tokenizer_without_two_numbers_is_refused(words, policy, match):
    with pytest.raises(TokenizerError, match=match):
        numeric_vocab_from_tokenizer(word_level(words), policy=policy)


def test_a_tokenizer_that_splits_digits_into_bytes_is_refused():
    with pytest.raises(TokenizerError, match="256 byte-fallback piece"):
        numeric_vocab_from_tokenizer(unigram(["a", "b"]))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not json", ["is not JSON", "tokenizer.json"]),
        (b"\x0a\xff\xfe\x00sentencepiece", ["is not JSON"]),
        (b"", ["is not JSON"]),
        (b"[" * 100_000, ["is not JSON"]),
        (b"[1, 2]", ["JSON list"]),
        (b'{"model_type": "qwen2", "vocab_size": 5}', ["['model_type', 'vocab_size']", "'model' with a 'vocab'"]),
        (b'{"model": {"vocab": {"1": 0, "2": 0}}}', ["id 0", "b'1'", "'2'"]),
        (b'{"model": {"vocab": {"1": -4}}}', ["'1'", "-4"]),
        (b'{"model": {"vocab": {"1": "0"}}}', ["'1'", "'0'"]),
        (b'{"model": {"vocab": {"1": 2147483648}}}', ["'1'", "2147483648"]),
        (b'{"model": {"vocab": 3}}', ["its vocab is a JSON int", "wanted {piece: id}"]),
        (b'{"model": {"vocab": [[]]}}', ["its vocab holds []", "wanted [piece, score]"]),
        (b'{"model": {"vocab": {"1": 0}}, "added_tokens": [{"content": "x"}]}', ["damaged", "'id'"]),
        (b'{"config": {}, "vocab": []}', ["damaged", "default_num_special_tokens"]),
        (
            b'{"config": {"default_num_special_tokens": 1, "default_vocab_size": 9}, '
            b'"vocab": [{"rank": 0, "token_bytes": "?"}]}',
            ["damaged"],
        ),
    ],
)
def test_damaged_files_are_named(tmp_path, content, words):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        numeric_vocab_from_tokenizer(path)
    assert [word for word in [str(path), *words] if word not in str(caught.value)] == []


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json nor tekken\.json"):
        numeric_vocab_from_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"no file or folder .*some-org/some-model.*hub"):
        numeric_vocab_from_tokenizer("some-org/some-model")


@pytest.mark.parametrize("tokenizer", [None, 5, {"1": 0}, ["1"], object(), b"path"])
def test_other_objects_are_refused(tokenizer):
    with pytest.raises(TypeError, match=f"{type(tokenizer).__name__}.*make_numeric_vocab"):
        numeric_vocab_from_tokenizer(tokenizer)


def test_a_tokenizer_with_parts_written_in_python_is_refused_with_the_way_out():
    tokenizer = word_level(["1", "2"])
    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(object())
    with pytest.raises(TokenizerError, match="make_numeric_vocab"):
        numeric_vocab_from_tokenizer(tokenizer)
    assert make_numeric_vocab(tokenizer.get_vocab()).values.tolist() == [1, 2]


def test_policy_and_max_value_reach_the_rule():
    tokenizer = word_level(["[UNK]", "7", "8", "012"])
    assert numbers(tokenizer, max_value=12, policy="all_integers") == {1: 7, 2: 8, 3: 12}
    with pytest.raises(ValueError, match="unknown policy 'numbers'"):
        numeric_vocab_from_tokenizer(tokenizer, policy="numbers")
    with pytest.raises(ValueError, match="max_value"):
        numeric_vocab_from_tokenizer(tokenizer, max_value=-1)
