"""Tiny random vision-language models of transformers and inputs with images, for the parity tests."""

import numpy as np

from tests.references import _DEFAULT, _LLAMA3, _MINISTRAL3, SIZES, libraries

V = SIZES["vocab_size"]
IMAGE = {"mistral3": 10, "qwen2_5_vl": 190, "mllama": V}
_TEXT = {name: value for name, value in SIZES.items() if name != "rms_norm_eps"}


def _mistral3(transformers):
    text = transformers.Ministral3Config(
        **_TEXT, num_hidden_layers=3, rms_norm_eps=1e-5, head_dim=14, rope_parameters=dict(_MINISTRAL3),
        tie_word_embeddings=True,
    )  # fmt: skip
    vision = transformers.PixtralVisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, image_size=84, patch_size=14,
        hidden_act="silu",
    )  # fmt: skip
    return transformers.Mistral3ForConditionalGeneration, transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE["mistral3"], spatial_merge_size=2,
        vision_feature_layer=-1, multimodal_projector_bias=False, projector_hidden_act="gelu", tie_word_embeddings=True,
    )  # fmt: skip


def _qwen2_5_vl(transformers):
    text = _TEXT | dict(
        num_hidden_layers=3, rms_norm_eps=1e-6, hidden_size=48, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters=_DEFAULT | dict(mrope_section=[1, 2, 3]),
    )  # fmt: skip
    vision = dict(
        depth=4, hidden_size=32, intermediate_size=44, num_heads=2, patch_size=14, spatial_merge_size=2,
        temporal_patch_size=2, window_size=56, out_hidden_size=48, fullatt_block_indexes=[1, 3], hidden_act="silu",
        in_channels=3,
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration, transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE["qwen2_5_vl"], video_token_id=191,
        vision_start_token_id=192, vision_end_token_id=193, tie_word_embeddings=False,
    )  # fmt: skip


def _mllama(transformers):
    text = _TEXT | dict(
        num_hidden_layers=5, cross_attention_layers=[1, 3], rms_norm_eps=1e-5, rope_parameters=dict(_LLAMA3)
    )
    # Five patches a tile, class embedding included, which the tower fills up to eight.
    vision = dict(
        hidden_size=24, num_hidden_layers=4, num_global_layers=2, attention_heads=2, intermediate_size=40,
        image_size=28, patch_size=14, max_num_tiles=4, intermediate_layers_indices=[1, 2, 3], vision_output_dim=24 * 4,
    )  # fmt: skip
    return transformers.MllamaForConditionalGeneration, transformers.MllamaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE["mllama"]
    )


MODELS = {"mistral3": _mistral3, "qwen2_5_vl": _qwen2_5_vl, "mllama": _mllama}


def make_reference(family: str, seed: int):
    """A model whose every weight is random."""
    torch, transformers = libraries()
    cls, config = MODELS[family](transformers)
    config._attn_implementation = "eager"
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.25 * noise + (0.0 if path.endswith("bias") else 1.0))
            elif "embed_tokens" in path:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * 1.2 / parameter[0].numel() ** 0.5)
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
    return as_released(model)


def as_released(model):
    """Let mllama's tower take the input of its feature layers, which the released weights were trained with.

    transformers 4.45 does, 5.24 takes their output: there every index is one too high.
    """
    torch, _ = libraries()
    tower = getattr(model.model, "vision_model", None)
    if tower is not None:
        with torch.no_grad():
            states = tower.transformer(torch.zeros(1, 8, tower.config.hidden_size)).hidden_states
        if len(states) == tower.config.num_hidden_layers:  # no entry for what goes into the first layer
            tower.intermediate_layers_indices = [
                layer - 1 for layer in tower.config.intermediate_layers_indices
            ]
    return model


def _rows(rng, parts, side):
    """Token rows of text lengths and images in turn, padded; what stands in the padding is a real text id."""
    text = lambda length: rng.integers(20, 180, length)
    rows = [np.concatenate([text(part) if np.isscalar(part) else part for part in row]) for row in parts]
    width = max(map(len, rows))
    ids, mask = rng.integers(20, 180, (len(rows), width)), np.zeros((len(rows), width), np.int64)
    for number, row in enumerate(rows):
        columns = slice(width - len(row), None) if side == "left" else slice(None, len(row))
        ids[number, columns], mask[number, columns] = row, 1
    return ids, mask


def make_inputs(family: str, seed: int, side: str = "left"):
    """(input_ids, attention_mask, images): three images of different sizes, two of them in one row."""
    rng = np.random.default_rng(seed)
    token = IMAGE[family]
    if family == "mllama":
        ids, mask = _rows(rng, [(3, [token], 9), (1, [token], 2, [token], 4)], side)
        return ids, mask, _tiled_images(rng, ids, [[(3, 3)], [(6, 4), (5, 2)]])
    grids = [(2, 3), (3, 1), (5, 4)]  # in features
    if family == "mistral3":
        runs = [np.concatenate([[token] * wide + [12]] * high) for high, wide in grids]
        sizes = np.array([(28 * high, 28 * wide) for high, wide in grids])
        pixels = np.zeros((3, 3, 140, 112), np.float32)
        for image, (high, wide) in zip(pixels, sizes, strict=True):
            image[:, :high, :wide] = rng.standard_normal((3, high, wide))
        images = {"pixel_values": pixels, "image_sizes": sizes}
    else:
        runs = [np.concatenate([[192], [token] * (high * wide), [193]]) for high, wide in grids]
        thw = np.array([(1, 2 * high, 2 * wide) for high, wide in grids])
        pixels = rng.standard_normal((int(thw.prod(1).sum()), 3 * 2 * 14 * 14)).astype(np.float32)
        images = {"pixel_values": pixels, "image_grid_thw": thw}
    return *_rows(rng, [(3, runs[0], 5), (1, runs[1], 2, runs[2], 4)], side), images


def _tiled_images(rng, ids, images):
    """Per row its images as (number of the arrangement, tiles); where there is no tile, or no image, there is noise."""
    count = max(map(len, images))
    arrays = {
        "pixel_values": rng.standard_normal((len(images), count, 4, 3, 28, 28)).astype(np.float32),
        "aspect_ratio_ids": np.zeros((len(images), count), np.int64),
        "aspect_ratio_mask": np.zeros((len(images), count, 4), np.int64),
        "cross_attention_mask": np.zeros((*ids.shape, count, 4), np.int64),
    }
    arrays["aspect_ratio_mask"][:, :, 0] = 1
    for row, kinds in enumerate(images):
        starts = np.flatnonzero(ids[row] == IMAGE["mllama"])
        ends = [*starts[1:], ids.shape[1]]
        for number, (kind, tiles) in enumerate(kinds):
            arrays["aspect_ratio_ids"][row, number] = kind
            arrays["aspect_ratio_mask"][row, number, :tiles] = 1
            arrays["cross_attention_mask"][row, starts[number] : ends[number], number, :tiles] = 1
    return arrays


def as_torch(family: str, input_ids, attention_mask, images) -> dict:
    """The keyword arguments of the reference model."""
    torch, _ = libraries()
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **images}
    inputs = {name: torch.as_tensor(np.array(array)) for name, array in inputs.items()}
    if family == "qwen2_5_vl":
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE[family]).int() * inputs["attention_mask"].int()
    return inputs


def positions(attention_mask):
    torch, _ = libraries()
    return (torch.as_tensor(attention_mask).cumsum(1) - 1).clamp(min=0)
