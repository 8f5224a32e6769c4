"""Vision-language models on the shared decoder: features of images take the place of image tokens."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Int

from smmd_jax.backbones.cache import Cache
from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.decoder import Decoder
from smmd_jax.backbones.images import (
    PatchedImages,
    deal_images,
    named_arrays,
    pack_images,
    patches_of,
    place_features,
)
from smmd_jax.backbones.mllama_vision import TiledImages
from smmd_jax.backbones.pixtral import Mistral3Projector, Pixtral
from smmd_jax.backbones.qwen_vision import QwenVision, grid_positions
from smmd_jax.backbones.token_ids import as_token_ids
from smmd_jax.backbones.vision import VisionConfig


@dataclass(frozen=True, kw_only=True)
class VisionLanguageConfig:
    """Describe a vision-language model.

    Args:
        text: of the decoder.
        vision: of the tower.
        model_type: row of the table of backbones.
        image_token_id: the token that each feature of an image replaces.
        projector_bias: biases in the projector (mistral3).
    """

    text: DecoderConfig
    vision: VisionConfig
    model_type: str
    image_token_id: int
    projector_bias: bool = False

    def __post_init__(self):
        if not 0 <= self.image_token_id < self.text.num_embeddings:
            raise ValueError(
                f"image_token_id is {self.image_token_id}, and the embedding has {self.text.num_embeddings} tokens"
            )

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def max_positions(self) -> int:
        return self.text.max_positions

    @property
    def num_layers(self) -> int:
        return self.text.num_layers

    @property
    def tied(self) -> bool:
        return self.text.tied


class VisionLanguageModel(nnx.Module):
    """Read text and images and predict the next token; what `Decoder` does, with images.

    Images come as a dict of arrays by the names of the Hugging Face processors, on the host, or as the
    `PatchedImages` (mllama: `TiledImages`) that `prepare` makes of them, which may enter a jitted function. Text alone
    needs neither.
    """

    config: VisionLanguageConfig
    language_model: Decoder

    @property
    def dtype(self):
        return self.language_model.dtype

    @property
    def tower(self) -> nnx.Module:
        """The tower, whose layers are `tower.all_layers`."""
        raise NotImplementedError  # each family has its own

    @property
    def head(self) -> Float[Array, "D V"]:
        """Return the head [D, V] of the text decoder."""
        return self.language_model.head

    @property
    def stored_head(self) -> Float[Array, "D V"]:
        """Return the head [D, V] in the dtype it is stored in."""
        return self.language_model.stored_head

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Return float32 logits of hidden states."""
        return self.language_model.logits(hidden)

    def numeric_logits(self, hidden: Float[Array, "*batch D"], kernel) -> Float[Array, "*batch N"]:
        """Return float32 logits of the numeric tokens only; see `Decoder.numeric_logits`."""
        return self.language_model.numeric_logits(hidden, kernel)

    def numeric_columns(self, kernel) -> Float[Array, "D N"]:
        """Return the head's columns of the numeric tokens; see `Decoder.numeric_columns`."""
        return self.language_model.numeric_columns(kernel)

    def __call__(self, input_ids: Int[ArrayLike, "B T"], **options) -> Float[Array, "B T V"]:
        """Return float32 logits [B, T, V]; the arguments are those of `hidden`."""
        return self.logits(self.hidden(input_ids, **options))

    def hidden(
        self,
        input_ids: Int[ArrayLike, "B T"],
        *,
        attention_mask: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        images: dict | PatchedImages | TiledImages | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the hidden states after the last norm, what the head reads.

        Args:
            input_ids, attention_mask, positions, segment_ids, rngs: as `Decoder.hidden`.
            images: dict of host arrays by the processors' names, or what `prepare` makes of them; None: text alone.

        Raises:
            ValueError: image tokens that are not as many as the features; also as `Decoder.hidden`.
        """
        input_ids, images, positions = self.prepare(input_ids, attention_mask, images, positions)
        vision = {} if images is None else self._with_images(input_ids, attention_mask, images)
        return self.language_model.hidden(
            input_ids, attention_mask=attention_mask, positions=positions, segment_ids=segment_ids, rngs=rngs, **vision
        )

    def prefill(
        self,
        input_ids: Int[Array, "B T"],
        *,
        attention_mask: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        images: PatchedImages | TiledImages | None = None,
        slots: int,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Return the hidden states of a prompt and a cache of `slots` slots; see `Decoder.prefill`."""
        self._check_positions(images, positions)
        vision = {} if images is None else self._with_images(input_ids, attention_mask, images)
        return self.language_model.prefill(
            input_ids, attention_mask=attention_mask, positions=positions, slots=slots, **vision
        )

    def extend(self, input_ids: Int[Array, "B T"], cache: Cache) -> tuple[Float[Array, "B T D"], Cache]:
        """Return the hidden states of the tokens after those in the cache; see `Decoder.extend`."""
        return self.language_model.extend(input_ids, cache)

    def prepare(
        self,
        input_ids: Int[ArrayLike, "B T"],
        attention_mask: ArrayLike | None,
        images: dict | PatchedImages | TiledImages | None,
        positions: ArrayLike | None = None,
    ) -> tuple[Int[Array, "B T"], PatchedImages | TiledImages | None, ArrayLike | None]:
        """Turn the arrays of a Hugging Face processor into what a jitted function takes, on the host.

        Returns:
            (input_ids, images, positions); what is ready already stays as it is.

        Raises:
            ValueError: unknown or missing arrays, sizes that do not fit, image tokens that are not as many as the
                features.
        """
        if images is None or isinstance(images, PatchedImages):
            self._check_positions(images, positions)
            return as_token_ids(input_ids), images, positions
        if isinstance(input_ids, jax.core.Tracer):
            raise ValueError("images came as a dict into a traced function: call `prepare` outside and pass its result")
        input_ids = as_token_ids(input_ids)
        host_ids, vision, token = np.asarray(input_ids), self.config.vision, self.config.image_token_id
        cut, grids = self.cut(images, vision)
        dealt = deal_images(host_ids, token, [len(patches) // vision.merge_size**2 for patches in cut])
        packed = pack_images(
            [[cut[number] for number in own] for own in dealt],
            [[tuple(grids[number, 1:].tolist()) for number in own] for own in dealt],
            numbers=vision.patch_numbers, merge=vision.merge_size, window=vision.window_blocks,
        )  # fmt: skip
        if positions is None and self.config.text.rope.sections is not None:
            positions = grid_positions(
                host_ids, grids, image_token_id=token, merge=vision.merge_size, attention_mask=attention_mask
            )
        return input_ids, jax.tree.map(jnp.asarray, packed), positions

    @staticmethod
    def cut(
        images: dict, vision: VisionConfig
    ) -> tuple[list[Float[np.ndarray, "patches K"]], Int[np.ndarray, "I 3"]]:
        """Return the patches of every image and their grids (frames, rows, columns of patches)."""
        raise NotImplementedError  # each family has its own

    def image_features(self, images: PatchedImages) -> Float[Array, "B cells D"]:
        """Return the features of each block of the images of each row, one after another, padding included."""
        features = self._features(images.flattened())
        return features.reshape(images.patches.shape[0], -1, features.shape[-1])

    def _features(self, images: PatchedImages) -> Float[Array, "I cells D"]:
        raise NotImplementedError  # each family has its own

    def _check_positions(self, images: PatchedImages | None, positions: ArrayLike | None) -> None:
        if images is not None and positions is None and self.config.text.rope.sections is not None:
            raise ValueError(
                f"images came prepared and positions did not, and {self.config.model_type} gives image tokens "
                "positions of three axes: pass those that `prepare` returned with the images"
            )

    def _with_images(self, input_ids, attention_mask, images: PatchedImages) -> dict[str, Array]:
        """Return what the decoder takes beside the tokens."""
        embeddings = self.language_model.embed(input_ids, attention_mask=attention_mask)
        features, token = self.image_features(images), self.config.image_token_id
        return {"embeddings": place_features(embeddings, input_ids, token, features, images.order)}


class Mistral3(VisionLanguageModel):
    """Ministral 3 with its eyes: Pixtral, a projector that merges 2 x 2 patches, and the ministral3 decoder.

    References:
        Mistral AI, Ministral 3 model card, 2025; P. Agrawal et al., Pixtral 12B, 2024, section 2.
    """

    def __init__(
        self, config: VisionLanguageConfig, *, rngs: nnx.Rngs, dtype=jnp.float32, param_dtype=jnp.float32, **decoder
    ):
        self.config = config
        options = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.vision_tower = Pixtral(config.vision, **options, remat=decoder.get("remat", "none"))
        self.multi_modal_projector = Mistral3Projector(
            config.vision, config.text, bias=config.projector_bias, **options
        )
        self.language_model = Decoder(config.text, **options, **decoder)

    @staticmethod
    def cut(
        images: dict, vision: VisionConfig
    ) -> tuple[list[Float[np.ndarray, "patches K"]], Int[np.ndarray, "I 3"]]:
        pixels, sizes = named_arrays(images, pixel_values=f"float I {vision.channels} H W", image_sizes="int I 2")
        if len(pixels) != len(sizes):
            raise ValueError(f"pixel_values hold {len(pixels)} images and image_sizes {len(sizes)}: make them equal")
        if not len(sizes):
            raise ValueError("image_sizes holds no images: leave images out")
        cut = [
            patches_of(image[:, :height, :width], vision.patch_size, vision.merge_size)
            for image, (height, width) in zip(pixels, sizes.tolist(), strict=True)
        ]
        return cut, np.insert(sizes // vision.patch_size, 0, 1, axis=1)

    def _features(self, images: PatchedImages) -> Float[Array, "I cells D"]:
        return self.multi_modal_projector(self.vision_tower(images))

    @property
    def tower(self) -> nnx.Module:
        return self.vision_tower


class Qwen2_5VL(VisionLanguageModel):
    """Qwen2.5-VL: a windowed vision tower, and the qwen2 decoder with positions of three axes.

    References:
        S. Bai et al., Qwen2.5-VL Technical Report, 2025.
    """

    def __init__(
        self, config: VisionLanguageConfig, *, rngs: nnx.Rngs, dtype=jnp.float32, param_dtype=jnp.float32, **decoder
    ):
        self.config = config
        options = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.visual = QwenVision(
            config.vision, config.text.hidden_size, **options, remat=decoder.get("remat", "none")
        )
        self.language_model = Decoder(config.text, **options, **decoder)

    @staticmethod
    def cut(
        images: dict, vision: VisionConfig
    ) -> tuple[list[Float[np.ndarray, "patches K"]], Int[np.ndarray, "I 3"]]:
        pixels, grids = named_arrays(
            images, pixel_values=f"float patches {vision.patch_numbers}", image_grid_thw="int I 3"
        )
        if not len(grids):
            raise ValueError("image_grid_thw holds no images: leave images out")
        if (grids[:, 0] != 1).any():
            found = next(frames for frames in grids[:, 0].tolist() if frames != 1)
            raise ValueError(f"image_grid_thw has {found} frames, wanted 1: only single images are read")
        ends = np.cumsum(grids.prod(1))
        if len(pixels) != ends[-1]:
            raise ValueError(f"pixel_values hold {len(pixels)} patches and image_grid_thw asks for {ends[-1]}")
        return np.split(pixels, ends[:-1]), grids

    def _features(self, images: PatchedImages) -> Float[Array, "I cells D"]:
        return self.visual(images)

    @property
    def tower(self) -> nnx.Module:
        return self.visual
