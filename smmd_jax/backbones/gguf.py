"""A GGUF file of the llama architecture written as a Hugging Face folder; needs the `gguf` package."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.hf_fields import hf_fields
from smmd_jax.backbones.rope import RopeConfig
from smmd_jax.backbones.safetensors_files import by_file, plan_files, write_file, write_index
from smmd_jax.errors import CheckpointError

# Part of what a converted folder is cached under: raised whenever the same file would convert to another folder.
CONVERTER_VERSION = 1

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.([0-9]+)\.([a-z_]+)\.weight")
_CONTROL = 3  # token type of special tokens


def convert_gguf(path: str | Path, folder: str | Path) -> None:
    """Write config, weights in float32, tokenizer, chat template and generation config of a GGUF file into a folder.

    A llama-type GGUF keeps the two halves of every query and key head interleaved, row 2i + j for row j C/2 + i of the
    Hugging Face layout; this is undone. A wrong order still writes fluent text, only of a higher perplexity.

    Args:
      path: the file; every quantisation that `gguf` can undo is read.
      folder: exists, and is empty.

    Raises:
      CheckpointError: `gguf` is missing, the file is none, its architecture is not llama, it has tensors or scaled
        rotary embeddings that are not known here, or its tokenizer is not SmolLM's.

    References:
      The GGUF specification of ggml; "convert_hf_to_gguf.py" of llama.cpp, `LlamaModel.permute`.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"reading {path} needs the package gguf: pip install gguf") from error
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, LookupError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {type(error).__name__}: {error}") from error
    folder = Path(folder)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    config = _decoder_config(fields, shapes, path)
    sources = {_hugging_face_name(name, path): name for name in tensors}
    planned = plan_files({name: (shapes[source], np.dtype(np.float32)) for name, source in sources.items()})
    total = 0
    for file, names in by_file(planned):
        arrays = {}
        for name in names:
            tensor = tensors[sources[name]]
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shapes[tensor.name])
            heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
            arrays[name] = np.ascontiguousarray(_halves(array, heads) if heads else array, np.float32)
            total += arrays[name].nbytes
        write_file(folder / file, arrays)
    if len(set(planned.values())) > 1:
        write_index(folder, planned, total)

    special = {
        name: fields.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    ids = {f"{name}_token_id": token for name, token in special.items() if token is not None and name != "unk"}
    _write(folder / "config.json", {**hf_fields(config), "dtype": "float32", **ids})
    _write(folder / "generation_config.json", ids)
    _write(folder / "tokenizer.json", _tokenizer_json(fields, path))
    tokens = fields["tokenizer.ggml.tokens"]
    names = {f"{name}_token": tokens[token] for name, token in special.items() if token is not None}
    _write(folder / "tokenizer_config.json", {
        **names, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
    })  # fmt: skip
    if template := fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _decoder_config(
    fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise CheckpointError(f"{path} is of the architecture {kind!r}, and only llama is converted")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in shapes:
        raise CheckpointError(f"{path} has scaled rotary embeddings, and only plain ones are converted")
    try:
        return DecoderConfig(
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=fields["llama.embedding_length"],
            intermediate_size=fields["llama.feed_forward_length"],
            num_layers=fields["llama.block_count"],
            num_heads=fields["llama.attention.head_count"],
            num_kv_heads=fields.get("llama.attention.head_count_kv"),
            head_dim=fields.get("llama.attention.key_length"),
            max_positions=fields["llama.context_length"],
            # Stored in float32: the shortest decimal that rounds to it is what was meant.
            norm_eps=float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
            rope=RopeConfig(theta=float(str(np.float32(fields.get("llama.rope.freq_base", 10_000.0))))),
            tied="output.weight" not in shapes,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not describe a decoder: {type(error).__name__}: {error}") from error


def _hugging_face_name(name: str, path: str | Path) -> str:
    layer = _LAYER_NAME.fullmatch(name)
    if name in _TENSORS:
        return _TENSORS[name]
    if layer is None or layer[2] not in _LAYER_TENSORS:
        raise CheckpointError(f"{path} has the tensor {name}, which no plain llama has")
    return f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.weight"


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (0, C/2), (1, C/2 + 1), ... back to two halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer_json(fields: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(
            f"{path} has a tokenizer of the kind {kind[0]}/{kind[1]}, and only SmolLM's (gpt2/smollm) is converted"
        )
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }  # fmt: skip


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
