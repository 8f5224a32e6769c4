"""Llama 3.2 Vision: a tower over tiles, and a decoder with layers that read what the tower gives."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Int

from smmd_jax.backbones.cross_layer import ImageStates
from smmd_jax.backbones.decoder import Decoder
from smmd_jax.backbones.images import named_arrays
from smmd_jax.backbones.mllama_vision import MllamaVision, TiledImages
from smmd_jax.backbones.token_ids import as_token_ids
from smmd_jax.backbones.vision import linear
from smmd_jax.backbones.vlm import VisionLanguageConfig, VisionLanguageModel

_ARRAYS = {
    "pixel_values": "float B images tiles channels H W",
    "aspect_ratio_ids": "int B images",
    "aspect_ratio_mask": "int B images tiles",
    "cross_attention_mask": "int B T images tiles",
}


class Mllama(VisionLanguageModel):
    """Llama 3.2 Vision: text reads images in layers of its own, and no feature takes the place of a token.

    An image is one token of the prompt, `config.image_token_id`. The embedding has a row for it and the head no column:
    it can be read and never predicted. Without images the cross-attention layers are skipped, as they were when the
    text was trained.

    Images are the four arrays of the Hugging Face processor: pixel_values, aspect_ratio_ids, aspect_ratio_mask and
    cross_attention_mask (`cross_attention_mask` of `mllama_images` makes the last from the tokens).

    References:
        A. Dubey et al., The Llama 3 Herd of Models, 2024, section 7.
    """

    def __init__(
        self, config: VisionLanguageConfig, *, rngs: nnx.Rngs, dtype=jnp.float32, param_dtype=jnp.float32, **decoder
    ):
        self.config = config
        options = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.vision_model = MllamaVision(config.vision, **options, remat=decoder.get("remat", "none"))
        self.multi_modal_projector = linear(config.vision.output_size, config.text.hidden_size, True, **options)
        self.language_model = Decoder(config.text, **options, **decoder)

    def prepare(
        self,
        input_ids: Int[ArrayLike, "B T"],
        attention_mask: ArrayLike | None,
        images: dict | TiledImages | None,
        positions: ArrayLike | None = None,
    ) -> tuple[Int[Array, "B T"], TiledImages | None, ArrayLike | None]:
        if images is None or isinstance(images, TiledImages):
            return as_token_ids(input_ids), images, positions
        if isinstance(input_ids, jax.core.Tracer):
            raise ValueError("images came as a dict into a traced function: call `prepare` outside and pass its result")
        input_ids = as_token_ids(input_ids)
        host_ids = np.asarray(input_ids)
        pixels, ids, there, reads = named_arrays(images, **_ARRAYS)
        self._check_shapes(host_ids, pixels, ids, there, reads)
        self._check_counts(host_ids, attention_mask, ids)
        tiled = TiledImages(
            pixel_values=jnp.asarray(pixels), aspect_ratio_ids=jnp.asarray(ids, jnp.int32),
            aspect_ratio_mask=jnp.asarray(there != 0), cross_attention_mask=jnp.asarray(reads != 0),
        )  # fmt: skip
        return input_ids, tiled, positions

    @property
    def tower(self) -> nnx.Module:
        return self.vision_model

    def image_features(self, images: TiledImages) -> Float[Array, "B P D"]:
        """Return the features of all patches of all tiles of each row's images, one after another, padding included."""
        batch, count = images.aspect_ratio_ids.shape
        features = self.vision_model(*(
            array.reshape(batch * count, *array.shape[2:])
            for array in (images.pixel_values, images.aspect_ratio_ids, images.aspect_ratio_mask)
        ))  # fmt: skip
        return self.multi_modal_projector(features).reshape(batch, -1, self.config.text.hidden_size)

    def _with_images(self, input_ids, attention_mask, images: TiledImages) -> dict[str, ImageStates]:
        batch, length = input_ids.shape
        tiles = images.cross_attention_mask.reshape(batch, length, -1)
        return {"states": ImageStates(features=self.image_features(images), tiles=tiles)}

    def _check_shapes(self, input_ids, pixels, ids, there, reads) -> None:
        vision = self.config.vision
        batch, length = input_ids.shape
        size = (vision.channels, vision.image_size, vision.image_size)
        if len(ids) != batch:
            raise ValueError(f"aspect_ratio_ids has shape {list(ids.shape)}, wanted [{batch}, images]")
        images = (ids.shape[1], vision.max_tiles)
        for name, array, wanted in (
            ("pixel_values", pixels, (batch, *images, *size)),
            ("aspect_ratio_mask", there, (batch, *images)),
            ("cross_attention_mask", reads, (batch, length, *images)),
        ):
            if array.shape != wanted:
                raise ValueError(f"{name} has shape {list(array.shape)}, wanted {list(wanted)}")
        if ids.max(initial=0) > vision.aspect_ratios:
            raise ValueError(
                f"aspect_ratio_ids go from {ids.min()} to {ids.max()}, wanted 0 (no image) to {vision.aspect_ratios}"
            )

    def _check_counts(self, input_ids, attention_mask, ids) -> None:
        token = input_ids == self.config.image_token_id
        if attention_mask is not None:
            token &= np.asarray(attention_mask) != 0
        found, given = token.sum(1), (ids > 0).sum(1)
        for row in np.flatnonzero(found != given):
            raise ValueError(
                f"row {row} holds {found[row]} image tokens (id {self.config.image_token_id}) and {given[row]} images: "
                "write one image token per image"
            )
