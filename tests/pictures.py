"""A task whose answers stand in its images, and tiny folders of the families that see, made without transformers."""

import dataclasses
import hashlib
import io
import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from PIL import Image, ImageDraw
from safetensors.numpy import save_file

from smmd_jax.backbones import BACKBONES, PRESETS
from smmd_jax.backbones.ports import model_config
from smmd_jax.backbones.sharding import parameter_path
from smmd_jax.backbones.tensor_names import source_of
from train.tasks.base import Example, Task
from train.tokenizer import make_task_tokenizer

COUNTS = {"train": 40, "test": 12}


class Squares:
    """How wide the square in an image is, from 0 to 9 eighths of ten; every fifth question has its answer in text."""

    def __init__(self, count: int, *, sizes=((24, 24),), broken=(), text_every=5) -> None:
        self.fingerprint = hashlib.sha256(repr((count, sizes, broken, text_every)).encode()).hexdigest()
        self.count, self.sizes, self.broken, self.text_every = count, sizes, broken, text_every

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        digit = 7 * index % 10
        if self.text_every and index % self.text_every == 0:
            return Example(key=f"text-{index}", prompt=f"{digit}?\n", answer=str(digit))
        image = picture(digit, self.sizes[index % len(self.sizes)])
        image = self.broken_image(index) if index in self.broken else image
        return Example(key=f"image-{index}", prompt="?\n", answer=str(digit), image=image)

    def broken_image(self, index: int) -> bytes:
        return b"" if index % 2 else picture(0, (24, 24))[:60]


def picture(digit: int, size=(24, 24)) -> bytes:
    """The bytes of a PNG file; height and width."""
    image = Image.new("RGB", size[::-1], "white")
    ImageDraw.Draw(image).rectangle((0, 0, size[1] * digit // 10, size[0] - 1), fill=(200, 30, 30 + 20 * digit))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def make_task(**options) -> Task:
    """The row of a task `squares`."""
    make_source = lambda split, *, data_dir=None, seed=0, variant="plain": Squares(COUNTS[split], **options)
    return Task(
        name="squares", summary="tests", train_split="train", eval_split="test", splits=("train", "test"),
        variants=("plain",), grader="math_value", defaults={}, make_source=make_source, max_new_tokens=3,
    )  # fmt: skip


def shrink(setitem) -> None:
    """Make tiny-vlm smaller still."""
    preset = PRESETS["tiny-vlm"]
    text = dataclasses.replace(
        preset.text, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16,
        rope=dataclasses.replace(preset.text.rope, sections=(2, 3, 3)),
    )  # fmt: skip
    vision = dataclasses.replace(
        preset.vision, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, full_layers=(0, 1)
    )
    setitem(PRESETS, "tiny-vlm", dataclasses.replace(preset, text=text, vision=vision))


_TEXT = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=256,
)  # fmt: skip
_VISION = dict(hidden_size=16, intermediate_size=24, patch_size=4)
_TOKENS = {
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "qwen2_5_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "mllama": ("<|image|>",),
}
PREPROCESSORS = {
    "mistral3": {"size": {"longest_edge": 24}, "patch_size": 4},
    "qwen2_5_vl": {"min_pixels": 64, "max_pixels": 576, "patch_size": 4, "temporal_patch_size": 2},
    "mllama": {"size": {"height": 8, "width": 8}, "max_image_tiles": 4},
}


def fields_of(family: str, width: int, image_token: int) -> dict:
    """A config.json for a head of this width."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    if family == "mistral3":
        rope |= {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
        text = {**_TEXT, "model_type": "ministral3", "head_dim": 8, "vocab_size": width, "rope_parameters": rope}
        vision = {**_VISION, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": "silu"}
        own = {"image_token_index": image_token, "tie_word_embeddings": True}
    elif family == "qwen2_5_vl":
        rope |= {"mrope_section": [1, 1, 2]}
        text = {**_TEXT, "vocab_size": width, "rope_parameters": rope}
        vision = {**_VISION, "depth": 2, "num_heads": 2, "window_size": 16, "fullatt_block_indexes": [1]}
        vision |= {"out_hidden_size": 16}
        own = {"image_token_id": image_token, "tie_word_embeddings": False}
    else:
        text = {**_TEXT, "vocab_size": width, "rope_parameters": rope, "cross_attention_layers": [1]}
        vision = {**_VISION, "num_hidden_layers": 2, "attention_heads": 2, "image_size": 8, "num_global_layers": 1}
        vision |= {"intermediate_layers_indices": [1], "vision_output_dim": 32}
        own = {"image_token_index": image_token}
    return {"model_type": family, "text_config": text, "vision_config": vision, **own}


def make_folder(family: str, folder: Path) -> Path:
    """Write a checkpoint of random weights with tokenizer and image processor."""
    tokenizer = make_task_tokenizer(_TOKENS[family])
    image_token = tokenizer.ids_of(_TOKENS[family][:1])[0]
    width = tokenizer.vocab_size - (family == "mllama")  # its image token has no column in the head
    fields = fields_of(family, width, image_token)
    config = model_config(fields)
    state = nnx.to_pure_dict(nnx.state(BACKBONES[family](config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    prefix = "model." if family == "qwen2_5_vl" else "language_model.model."
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = parameter_path(path)
        source = source_of(name, num_layers=2, prefix=prefix)
        # New gates are 0, which would hide the images of mllama.
        array = np.asarray(leaf) + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32)
        array = array.T if source.transposed else array
        if name.rsplit("/", 1)[0].endswith(("patch_conv", "patch_embed/proj", "patch_embedding")):
            vision = config.vision
            frames = (vision.temporal_size,) if family == "qwen2_5_vl" else ()
            array = array.reshape(len(array), 3, *frames, vision.patch_size, vision.patch_size)
        tensors[source.names[0]] = np.ascontiguousarray(array)
    folder.mkdir(parents=True)
    tokenizer.save(folder)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[family]))
    return folder
