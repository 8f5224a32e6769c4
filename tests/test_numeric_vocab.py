"""Which tokens are numbers: policies, values, errors, the report, the pytree."""

import copy
import json
import pickle
import subprocess
import sys
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smmd_jax.errors import TokenizerError, TokenRangeError
from smmd_jax.number_grammar import POLICIES, parse_number
from smmd_jax.numeric_vocab import NumericVocab, make_numeric_vocab, numeric_vocab_from_tokenizer

# Every kind of text that some policy accepts: its value and those policies.
ALL, UNSIGNED, ONLY_FLOAT = tuple(POLICIES), ("all_integers", "float"), ("float",)
ACCEPTED = {
    "3": (3, ALL),
    "0": (0, ALL),
    "12": (12, ("integers", *UNSIGNED)),
    "999": (999, ("integers", *UNSIGNED)),
    "007": (7, UNSIGNED),
    "00": (0, UNSIGNED),
    "1000": (1000, ONLY_FLOAT),
    ".5": (0.5, ONLY_FLOAT),
    "+5": (5, ONLY_FLOAT),
    "-5": (-5, ONLY_FLOAT),
    "-0": (0, ONLY_FLOAT),
    "-.25": (-0.25, ONLY_FLOAT),
    "3.14": (3.14, ONLY_FLOAT),
    "00.50": (0.5, ONLY_FLOAT),
}
NEVER = [
    *("", " 3", "3 ", "3\n", "\n3", "\t3", "3\x00", "1 2", "3\u00a0", "\ufeff3", "\u01203", "\u25813"),
    *("\uff13", "\u0663", "\u0967", "\U0001d7d1", "\u00b2", "\u00b3", "\u2460", "\u2167", "\u2083", "\u00bd", "\u4e09"),
    *("1\uff12", "\uff11\uff12", "\u22125", "\uff0b5", "3\uff0e5"),
    *(
        "1_000",
        "1_0.5",
        "0_0",
        "1e5",
        "1E5",
        "1e400",
        "5.",
        "-",
        "+",
        ".",
        "-.",
        "+-5",
        "--5",
        "1.2.3",
        "1,000",
        "5%",
        "0x10",
    ),
    *(
        "nan",
        "NaN",
        "inf",
        "-inf",
        "Infinity",
        "infinity",
        "x",
        "v2",
        "##5",
        "<0x35>",
        "five",
        "1/2",
        "12:45",
        "\ud800",
    ),
]


def accepts(text: str | bytes, policy: str, **options) -> bool:
    try:
        make_numeric_vocab([text], policy=policy, **options)
    except TokenizerError:
        return False
    return True


@pytest.mark.parametrize("policy", POLICIES)
def test_exactly_the_ascii_numbers_of_the_policy_are_accepted(policy):
    vocab = make_numeric_vocab([*ACCEPTED, *NEVER], policy=policy)
    values = {i: value for i, (value, policies) in enumerate(ACCEPTED.values()) if policy in policies}
    assert dict(zip(vocab.token_ids.tolist(), vocab.values.tolist(), strict=True)) == {
        i: float(np.float32(value)) for i, value in values.items()
    }
    assert vocab.policy == policy
    assert vocab.token_ids.dtype == jnp.int32 and vocab.values.dtype == jnp.float32


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("text", NEVER, ids=ascii)
def test_never_a_number(text, policy):
    assert not accepts(text, policy)


@pytest.mark.parametrize("text", [b"\xb2", b"\xff", b"5\xff", b"\xef\xbc", "\uff13".encode("utf-16-le")])
def test_bytes_that_are_not_text_are_not_numbers(text):
    assert not accepts(text, "float")


def test_bytes_and_text_are_read_alike():
    texts = [*ACCEPTED, *NEVER]
    from_text = make_numeric_vocab(texts, policy="float")
    from_bytes = make_numeric_vocab([text.encode("utf-8", "surrogatepass") for text in texts], policy="float")
    assert from_text.token_ids.tolist() == from_bytes.token_ids.tolist()
    assert from_text.report == from_bytes.report


def test_order_is_by_value_and_then_by_id():
    vocab = make_numeric_vocab({"9": 4, "05": 9, "5": 7, "005": 1, "10": 0, "x": 12}, policy="all_integers")
    assert vocab.token_ids.tolist() == [1, 7, 9, 4, 0]
    assert vocab.values.tolist() == [5, 5, 5, 9, 10]
    assert vocab.min_vocab_size == 10


def test_integers_to_999_are_all_distinct_and_exact():
    vocab = make_numeric_vocab([str(i) for i in range(1001)])
    np.testing.assert_array_equal(vocab.values, np.arange(1000))
    assert vocab.report.distinct_values == 1000
    assert vocab.report.left_out == (("above max_value", 1, ("1000",)),)


def test_max_value_bounds_both_integer_policies():
    tokens = ["7", "12", "012", "13"]
    assert make_numeric_vocab(tokens, max_value=12).values.tolist() == [7, 12]
    assert make_numeric_vocab(tokens, max_value=12, policy="all_integers").values.tolist() == [7, 12, 12]
    assert make_numeric_vocab(["0", "1"], max_value=np.int64(0)).values.tolist() == [0]


@pytest.mark.parametrize("policy", ["digits", "float"])
def test_max_value_without_effect_is_noted(policy):
    assert "max_value=5 has no effect" in str(make_numeric_vocab(["7", "8"], policy=policy, max_value=5))
    assert make_numeric_vocab(["7", "8"], policy=policy).report.notes == ()


def test_a_missing_digit_is_simply_missing():
    assert make_numeric_vocab({"1": 1, "3": 0, "10": 2}, policy="digits").values.tolist() == [1, 3]


def test_what_float32_cannot_hold_is_left_out_or_noted():
    largest = 2**128 - 2**104
    tokens = ["1", "9" * 38, str(largest), str(largest + 2**103), "9" * 39, "9" * 400, "-" + "9" * 400]
    big = make_numeric_vocab(tokens, policy="float")
    assert big.token_ids.tolist() == [0, 1, 2]
    assert big.report.left_out[0][:2] == ("not finite in float32", 4)
    assert np.isfinite(big.values).all()
    assert make_numeric_vocab(["1", "9" * 50], max_value=10**60).report.left_out[0][:2] == ("not finite in float32", 1)
    rounded = make_numeric_vocab(["16777216", "16777217"], max_value=10**9)
    assert "rounded to float32" in str(rounded) and rounded.report.distinct_values == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "text",
    [
        b"9" * 10**6,
        b"9" * 10**6 + b"x",
        b"1." + b"9" * 10**6 + b"x",
        b"1_" * 10**6,
        b" " * 10**6 + b"x",
        b"1_1" * 10**6,
    ],
    ids=["digits", "digits-x", "fraction-x", "underscores", "blanks", "groups"],
)
def test_a_token_of_a_million_characters_takes_linear_time(text, policy):
    # Quadratic matching would take hours; int() alone refuses beyond 4300 digits.
    assert isinstance(parse_number(text, POLICIES[policy], 999), str)
    report = make_numeric_vocab([text, "1"], policy=policy).report
    assert all(len(token) < 40 for _, _, tokens in report.left_out for token in tokens)


def test_leading_zeros_of_any_length_keep_the_value():
    vocab = make_numeric_vocab([b"0" * 10**6 + b"7", b"-" + b"0" * 10**6], policy="float")
    assert vocab.values.tolist() == [0, 7]
    assert not np.signbit(vocab.values).any()


decimals = st.from_regex(r"\A[+-]?([0-9]{1,12}(\.[0-9]{1,12})?|\.[0-9]{1,12})\Z", fullmatch=False)
texts = st.one_of(decimals, st.from_regex(r"\A[0-9]{1,4}\Z"), st.text(max_size=4), st.sampled_from([*ACCEPTED, *NEVER]))


@given(texts=st.lists(texts, max_size=12), policy=st.sampled_from(list(POLICIES)))
def test_accepted_values_equal_decimal_and_counts_add_up(texts, policy):
    try:
        vocab = make_numeric_vocab(texts, policy=policy)
    except TokenizerError:
        return
    for token_id, value in zip(vocab.token_ids.tolist(), vocab.values.tolist(), strict=True):
        assert texts[token_id].isascii()
        assert value == np.float32(Decimal(texts[token_id]))
    report = vocab.report
    assert report.count + sum(count for _, count, _ in report.left_out) == report.tokens_seen == len(texts)


@given(texts=st.lists(texts, unique=True, max_size=12), policy=st.sampled_from(list(POLICIES)), data=st.data())
def test_permuting_tokens_and_ids_changes_nothing_but_the_ids(texts, policy, data):
    ids = data.draw(st.lists(st.integers(0, 1000), min_size=len(texts), max_size=len(texts), unique=True))
    order = data.draw(st.permutations(range(len(texts))))
    tokens = {texts[i]: ids[i] for i in range(len(texts))}
    shuffled = {texts[i]: ids[i] for i in order}
    try:
        vocab = make_numeric_vocab(tokens, policy=policy)
    except TokenizerError:
        with pytest.raises(TokenizerError):
            make_numeric_vocab(shuffled, policy=policy)
        return
    again = make_numeric_vocab(shuffled, policy=policy)
    assert again.token_ids.tolist() == vocab.token_ids.tolist() and again.report == vocab.report
    renamed = make_numeric_vocab(texts, policy=policy)
    text_of = {token_id: text for text, token_id in tokens.items()}
    assert renamed.values.tolist() == vocab.values.tolist()
    assert {texts[i] for i in renamed.token_ids.tolist()} == {text_of[i] for i in vocab.token_ids.tolist()}


@given(st.lists(decimals, min_size=1, max_size=12))
def test_every_value_of_several_tokens_is_reported(texts):
    vocab = make_numeric_vocab(texts, policy="float")
    values = vocab.values.tolist()
    expected = {value: values.count(value) for value in values if values.count(value) > 1}
    assert {value: len(tokens) for value, tokens in vocab.report.duplicates} == expected
    assert any("singular" in note for note in vocab.report.notes) == bool(expected)


def test_exclude_ids_wins_over_the_text():
    vocab = make_numeric_vocab({"1": 1, "2": 2, "x": 3}, exclude_ids=np.array([2, 3, 77]))
    assert vocab.token_ids.tolist() == [1]
    assert vocab.report.left_out == (("in exclude_ids", 2, ("2", "x")),)
    assert "1 of exclude_ids belong to no token" in vocab.report.notes


def test_one_number_is_a_vocabulary_with_a_note():
    vocab = make_numeric_vocab({"7": 3, "x": 0})
    assert vocab.token_ids.tolist() == [3] and vocab.min_vocab_size == 4
    assert any("always 0" in note for note in vocab.report.notes)


@pytest.mark.parametrize(
    ("tokens", "options", "error", "words"),
    [
        (["a", "b"], {}, TokenizerError, ["2 tokens", "'integers'", "'a', 'b'", "another"]),
        ([" 0", " 1"], {}, TokenizerError, ["2 blank around the number", "' 0', ' 1'"]),
        ({}, {}, TokenizerError, ["0 tokens"]),
        (["1"], {"policy": "decimals"}, ValueError, ["'decimals'", *POLICIES]),
        (["1"], {"policy": None}, ValueError, ["None", *POLICIES]),
        (["1"], {"max_value": -1}, ValueError, ["max_value", "-1"]),
        (["1"], {"max_value": 9.0}, TypeError, ["max_value", "9.0", "float"]),
        (["1"], {"max_value": True}, TypeError, ["max_value", "bool"]),
        (["1"], {"exclude_ids": "1"}, TypeError, ["exclude_ids", "'1'"]),
        (["1"], {"exclude_ids": 1}, TypeError, ["exclude_ids", "1"]),
        (["1"], {"exclude_ids": [1.5]}, TypeError, ["exclude_ids", "1.5"]),
        (["1"], {"exclude_ids": [-1]}, ValueError, ["exclude_ids", "-1"]),
        ({"1": 1, "2": 1}, {}, ValueError, ["id 1", "'1'", "'2'"]),
        ({"x": 1, "y": 1, "3": 0}, {}, ValueError, ["id 1", "'x'", "'y'"]),
        ({"1": -3}, {}, TokenRangeError, ["'1'", "-3"]),
        ({"1": 2**31}, {}, TokenRangeError, ["'1'", str(2**31)]),
        ({"1": True}, {}, TypeError, ["'1'", "True", "bool"]),
        ({"1": 1.0}, {}, TypeError, ["'1'", "1.0", "float"]),
        ({"1": "0"}, {}, TypeError, ["'1'", "'0'", "str"]),
        ({1: 0}, {}, TypeError, ["token 1", "int"]),
        ([1, 2], {}, TypeError, ["token 1", "int"]),
        ("0123456789", {}, TypeError, ["str"]),
        (b"0123", {}, TypeError, ["bytes"]),
        (7, {}, TypeError, ["int", "sequence"]),
    ],
)
def test_bad_input_is_one_sentence_that_names_it(tokens, options, error, words):
    with pytest.raises(error) as caught:
        make_numeric_vocab(tokens, **options)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array, jnp.int32, jnp.array], ids=lambda kind: kind.__name__)
def test_integers_of_any_kind_are_integers(kind):
    tokens = {"1": kind(4), "2": kind(2), "30": kind(5)}
    found = make_numeric_vocab(tokens, max_value=kind(9), exclude_ids=[kind(2)])
    assert found.token_ids.tolist() == [4] and found.report == make_numeric_vocab(
        {"1": 4, "2": 2, "30": 5}, max_value=9, exclude_ids=[2]
    ).report


@pytest.mark.parametrize("ids", [np.array([4, 2]), jnp.array([4, 2]), (4, 2), {4, 2}], ids=repr)
def test_excluded_ids_may_be_any_collection(ids):
    assert make_numeric_vocab({"1": 4, "2": 2, "3": 5}, exclude_ids=ids).token_ids.tolist() == [5]


@pytest.mark.parametrize("ids", [np.array(4), jnp.array(4), np.array([True]), np.array([4.0])], ids=repr)
def test_excluded_ids_that_are_none_are_a_type_error(ids):
    with pytest.raises(TypeError, match="exclude_ids"):
        make_numeric_vocab({"1": 4}, exclude_ids=ids)


def test_a_path_that_no_file_system_takes_is_no_tokenizer():
    with pytest.raises(TokenizerError, match="cannot read a tokenizer at 'aaaa") as caught:
        numeric_vocab_from_tokenizer("a" * 9000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("vocab", ["0123456789", 7, None, ["0", "1"], [[]], [[3, 0.0]], [{"0": 1}]], ids=repr)
def test_a_token_table_of_another_kind_is_refused(vocab, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json.*vocab.*wanted"):
        numeric_vocab_from_tokenizer(tmp_path)


def test_the_report_can_be_read():
    vocab = make_numeric_vocab(
        [
            "3",
            " 3",
            "007",
            "7",
            "00",
            "\uff13",
            "\u0663",
            "1_000",
            "nan",
            "1e5",
            "-5",
            "1000",
            None,
            "ab",
            "\u00bd",
            "\u00a0",
        ]
    )
    assert str(vocab) == repr(vocab)
    assert str(vocab).split("\n") == [
        "NumericVocab: 2 numeric of 16 tokens (policy 'integers', max_value 999)",
        "  values: 3 to 7, 2 distinct",
        "  duplicates: none",
        "  left out: 1 above max_value: '1000'",
        "  left out: 1 blank around the number: ' 3'",
        "  left out: 2 leading zero: '007', '00'",
        "  left out: 1 nan or infinity: 'nan'",
        "  left out: 1 no text: ''",
        "  left out: 3 numeral outside ASCII: '\uff13', '\u0663', '\u00bd'",
        "  left out: 1 sign or fraction: '-5'",
        "  left out: 2 underscore, exponent or open decimal point: '1_000', '1e5'",
        "  left out: 2 not a number: 'ab', '\\xa0'",
    ]


def test_the_report_lists_duplicates_and_cuts_long_lists():
    printed = str(make_numeric_vocab([*map(str, range(10)), *(f"0{i}" for i in range(7))], policy="all_integers"))
    assert "duplicates: 0 ('0', '00'), 1 ('1', '01'), 2 ('2', '02'), 3 ('3', '03'), 4 ('4', '04') and 2 more" in printed
    assert "note: tokens of equal value" in printed
    assert "7 leading zero: '00', '01', '02', '03', '04', and 2 more" in str(
        make_numeric_vocab([*map(str, range(10)), *(f"0{i}" for i in range(7))])
    )


def test_only_the_arrays_are_leaves_and_the_rest_is_static():
    vocab = make_numeric_vocab({"1": 4, "2": 2})
    leaves, treedef = jax.tree.flatten(vocab)
    assert [leaf.tolist() for leaf in leaves] == [[4, 2], [1, 2]]
    again = jax.tree.unflatten(treedef, leaves)
    assert isinstance(again, NumericVocab)
    assert (again.policy, again.min_vocab_size, again.report) == (vocab.policy, 5, vocab.report)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, vocab)
    assert doubled.values.tolist() == [2, 4] and doubled.report is vocab.report
    assert jax.tree.map(lambda leaf: leaf.shape, vocab).values == (2,)
    assert vocab.vocab is vocab
    assert hash(vocab.report) == hash(copy.deepcopy(vocab.report))
    assert pickle.loads(pickle.dumps(vocab)).token_ids.tolist() == [4, 2]


def test_fields_cannot_be_assigned():
    with pytest.raises(AttributeError):
        make_numeric_vocab(["1"]).min_vocab_size = 3


def test_jit_takes_it_as_an_argument_and_compiles_once_for_equal_vocabularies():
    traces = []

    @jax.jit
    def largest(vocab, logits):
        traces.append(vocab.min_vocab_size)
        return logits[vocab.token_ids].max() + vocab.values.sum()

    for _ in range(2):
        assert largest(make_numeric_vocab({"1": 4, "2": 2}), jnp.arange(6.0)) == 7
    assert traces == [5]
    assert str(jax.eval_shape(lambda vocab: vocab, make_numeric_vocab({"1": 4, "2": 2}))).startswith("NumericVocab: 2")


def test_importing_it_loads_no_tokenizer_or_model_library():
    heavy = ["tokenizers", "flax", "optax", "torch", "transformers", "tensorflow", "orbax"]
    code = f"import sys, smmd_jax.numeric_vocab; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
