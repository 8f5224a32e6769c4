"""A config.json that somebody else wrote, or that was damaged: refused by field, before anything is built."""

import json
import os

import pytest

from smmd_jax.backbones import DecoderConfig, RopeConfig
from smmd_jax.backbones.hf_config import FAMILIES, decoder_config, read_config
from smmd_jax.backbones.hf_types import check_types
from smmd_jax.errors import CheckpointError
from smmd_jax.json_files import read_object

FIELDS = dict(
    model_type="llama", vocab_size=32, hidden_size=16, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4,
    tie_word_embeddings=True,
)  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("value", ["16", True, 1.5, float("nan"), -1, 0, [], {}, 2**31], ids=repr)
@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
             "max_position_embeddings"],
)  # fmt: skip
def test_a_size_is_a_whole_number(name, value):
    with pytest.raises(CheckpointError, match=rf"{name} is .*, wanted a whole number from 1 to"):
        decoder_config({**FIELDS, name: value})


@pytest.mark.parametrize("value", ["1e-5", True, None, float("nan"), float("inf"), -1e-5, 0, []], ids=repr)
def test_an_epsilon_is_a_number_above_zero(value):
    with pytest.raises(CheckpointError, match=r"rms_norm_eps is .*, wanted a finite number above 0"):
        decoder_config({**FIELDS, "rms_norm_eps": value})


@pytest.mark.parametrize("value", ["false", "yes", 0, 1, []], ids=repr)
@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"])
def test_a_switch_is_true_or_false(name, value):
    with pytest.raises(CheckpointError, match=rf"{name} is .*, wanted true or false"):
        decoder_config({**FIELDS, name: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(rope_scaling="x"), "rope_scaling is 'x', wanted an object"),
        (dict(rope_parameters=[]), r"rope_parameters is \[\], wanted an object"),
        (dict(rope_parameters={"full_attention": 5}), "rope_parameters.full_attention is 5, wanted an object"),
        (dict(rope_parameters={"full_attention": {"rope_theta": "x"}}), "full_attention.rope_theta is 'x'"),
        (dict(rope_parameters=YARN | {"factor": "4"}), "rope_parameters.factor is '4', wanted a finite number"),
        (dict(rope_parameters=YARN | {"factor": float("nan")}), "factor is nan"),
        (dict(rope_parameters=YARN | {"factor": 0.5}), "rope factor is 0.5, wanted a finite number of at least 1"),
        (dict(rope_parameters={"rope_type": "linear"}), "rope_type is 'linear' and factor is missing"),
        (dict(rope_parameters=YARN | {"beta_fast": 1, "beta_slow": 32}), "beta_slow is 32 and beta_fast 1"),
        (dict(rope_parameters=YARN | {"mscale": "x"}), "mscale is 'x'"),
        (dict(rope_parameters=YARN | {"truncate": "no"}), "truncate is 'no', wanted true or false"),
        (dict(rope_parameters=LLAMA3 | {"high_freq_factor": 1.0}), "wanted the first above 0 and below the second"),
        (dict(rope_parameters=LLAMA3 | {"original_max_position_embeddings": "8"}), "whole number"),
        (dict(rope_theta=0.5), "rope theta is 0.5, wanted a finite number above 1"),
        (dict(rope_theta="1e4"), "rope_theta is '1e4', wanted a finite number above 0"),
        (dict(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000, wanted a whole number from 1 to 1,000"),
        (dict(model_type="mistral", sliding_window=2.5), "sliding_window is 2.5"),
        (dict(model_type="smollm3", no_rope_layers=[1]), "no_rope_layers has 1 entries for 2 layers"),
        (dict(model_type="smollm3", no_rope_layer_interval=0), "no_rope_layer_interval is 0"),
        (dict(model_type="qwen2", layer_types=["full_attention"]), "layer_types has 1 entries for 2 layers"),
        (dict(model_type="gemma3_text", query_pre_attn_scalar=0), "query_pre_attn_scalar is 0"),
        (dict(vocab_size="32", rms_norm_eps=None), "vocab_size is '32', .*; rms_norm_eps is None"),
        (dict(hidden_act=["silu"]), "hidden_act is .*, wanted a text"),
        (dict(model_type=["llama"]), r"model_type is \['llama'\]"),
        (dict(vocab_size="9" * 500), "vocab_size is '9{59}..., wanted"),
    ],
)
def test_every_other_odd_value_is_named(changes, words):
    with pytest.raises(CheckpointError, match=words):
        decoder_config({**FIELDS, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_null_where_files_have_it_is_let_pass(family):
    check_types({**FIELDS, "model_type": family, "head_dim": None, "sliding_window": None, "rope_scaling": None,
                 "layer_types": None, "attention_bias": None, "rope_theta": None, "num_key_value_heads": None})
    check_types({"text_config": 5, "a field of another model": [{}]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("[1]", "it holds a list, wanted an object"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"a": 1, "b": {"hidden_size": 24, "hidden_size": 16}}', "it gives 'hidden_size' twice in one object"),
        ('\ufeff{"a": 1}', "BOM"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
    ],
)
def test_a_file_that_is_not_one_object_is_refused(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        read_object(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=rf"config\.json is not the config of a model: .*{words}"):
        read_config(tmp_path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        read_config(tmp_path)


def test_a_model_type_that_is_no_text_is_refused_for_every_reader(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": ["llama"]}))
    with pytest.raises(CheckpointError, match=r"has model_type .*, wanted a text"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(vocab_size="32"), "vocab_size is '32', wanted a whole number"),
        (dict(window=2.5), "window is 2.5, wanted a whole number"),
        (dict(num_layers=True), "num_layers is True, wanted a whole number"),
        (dict(norm_eps=None), None),
        (dict(norm_eps=float("nan")), "norm_eps is nan, wanted a finite number above 0"),
        (dict(attention_scale=-1.0), "attention_scale is -1.0, wanted a finite number above 0"),
    ],
)
def test_a_config_made_in_code_is_checked_too(changes, words):
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=48, num_layers=2, num_heads=4)
    with pytest.raises((ValueError, TypeError), match=words):
        DecoderConfig(**{**sizes, **changes})


@pytest.mark.parametrize(
    "fields", [dict(theta=float("nan")), dict(factor=float("inf")), dict(original_max_positions=0)]
)
def test_a_rope_without_frequencies_is_refused(fields):
    with pytest.raises(ValueError, match=r"rope .* is .*, wanted"):
        RopeConfig(**fields)
