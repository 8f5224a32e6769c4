"""The digit-level tokenizer keeps every text and every digit; files and special tokens are handled with a sentence."""

import json

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import example, given
from tokenizers import models

from smmd_jax.errors import TokenizerError
from smmd_jax.numeric_vocab import numeric_vocab_from_tokenizer
from train.tokenizer import Tokenizer, make_task_tokenizer

TOKENIZER = make_task_tokenizer()
_TEMPLATE_WORDS = [
    "What is ",
    "What is the value of ",
    "Evaluate ",
    "Calculate ",
    " + ",
    " - ",
    "-",
    "(",
    ")",
    "?\n",
    ".\n",
]
_TEXTS = st.lists(st.one_of(st.text(max_size=5), st.sampled_from(_TEMPLATE_WORDS), st.integers().map(str))).map("".join)


@given(_TEXTS)
@example("<eos> <pad> \x00 é ５ 五 \U0001f600 \r\n")
@example("")
def test_any_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(_TEXTS)
@example("What is 5 5")
def test_a_digit_is_always_a_token_of_its_own(text):
    tokens = [TOKENIZER.decode([token]) for token in TOKENIZER.encode(text)]
    digits = "0123456789"
    assert [token for token in tokens if any(digit in token for digit in digits)] == [c for c in text if c in digits]


def test_template_phrases_and_signs_are_single_tokens():
    question = "What is the value of -48 + (8 - (3 - -4))?\n"
    tokens = [TOKENIZER.decode([token]) for token in TOKENIZER.encode(question)]
    assert tokens == [
        "What is the value of ", "-", "4", "8", " + ", "(", "8", " - ", "(", "3", " - ", "-", "4", ")", ")", "?\n",
    ]  # fmt: skip
    for template in ("What is {}?\n", "Evaluate {}.\n", "Calculate {}.\n"):
        assert len(TOKENIZER.encode(template.format(7))) == 3


def test_ids_are_laid_out_so_that_mistakes_show():
    vocabulary = TOKENIZER.backend.get_vocab()
    assert sorted(vocabulary.values()) == list(range(TOKENIZER.vocab_size))
    assert TOKENIZER.vocab_size <= 384
    assert len({0, TOKENIZER.eos_id, TOKENIZER.pad_id}) == 3
    assert TOKENIZER.decode([0]).isdigit()
    ids = [TOKENIZER.encode(digit)[0] for digit in "0123456789"]
    assert all(token != value for value, token in enumerate(ids))
    assert ids != sorted(ids) and ids != sorted(ids, reverse=True)


def test_it_is_the_same_tokenizer_every_time():
    assert make_task_tokenizer().fingerprint == TOKENIZER.fingerprint
    assert make_task_tokenizer().backend.to_str() == TOKENIZER.backend.to_str()


@pytest.mark.parametrize("policy", ["digits", "integers", "all_integers", "float"])
def test_its_numeric_vocabulary_is_the_ten_digits(policy):
    vocab = numeric_vocab_from_tokenizer(TOKENIZER.backend, policy=policy)
    assert vocab.values.tolist() == list(range(10))
    assert [TOKENIZER.decode([token]) for token in vocab.token_ids.tolist()] == list("0123456789")


def test_special_tokens_in_a_text_are_text_also_after_loading(tmp_path):
    TOKENIZER.save(tmp_path)
    for tokenizer in (TOKENIZER, Tokenizer.from_file(tmp_path)):
        ids = tokenizer.encode("1<eos>2<pad>")
        assert not {tokenizer.eos_id, tokenizer.pad_id} & set(ids)
        assert tokenizer.decode(ids) == "1<eos>2<pad>"
        assert tokenizer.decode([*tokenizer.encode("12"), tokenizer.eos_id, tokenizer.pad_id]) == "12"


def test_saved_and_loaded_tokenizers_agree(tmp_path):
    path = TOKENIZER.save(tmp_path / "run")
    for place in (path, path.parent):
        loaded = Tokenizer.from_file(place)
        assert loaded.fingerprint == TOKENIZER.fingerprint
        assert (loaded.eos_id, loaded.pad_id, loaded.vocab_size) == (
            TOKENIZER.eos_id,
            TOKENIZER.pad_id,
            TOKENIZER.vocab_size,
        )
        assert loaded.encode("Calculate 12 - -3.\n") == TOKENIZER.encode("Calculate 12 - -3.\n")


@given(st.lists(_TEXTS, max_size=4))
def test_a_batch_is_its_texts_one_by_one(texts):
    assert TOKENIZER.encode_batch(texts) == [TOKENIZER.encode(text) for text in texts]


def toy_backend(**vocabulary: int) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="unk"))


def test_without_a_padding_token_the_end_of_sequence_pads():
    tokenizer = Tokenizer(toy_backend(unk=0, end=7), eos_token="end", pad_token=None)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (7, 7)
    assert tokenizer.vocab_size == 8  # ids have gaps: the largest counts


@pytest.mark.parametrize("entry", ["end", {"content": "end", "special": True}])
def test_special_tokens_come_from_the_tokenizer_config(tmp_path, entry):
    toy_backend(unk=0, end=1, fill=2).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry, "pad_token": "fill"}))
    tokenizer = Tokenizer.from_file(tmp_path)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (1, 2)
    assert Tokenizer.from_file(tmp_path, eos_token="fill").eos_id == 2


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path):
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_file(tmp_path).encode("123456") == TOKENIZER.encode("123456")


def test_faulty_files_are_refused_with_a_sentence(tmp_path):
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer file"):
        Tokenizer.from_file(tmp_path)
    toy_backend(unk=0).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="has no '<eos>'"):
        Tokenizer.from_file(tmp_path)
