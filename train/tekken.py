"""Mistral's tekken.json written as a Hugging Face tokenizer.json, for one library to encode with."""

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from smmd_jax.errors import TokenizerError
from smmd_jax.tokenizer_pieces import byte_level_alphabet

EOS_TOKEN, PAD_TOKEN = "</s>", "<pad>"

# Files before version 7 carry no list of their special tokens; these are the names of the first ids, the others are
# called <SPECIAL_20> and so on.
_SPECIAL_NAMES = (
    "<unk>", "<s>", EOS_TOKEN, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", PAD_TOKEN, "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def is_tekken(data: object) -> bool:
    """Say whether the content of a JSON file is a tekken.json."""
    return isinstance(data, dict) and isinstance(data.get("config"), dict) and isinstance(data.get("vocab"), list)


def tokenizer_json_of_tekken(data: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the content of a tekken.json into that of a tokenizer.json with the same ids.

    Tekken merges the adjacent pair of pieces whose union has the lowest rank, whatever the two pieces are; here every
    way to cut a token into two tokens is a merge of that token's rank. A piece of the pattern that is a token as it
    stands is taken whole. The special tokens take the first ids, id 1 begins a prompt; ranks that reach beyond
    `default_vocab_size` have no row in any model and are left out.

    Args:
      data: the parsed file.

    Returns:
      An object that ``tokenizers.Tokenizer.from_str(json.dumps(...))`` reads.

    Raises:
      TokenizerError: a file without pattern, ranks or special tokens as they should be.

    References:
      Mistral AI, "mistral-common", files tekken_240718.json and tekken_240911.json.
    """
    try:
        specials = _special_names(data)
        size = data["config"]["default_vocab_size"] - len(specials)
        pattern = data["config"]["pattern"]
        ranks = {b64decode(entry["token_bytes"], validate=True): entry["rank"] for entry in data["vocab"]}
        ranks = {piece: rank for piece, rank in ranks.items() if rank < size}
        singles = {bytes([byte]) for byte in range(256)}
        if sorted(ranks.values()) != list(range(len(ranks))) or not singles <= ranks.keys():
            raise ValueError("its ranks are not 0, 1, 2, ... with all 256 single bytes among them")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(f"this tekken.json is damaged: {type(error).__name__}: {error}") from error
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    names = {piece: "".join(map(letters.__getitem__, piece)) for piece in ranks}
    merges = [
        [names[piece[:cut]], names[piece[cut:]]]
        for piece in sorted(ranks, key=ranks.__getitem__)
        for cut in _cuts(piece, ranks)
    ]
    vocab = {name: index for index, name in enumerate(specials)}
    vocab |= {names[piece]: rank + len(specials) for piece, rank in ranks.items()}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for index, name in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": specials[1], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": specials[1], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {specials[1]: {"id": specials[1], "ids": [1], "tokens": [specials[1]]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                  "vocab": vocab, "merges": merges},
    }  # fmt: skip


def _special_names(data: Mapping[str, Any]) -> list[str]:
    count = data["config"]["default_num_special_tokens"]
    listed = data.get("special_tokens")
    given = dict(enumerate(_SPECIAL_NAMES))
    if listed:
        given = {token["rank"]: token["token_str"] for token in listed}
    names = [given.get(index, f"<SPECIAL_{index}>") for index in range(count)]
    if len(set(names)) != count or any(index >= count for index in given if listed):
        raise ValueError(f"its special tokens are not {count} different names")
    return names


def _cuts(piece: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Where a token falls into two tokens, those of the lowest ranks first."""
    found = [cut for cut in range(1, len(piece)) if piece[:cut] in ranks and piece[cut:] in ranks]
    return sorted(found, key=lambda cut: (ranks[piece[:cut]], ranks[piece[cut:]]))
