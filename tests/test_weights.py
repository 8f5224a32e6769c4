"""Checkpoint folders without transformers: what is read, written, copied and refused."""

import dataclasses
import json
import shutil
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from smmd_jax.backbones import load_pretrained, save_pretrained
from smmd_jax.backbones.hf_config import FAMILIES as HF_FAMILIES
from smmd_jax.backbones.hf_config import MLLAMA_TEXT, QWEN_VL_TEXT, decoder_config
from smmd_jax.backbones.hf_fields import hf_fields
from smmd_jax.backbones.safetensors_files import INDEX_NAME, SINGLE_NAME, open_folder, plan_files
from smmd_jax.backbones.stack import stack_layers, unstack_layers
from smmd_jax.backbones.tensor_names import PREFIXES, find_prefix, source_of
from smmd_jax.backbones.weights import load_parameters, save_parameters
from smmd_jax.errors import CheckpointError
from tests.decoders import EACH_FAMILY, FAMILIES, make_decoder


def parameters_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def save_source(folder, family="qwen2", *, dtype="float32", shards=1):
    """A folder as a hub has it: shards with an index, a tokenizer, a template; in `dtype`."""
    model = make_decoder(family)
    parameters = jax.tree.map(lambda leaf: leaf.astype(dtype), parameters_of(model))
    save_parameters(parameters, model.config, folder)
    if shards > 1:
        tensors = load_file(folder / SINGLE_NAME)
        names = sorted(tensors)
        files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: tensors[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size, "total_parameters": 7}, "weight_map": files}
        (folder / INDEX_NAME).write_text(json.dumps(index))
        (folder / SINGLE_NAME).unlink()
    (folder / "tokenizer.json").write_text("{ }")
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1,  2]}')
    return folder


def edit(folder, change):
    tensors = load_file(folder / SINGLE_NAME)
    change(tensors)
    save_file(tensors, folder / SINGLE_NAME)


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_what_is_saved_loads_as_the_same_model(family, tmp_path):
    model = make_decoder(family)
    save_pretrained(model, tmp_path / "saved")
    assert (tmp_path / "saved" / SINGLE_NAME).stat().st_mode & 0o777 == 0o644
    loaded = load_pretrained(tmp_path / "saved")
    chex.assert_trees_all_equal(parameters_of(loaded), parameters_of(model))
    ids = jnp.arange(1, 13).reshape(2, 6)
    np.testing.assert_array_equal(loaded(ids), model(ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_copy_keeps_names_dtypes_shards_and_companions_of_its_source(dtype, shards, tmp_path):
    source = save_source(tmp_path / "source", dtype=dtype, shards=shards)
    save_pretrained(load_pretrained(source, param_dtype="float32"), tmp_path / "copy", source=source)
    old, new = open_folder(source), open_folder(tmp_path / "copy")
    assert new.tensors == old.tensors
    for name in old.tensors:
        everything = (slice(None),) * len(old.tensors[name].shape)
        np.testing.assert_array_equal(new.read(name, everything), old.read(name, everything))
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (source / name).read_bytes()
    if shards > 1:
        was, now = (json.loads((folder / INDEX_NAME).read_text()) for folder in (source, tmp_path / "copy"))
        assert now == was
    else:
        assert not (tmp_path / "copy" / INDEX_NAME).exists()


@pytest.mark.slow
def test_dtypes_are_those_of_the_file_or_those_asked_for(tmp_path):
    source = save_source(tmp_path / "source", dtype="bfloat16")
    kinds = lambda model: {leaf.dtype for leaf in jax.tree.leaves(parameters_of(model))}
    model = load_pretrained(source)
    assert kinds(model) == {jnp.dtype("bfloat16")} and model.hidden(jnp.ones((1, 3), int)).dtype == jnp.float32
    assert kinds(load_pretrained(source, param_dtype=jnp.float32)) == {jnp.dtype("float32")}
    assert load_pretrained(source, dtype=jnp.bfloat16).hidden(jnp.ones((1, 3), int)).dtype == jnp.bfloat16


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_every_prefix_loads_and_is_kept(family, prefix, tmp_path):
    source = save_source(tmp_path / "source", family)
    names = {"lm_head.weight": PREFIXES[prefix]}

    def rename(tensors):
        for name in list(tensors):
            tensors[names.get(name, prefix + name.removeprefix("model."))] = tensors.pop(name)

    edit(source, rename)
    model = load_pretrained(source)
    chex.assert_trees_all_equal(parameters_of(model), parameters_of(make_decoder(family)))
    save_pretrained(model, tmp_path / "copy", source=source)
    assert find_prefix(open_folder(tmp_path / "copy").tensors) == prefix


def test_all_faults_come_in_one_error(tmp_path):
    source = save_source(tmp_path / "source")

    def break_it(tensors):
        del tensors["model.layers.0.self_attn.q_proj.bias"], tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((24, 40), np.float32)

    edit(source, break_it)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(source)
    message = str(caught.value)
    assert "2 missing: model.layers.0.self_attn.q_proj.bias, model.norm.weight" in message
    assert "1 extra: model.layers.9.mlp.up_proj.weight" in message
    assert "1 misshapen: model.layers.1.mlp.up_proj.weight is [24, 40], wanted [40, 24]" in message


def test_a_tied_head_in_the_file_is_left_aside_and_written_back(tmp_path):
    source = save_source(tmp_path / "source")
    edit(source, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    model = load_pretrained(source)
    np.testing.assert_array_equal(model.head.T, make_decoder("qwen2").embed_tokens.embedding[...])
    save_pretrained(model, tmp_path / "copy", source=source)
    saved = load_file(tmp_path / "copy" / SINGLE_NAME)
    np.testing.assert_array_equal(saved["lm_head.weight"], saved["model.embed_tokens.weight"])


def test_an_untied_head_that_is_missing_is_never_tied(tmp_path):
    source = save_source(tmp_path / "source", "mistral")
    edit(source, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head.weight"):
        load_pretrained(source)


def test_buffers_of_older_files_are_left_aside(tmp_path):
    source = save_source(tmp_path / "source")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(source, lambda tensors: tensors.update({name: np.zeros(3, np.float32)}))
    load_pretrained(source)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "pickle.bin", "..\\x.safetensors", 7]
)
def test_an_index_names_plain_files_of_its_folder(name, tmp_path):
    source = save_source(tmp_path / "source", shards=2)
    index = json.loads((source / INDEX_NAME).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    (source / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"plain name|must name a file"):
        load_pretrained(source)


def test_index_and_shards_agree(tmp_path):
    source = save_source(tmp_path / "source", shards=2)
    index = json.loads((source / INDEX_NAME).read_text())
    del index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    (source / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"(?s)model.ghost.weight should be .* nowhere.*model.norm.weight is in"):
        load_pretrained(source)
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"download is not complete"):
        load_pretrained(source)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda folder: shutil.rmtree(folder), "does not exist: wanted the folder of a Hugging Face checkpoint"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds a list, wanted an object"),
        (lambda folder: (folder / SINGLE_NAME).write_bytes(b"nonsense"), "not a readable safetensors file"),
        (lambda folder: (folder / SINGLE_NAME).rename(folder / "pytorch_model.bin"), "are never read: convert"),
        (lambda folder: (folder / SINGLE_NAME).unlink(), "has neither model.safetensors nor"),
        (lambda folder: edit_config(folder, model_type="gpt2"), "model_type is 'gpt2', wanted one of qwen2"),
        (lambda folder: edit_config(folder, hidden_size=None), "lacks hidden_size"),
        (lambda folder: edit_config(folder, hidden_size="24"), "hidden_size is '24', wanted a whole"),
        (lambda folder: edit_config(folder, num_attention_heads=5), "does not describe a decoder"),
        (lambda folder: edit_config(folder, hidden_act="relu"), "hidden_act is 'relu', wanted one of silu"),
        (lambda folder: edit_config(folder, rope_parameters={"rope_type": "longrope"}), "rope_type is 'longrope'"),
        (lambda folder: edit_config(folder, rope_parameters={"mrope_section": [1, 2, 3]}), "vision model"),
        (lambda folder: edit_config(folder, partial_rotary_factor=0.5), "only whole heads are rotated"),
        (lambda folder: edit_config(folder, quantization_config={"quant_method": "fp8"}), "take the BF16 repository"),
        (lambda folder: edit(folder, lambda t: t.update(x=np.zeros(2, ml_dtypes.float8_e4m3fn))), "take the BF16"),
        (lambda folder: edit(folder, lambda t: t.update(x=np.zeros(2, np.int8))), "take the BF16 repository"),
        (lambda folder: edit(folder, lambda t: [t.pop(name) for name in list(t) if "embed" in name]), "no embedding"),
    ],
)
def test_a_folder_that_is_no_checkpoint_says_why(spoil, words, tmp_path):
    source = save_source(tmp_path / "source")
    spoil(source)
    with pytest.raises(CheckpointError, match=words):
        load_pretrained(source)


def test_nothing_is_overwritten_and_nothing_half_is_left(tmp_path):
    model = make_decoder("qwen2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("three years")
    with pytest.raises(CheckpointError, match="is not an empty folder"):
        save_pretrained(model, tmp_path / "full")
    with pytest.raises(CheckpointError, match="missing"):
        save_pretrained(model, tmp_path / "half", source=save_source(tmp_path / "source", "mistral"))
    (tmp_path / "empty").mkdir()
    save_pretrained(model, tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "source"]


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_tensors_go_to_their_shards(family, tmp_path):
    source = save_source(tmp_path / "source", family)
    axes = {"fsdp": 2, "tensor": 2}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    model = load_pretrained(source, mesh=mesh)
    kernel = model.layers[0].mlp.up_proj.kernel[...]
    assert len(kernel.addressable_shards) == 4 and kernel.addressable_shards[0].data.shape == (12, 20)
    chex.assert_trees_all_equal(*(jax.device_get(parameters_of(each)) for each in (model, make_decoder(family))))


def test_stacked_layers_load_and_save_as_the_same_tensors(tmp_path):
    source = save_source(tmp_path / "source", "qwen3")
    config = make_decoder("qwen3").config
    stacked = stack_layers(parameters_of(make_decoder("qwen3")))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stacked)
    loaded = load_parameters(source, shapes)
    chex.assert_trees_all_equal(unstack_layers(loaded), parameters_of(make_decoder("qwen3")))
    save_parameters(loaded, config, tmp_path / "copy", source=source)
    chex.assert_trees_all_equal(load_file(tmp_path / "copy" / SINGLE_NAME), load_file(source / SINGLE_NAME))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_survives_both_dialects(family):
    config = FAMILIES[family]
    fields = json.loads(json.dumps(hf_fields(config)))
    assert hf_fields(decoder_config(fields)) == fields
    legacy = dict(fields)
    ropes = legacy.pop("rope_parameters")
    full = dict(ropes.get("full_attention", ropes))
    legacy["rope_theta"] = full.pop("rope_theta")
    if full != {"rope_type": "default"}:
        full["type"] = full.pop("rope_type")
        legacy["rope_scaling"] = full
    if "sliding_attention" in ropes:
        legacy["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    assert decoder_config(legacy) == decoder_config(fields)


def test_a_decoder_that_its_family_cannot_express_is_refused():
    config = dataclasses.replace(FAMILIES["biased"], model_type="mistral")
    with pytest.raises(CheckpointError, match="cannot say qkv_bias=True, output_bias=True, mlp_bias=True"):
        hf_fields(config)


def test_families_and_ports_are_the_same():
    from smmd_jax.backbones import BACKBONES, SHARDING_RULES

    assert set(HF_FAMILIES) - {QWEN_VL_TEXT, MLLAMA_TEXT} <= set(BACKBONES) == set(SHARDING_RULES)


def test_shards_hold_at_most_what_they_may():
    tensors = {"a": ((4,), np.dtype("float32")), "b": ((4,), np.dtype("float32")), "c": ((40,), np.dtype("float16"))}
    assert plan_files(tensors) == dict.fromkeys(tensors, SINGLE_NAME)
    planned = plan_files(tensors, max_bytes=40)
    assert planned == {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors",
                       "c": "model-00002-of-00002.safetensors"}  # fmt: skip


def test_heads_follow_their_prefix():
    assert source_of("lm_head/kernel", num_layers=1, prefix="language_model.model.").names == (
        "language_model.lm_head.weight",
    )


_PEAK = """
import json, pathlib, re, sys
import jax
from smmd_jax.backbones import load_pretrained

def peak():
    # Not ru_maxrss: it starts with what the parent held when it forked.
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])

jax.numpy.zeros(8).block_until_ready()
before = peak()
model = load_pretrained(sys.argv[1])
print(json.dumps({"bytes": peak() - before, "mean": float(jax.numpy.mean(model.head))}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.parametrize("shards", [1, 4])
def test_loading_a_gigabyte_holds_little_more_than_the_model(shards, tmp_path):
    """The host's peak above the parameters is at most 1.3 times the largest file; bfloat16, every byte is read."""
    from smmd_jax.backbones import DecoderConfig

    config = DecoderConfig(
        vocab_size=34000, hidden_size=2048, intermediate_size=8192, num_layers=7, num_heads=16, tied=True
    )
    fields = {**hf_fields(config), "dtype": "bfloat16"}
    rng = np.random.default_rng(0)
    block = rng.standard_normal(1 << 20, np.float32).astype(ml_dtypes.bfloat16)
    shapes = _shapes_of(config)
    tensors = {name: np.resize(block, shape) for name, shape in shapes.items()}
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert total > 1 << 30
    planned = plan_files(
        {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()},
        max_bytes=total if shards == 1 else total // (shards - 1),
    )
    sizes = {}
    for file in set(planned.values()):
        part = {name: tensors[name] for name in tensors if planned[name] == file}
        sizes[file] = sum(tensor.nbytes for tensor in part.values())
        save_file(part, folder / file, {"format": "pt"})
    if shards > 1:
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": planned}))
    del tensors
    run = subprocess.run([sys.executable, "-c", _PEAK, folder], capture_output=True, text=True, check=True)
    peak = json.loads(run.stdout)["bytes"]
    print(f"peak {peak / total:.3f} of the parameters, largest file {max(sizes.values()) / total:.3f}")
    assert total < peak <= total + 1.3 * max(sizes.values())


def _shapes_of(config):
    """Tensor name -> shape, written down here and not taken from the code."""
    d, f, h = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, d), "model.norm.weight": (d,)}
    for layer in range(config.num_layers):
        of = f"model.layers.{layer}."
        shapes |= {of + "input_layernorm.weight": (d,), of + "post_attention_layernorm.weight": (d,)}
        shapes |= {f"{of}self_attn.{name}_proj.weight": (h, d) for name in "qkv"}
        shapes |= {of + "self_attn.o_proj.weight": (d, h), of + "mlp.down_proj.weight": (d, f)}
        shapes |= {f"{of}mlp.{name}_proj.weight": (f, d) for name in ("gate", "up")}
    return shapes


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
@pytest.mark.parametrize(
    "kind", ["bf16", "int32", jnp.int8, bool, complex, "float64", ml_dtypes.float8_e4m3fn, []], ids=str
)
def test_a_dtype_that_no_model_computes_in_is_refused(name, kind, tmp_path):
    with pytest.raises(TypeError, match=rf"{name} is .*, wanted one of float32, bfloat16, float16"):
        load_pretrained(tmp_path / "not looked at yet", **{name: kind})


def test_dtypes_may_be_names_and_a_mesh_may_not(tmp_path):
    source = save_source(tmp_path / "source")
    tokens = jnp.ones((1, 3), int)
    for kind in ("bfloat16", np.float16):
        assert load_pretrained(source, dtype=kind).hidden(tokens).dtype == jnp.dtype(kind)
    with pytest.raises(TypeError, match=r"mesh is 'data:2', wanted a jax.sharding.Mesh"):
        load_pretrained(source, mesh="data:2")


def test_float64_in_a_file_becomes_float32_without_a_warning(tmp_path, recwarn):
    source = save_source(tmp_path / "source")
    edit(source, lambda tensors: tensors.update({name: t.astype(np.float64) for name, t in tensors.items()}))
    found = {leaf.dtype for leaf in jax.tree.leaves(parameters_of(load_pretrained(source)))}
    assert found == {jnp.dtype("float32")} and not recwarn.list


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(metadata=[1]), "metadata is no object"),
        (dict(weight_map={"norm.weight": "a" * 5000 + ".safetensors"}), "does not exist, and the index names it"),
        (dict(weight_map=None), "weight_map must name a file for every tensor"),
    ],
)
def test_an_index_that_is_none_is_refused(changes, words, tmp_path):
    index = {"metadata": {}, "weight_map": {"norm.weight": "a.safetensors"}} | changes
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        open_folder(tmp_path)


def test_a_disk_that_is_full_is_an_error_of_the_system_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    source = load_pretrained(save_source(tmp_path / "source"))
    monkeypatch.setattr("smmd_jax.backbones.safetensors_files.save_file", full)
    with pytest.raises(OSError, match=r"model\.safetensors cannot be written: .*No space left"):
        save_pretrained(source, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
