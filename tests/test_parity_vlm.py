"""The vision-language models against transformers: features, positions, logits, gradients, greedy tokens, files."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from smmd_jax.backbones import load_pretrained, save_pretrained
from smmd_jax.backbones.safetensors_files import open_folder
from tests import vlm_references as references
from tests.references import libraries
from train.generate import generate

pytestmark = pytest.mark.parity
ATOL = 1e-4  # measured below 2e-5


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(
    scope="module",
    params=[pytest.param((name, seed), id=f"{name}-{seed}") for name in references.MODELS for seed in (0, 1)],
)
def pair(request, tmp_path_factory):
    """(family, reference, port, folder); made once for all tests of a module."""
    family, seed = request.param
    reference = references.make_reference(family, seed)
    folder = tmp_path_factory.mktemp(f"{family}-{seed}")
    reference.save_pretrained(folder)
    return family, reference, load_pretrained(folder), folder


def reference_logits(family, reference, ids, mask, images):
    torch, _ = libraries()
    inputs = references.as_torch(family, ids, mask, images)
    if family == "mistral3":
        inputs["position_ids"] = references.positions(mask)
    with torch.no_grad():
        return reference(**inputs, use_cache=False).logits.numpy()


def test_features_of_images(pair):
    family, reference, port, _ = pair
    torch, _ = libraries()
    ids, mask, images = references.make_inputs(family, 0)
    inputs = references.as_torch(family, ids, mask, images)
    if family == "mllama":
        names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
        with torch.no_grad():
            states = reference.model.vision_model(**{name: inputs[name] for name in names}).last_hidden_state
            theirs = reference.model.multi_modal_projector(states).numpy()
        ours = np.asarray(port.image_features(port.prepare(ids, mask, images)[1]))
        np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, atol=ATOL, rtol=0)
        return
    with torch.no_grad():
        if family == "mistral3":
            found = reference.model.get_image_features(
                inputs["pixel_values"], image_sizes=inputs["image_sizes"], vision_feature_layer=-1
            )
        else:
            found = reference.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    theirs = torch.cat(list(getattr(found, "pooler_output", found))).numpy()
    packed = port.prepare(ids, mask, images)[1]
    ours = np.asarray(port.image_features(packed))
    ours = np.concatenate([features[order[order >= 0]] for features, order in zip(ours, packed.order, strict=True)])
    np.testing.assert_allclose(ours, theirs, atol=ATOL, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_of_three_axes(pair, side):
    family, reference, port, _ = pair
    if family != "qwen2_5_vl":
        assert port.config.text.rope.sections is None
        return
    ids, mask, images = references.make_inputs(family, 0, side)
    inputs = references.as_torch(family, ids, mask, images)
    theirs, _ = reference.model.get_rope_index(
        inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )  # fmt: skip
    ours = port.prepare(ids, mask, images)[2]
    np.testing.assert_array_equal(np.asarray(ours)[:, mask == 1], theirs.numpy()[:, mask == 1])


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_with_images_and_padding(pair, side):
    family, reference, port, _ = pair
    ids, mask, images = references.make_inputs(family, 1, side)
    theirs = reference_logits(family, reference, ids, mask, images)
    ours = np.asarray(port(ids, attention_mask=mask, images=images))
    np.testing.assert_allclose(ours[mask == 1], theirs[mask == 1], atol=ATOL, rtol=0)


def test_logits_of_text_alone(pair):
    _, reference, port, _ = pair
    torch, _ = libraries()
    ids = np.random.default_rng(0).integers(20, 180, (2, 11))
    with torch.no_grad():
        theirs = reference(input_ids=torch.as_tensor(ids), use_cache=False).logits.numpy()
    np.testing.assert_allclose(port(ids), theirs, atol=ATOL, rtol=0)


def test_greedy_tokens(pair):
    family, reference, port, _ = pair
    torch, transformers = libraries()
    ids, mask, images = references.make_inputs(family, 2)
    config = transformers.GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        theirs = reference.generate(**references.as_torch(family, ids, mask, images), generation_config=config)
    ours = generate(port, ids, attention_mask=mask, max_new_tokens=10, images=images)
    np.testing.assert_array_equal(ours, theirs[:, ids.shape[1] :].numpy())


def test_gradients(pair):
    """The norm of the loss's gradient by every tensor of the tower, the projector and the text."""
    family, reference, port, folder = pair
    torch, _ = libraries()
    ids, mask, images = references.make_inputs(family, 3, "right")
    inputs = references.as_torch(family, ids, mask, images)
    if family == "mistral3":
        inputs["position_ids"] = references.positions(mask)
    reference.zero_grad(set_to_none=True)
    logits = reference(**inputs, use_cache=False).logits[:, :-1]
    # Image tokens are never targets; that of mllama has no column in the head.
    supervised = (mask * (ids != references.IMAGE[family]))[:, 1:]
    targets = ids[:, 1:] * supervised
    theirs = torch.nn.functional.cross_entropy(logits.transpose(1, 2), torch.as_tensor(targets), reduction="none")
    (theirs * torch.as_tensor(supervised.astype(np.float32))).sum().backward()
    graphdef, state = nnx.split(port)
    input_ids, packed, positions = port.prepare(ids, mask, images)

    @jax.jit
    def gradient(parameters):
        def loss(parameters):
            model = nnx.merge(graphdef, parameters)
            logits = model(input_ids, attention_mask=mask, positions=positions, images=packed)[:, :-1]
            return (optax.softmax_cross_entropy_with_integer_labels(logits, targets) * supervised).sum()

        return jax.grad(loss)(parameters)

    ours = nnx.merge(graphdef, gradient(nnx.to_pure_dict(state)))
    save_pretrained(ours, folder / "gradient", source=folder)
    saved = open_folder(folder / "gradient")
    # What a file and the memory of transformers put in front of a name differs.
    bare = lambda name: name.replace("language_model.", "").replace("model.", "")
    named = {bare(name): name for name in saved.tensors}
    for name, parameter in reference.named_parameters():
        found = saved.read(named[bare(name)], (slice(None),))
        np.testing.assert_allclose(
            np.linalg.norm(found), parameter.grad.norm().item(), rtol=1e-3, atol=1e-5, err_msg=name
        )


def test_files_come_back(pair, tmp_path):
    family, reference, port, folder = pair
    save_pretrained(port, tmp_path / "saved", source=folder)
    assert open_folder(tmp_path / "saved").tensors == open_folder(folder).tensors
    again = type(reference).from_pretrained(tmp_path / "saved", attn_implementation="eager")
    references.as_released(again)
    ids, mask, images = references.make_inputs(family, 1)
    theirs = reference_logits(family, reference, ids, mask, images)
    np.testing.assert_allclose(reference_logits(family, again, ids, mask, images), theirs, atol=1e-5, rtol=0)


def test_eight_devices_equal_one(pair):
    family, _, port, folder = pair
    axes = {"data": 2, "fsdp": 2, "tensor": 2}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 3)
    sharded = load_pretrained(folder, mesh=mesh)
    ids, mask, images = references.make_inputs(family, 1)
    ids, packed, positions = port.prepare(ids, mask, images)
    graphdef, state = nnx.split(sharded)
    call = jax.jit(lambda state: nnx.merge(graphdef, state)(
        ids, attention_mask=mask, positions=positions, images=packed))  # fmt: skip
    with jax.set_mesh(mesh):
        ours = np.asarray(call(state))
    wanted = np.asarray(port(ids, attention_mask=mask, positions=positions, images=packed))
    # sums in another order, through five layers of unnormalised random weights
    np.testing.assert_allclose(ours[mask == 1], wanted[mask == 1], atol=5e-5, rtol=0)
