"""The digit-level tokenizer keeps every text and every digit; files and special tokens are handled with a sentence."""

import json
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import example, given
from tokenizers import AddedToken, models, pre_tokenizers, processors

from smmd_jax.errors import TokenizerError
from smmd_jax.numeric_vocab import numeric_vocab_from_tokenizer
from train.tokenizer import Tokenizer, check_head_width, make_task_tokenizer

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
        Tokenizer.from_file(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"neither tokenizer.json nor tekken.json"):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer file"):
        Tokenizer.from_file(tmp_path)
    toy_backend(unk=0).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="has no '<eos>'"):
        Tokenizer.from_file(tmp_path)


def write(folder, name, content):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def chat_backend() -> tokenizers.Tokenizer:
    """Bytes, and three special tokens as of a chat model: 256 <s>, 257 <end>, 258 <turn>."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "<end>", "<turn>")])
    return backend


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n{{ m['content'] | trim }}<turn>\n{% endfor %}"


@pytest.mark.parametrize(
    ("generation", "config", "named", "eos_id", "eos_ids"),
    [
        ({"eos_token_id": [257, 258]}, {"eos_token_id": 256}, None, 257, (257, 258)),  # a list counts whole
        ({"eos_token_id": 258}, {"eos_token_id": 256}, None, 258, (258,)),
        ({}, {"eos_token_id": [256, 257]}, None, 256, (256, 257)),
        ({"eos_token_id": None}, {"eos_token_id": 256}, None, 256, (256,)),
        # Training appends the tokenizer's own token, here the second of the list, and all of them stop.
        ({"eos_token_id": [257, 258]}, {}, "<turn>", 258, (258, 257)),
        ({"eos_token_id": [257]}, {}, "<turn>", 258, (258, 257)),
        (None, None, "<turn>", 258, (258,)),
    ],
)
def test_every_end_of_sequence_counts_and_training_appends_the_tokenizers_own(
    tmp_path, generation, config, named, eos_id, eos_ids
):
    chat_backend().save(str(tmp_path / "tokenizer.json"))
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            write(tmp_path, name, content)
    if named:
        write(tmp_path, "tokenizer_config.json", {"eos_token": named})
    tokenizer = Tokenizer.from_file(tmp_path)
    assert (tokenizer.eos_id, tokenizer.eos_ids, tokenizer.pad_id) == (eos_id, eos_ids, eos_id)
    # And what is saved is read back the same.
    tokenizer.save(tmp_path / "again")
    again = Tokenizer.from_file(tmp_path / "again")
    assert (again.eos_id, again.eos_ids, again.fingerprint) == (eos_id, eos_ids, tokenizer.fingerprint)


@pytest.mark.parametrize("found", [999, -1, [257, 999], [], "257", True, [257.0]])
def test_an_end_of_sequence_that_is_no_token_is_refused(tmp_path, found):
    chat_backend().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "generation_config.json", {"eos_token_id": found})
    with pytest.raises(TokenizerError, match=r"eos_token_id of .*generation_config.json"):
        Tokenizer.from_file(tmp_path)


def test_a_config_that_is_not_json_is_refused(tmp_path):
    chat_backend().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "generation_config.json", "{")
    with pytest.raises(TokenizerError, match=r"generation_config.json cannot be used: it is not JSON"):
        Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("generation_config.json", "[" * 100_000, "generation_config.json cannot be used: it is nested too deeply"),
        ("tokenizer_config.json", '{"eos_token": "<s>", "eos_token": "<end>"}', "gives 'eos_token' twice"),
        ("tokenizer_config.json", '{"eos_token": 257}', "eos_token of .* is 257, wanted the text of a token"),
        ("tokenizer_config.json", '{"pad_token": ["<s>"]}', r"pad_token of .* is \['<s>'\], wanted the text"),
        ("tokenizer_config.json", '{"bos_token": {"content": 5}}', "bos_token of .* is {'content': 5}, wanted"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not a chat template"),
    ],
)
def test_a_file_beside_the_tokenizer_that_says_something_else_is_not_passed_over(tmp_path, name, content, words):
    chat_backend().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<end>"})
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.from_file(tmp_path)


def test_a_folder_in_the_place_of_a_config_is_refused(tmp_path):
    chat_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").mkdir()
    with pytest.raises(TokenizerError, match="it is not a regular file"):
        Tokenizer.from_file(tmp_path)


def test_what_the_file_puts_in_front_stands_in_front_of_prompts_only(tmp_path):
    backend = chat_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A <end>", special_tokens=[("<s>", 256), ("<end>", 257)]
    )
    tokenizer = Tokenizer(backend, eos_token="<end>", pad_token=None)
    assert tokenizer.prefix_ids == (256,)
    assert tokenizer.encode_prompt("7") == [256, *tokenizer.encode("7")] and len(tokenizer.encode("7")) == 1
    assert TOKENIZER.prefix_ids == () and TOKENIZER.encode_prompt("7") == TOKENIZER.encode("7")


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", "list"])
def test_the_chat_template_is_applied_only_where_it_is_asked_for(tmp_path, where):
    chat_backend().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<end>", "bos_token": {"content": "<s>"}}
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    if where == "chat_template.jinja":
        write(tmp_path, where, TEMPLATE)
    else:
        config["chat_template"] = named if where == "list" else TEMPLATE
    write(tmp_path, "tokenizer_config.json", config)
    plain, chat = Tokenizer.from_file(tmp_path), Tokenizer.from_file(tmp_path, chat=True)
    assert plain.encode_prompt(" 2<end>") == plain.encode(" 2<end>")
    # Special tokens of the template are tokens, the same text in the message is text; the template strips the blank.
    assert chat.encode_prompt(" 2<end>") == [256, 258, *chat.encode("user\n2<end>"), 258, *chat.encode("\n")]
    assert plain.fingerprint != chat.fingerprint
    chat.save(tmp_path / "again")
    assert Tokenizer.from_file(tmp_path / "again", chat=True).fingerprint == chat.fingerprint


def test_a_chat_without_a_template_or_with_a_faulty_one_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="has no chat template: choose an instruct model"):
        Tokenizer(chat_backend(), eos_token="<end>", pad_token=None, chat=True)
    for template, words in [
        ("{{ raise_exception('only for images') }}", "only for images"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].role }}", "leaves the user's message out"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ]:
        tokenizer = Tokenizer(chat_backend(), eos_token="<end>", pad_token=None, chat=True, chat_template=template)
        with pytest.raises(TokenizerError, match=words):
            tokenizer.encode_prompt("1 + 1")


@given(st.text(max_size=12), st.sampled_from(["", "<turn>", "<<turn>turn>", "<end><s>", "\ue000"]))
def test_only_the_template_writes_special_tokens(text, special):
    tokenizer = Tokenizer(
        chat_backend(), eos_token="<end>", pad_token=None, chat=True,
        chat_template="<s>{{ messages[0].content }}<turn>",
    )  # fmt: skip
    message = text[:5] + special + text[5:]
    assert tokenizer.encode_prompt(message) == [256, *tokenizer.encode(message), 258]


def test_a_head_narrower_than_the_tokenizer_is_refused_and_a_wider_one_is_not():
    tokenizer = Tokenizer(chat_backend(), eos_token="<s>", pad_token=None)  # ids 0..258
    assert check_head_width(tokenizer, 320) == check_head_width(tokenizer, 259) == ()
    # <end> and <turn> never come from a text here: the head need not know them.
    assert "2 special tokens, up to id 258" in check_head_width(tokenizer, 257)[0]
    with pytest.raises(TokenizerError, match=r"256 columns and the tokenizer's ids reach 256, so 1 of its tokens"):
        check_head_width(tokenizer, 256)
    with pytest.raises(TokenizerError, match=r"250 columns .* ids reach 256, so 7 of its tokens have none"):
        check_head_width(tokenizer, 250)


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "tokens", "columns", "eos_token"),
    [("qwen2_5", 151_665, 151_936, "<|endoftext|>"), ("llama3", 128_256, 128_256, "<|end_of_text|>")],
)
def test_real_tokenizers_fit_the_heads_of_their_models(name, tokens, columns, eos_token):
    folder = Path(os.environ.get("SMMD_TOKENIZER_DIR", "."), name)
    if not folder.is_dir():
        pytest.skip(f"SMMD_TOKENIZER_DIR holds no {name}: .ci/fetch_tokenizers fetches it")
    tokenizer = Tokenizer.from_file(folder, eos_token=eos_token)
    assert tokenizer.vocab_size == tokens
    assert check_head_width(tokenizer, columns) == ()
    assert numeric_vocab_from_tokenizer(tokenizer.backend, vocab_size=columns).report.count in (10, 1000)
    with pytest.raises(TokenizerError, match="15,000 columns"):
        check_head_width(tokenizer, 15_000)
    text = "Ünïcödé 12.5 日本 <|endoftext|> \r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
