"""Prompts with images: what encodes them, and what the decoder makes of the encodings.

MAX's vision graph has no CPU kernels, so here the embeddings that transformers gives
take its place; everything around it, from the image's bytes to the logits, is what a
GPU would run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from max.driver import CPU, Buffer, DeviceSpec
from max.dtype import DType
from max.graph import DeviceRef
from max.graph.weights import load_weights
from max.nn.linear import Linear
from max.pipelines.architectures.gemma4.batch_vision_inputs import (
    VisionRawInputs,
    pack_uncached_images,
)
from max.pipelines.architectures.gemma4.model_config import Gemma4VisionConfig
from max.pipelines.architectures.gemma4.tokenizer import Gemma4Tokenizer
from max.pipelines.architectures.gemma4.vision_model.vision_model import (
    Gemma4VisionModel,
)
from max.pipelines.lib import MAXModelConfig
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec
from max.pipelines.lib.vision_encoder_cache import VisionEncodeResult
from safetensors.numpy import load_file
from transformers import AutoConfig

from attnquant.errors import CheckpointError
from attnquant.serving.arrays import to_array
from attnquant.serving.pipeline_model import AttnQuantPipelineModelMixin
from attnquant.testing.checkpoints import read_checkpoint
from attnquant.testing.in_process import InProcessModel
from attnquant.testing.metrics import compare_logits
from attnquant.testing.parity import GREEDY_STEPS, LIMIT, make_bundle, serving
from attnquant_gemma4.model import AttnQuantGemma4Model
from attnquant_gemma4.model_config import (
    AttnQuantGemma4Config,
    has_vision_tower,
    serves_images,
)
from attnquant_gemma4.plugin import check_vision
from attnquant_gemma4.weight_adapters import vision_weights
from gemma4_support import vision
from gemma4_support.golden import Setting
from gemma4_support.tiny import write_tiny_checkpoint

SHARED: Final = Setting("g4-r4-all", 4, 4)
PROMPTS: Final = {"image": [6], "images": [12, 6]}
CPU_REF: Final = DeviceRef.CPU()
TEXT: Final = [2, 100, 90, 80]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    return vision.write_multimodal_checkpoint(root / "tiny")


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    return make_bundle(checkpoint, SHARED, checkpoint.parent / "bundle")


@pytest.fixture(scope="module")
def recorded() -> dict[str, npt.NDArray[Any]]:
    with np.load(Path(__file__).parent / "golden" / "images.npz") as file:
        return dict(file)


# --- the decoder -----------------------------------------------------------------


@pytest.fixture(scope="module")
def model(
    bundle: Path, recorded: dict[str, npt.NDArray[Any]]
) -> Iterator[InProcessModel]:
    """Serve the bundle, with recorded embeddings in the place of the vision graph.

    The graph is that of text alone: nothing more is compiled.
    """
    alive: list[npt.NDArray[np.float32]] = []
    encoded = {size: recorded[f"features/{size}"] for size in vision.SIZES}

    def pack(self: Any, selection: Any, devices: Any) -> VisionRawInputs | None:
        del self
        return pack_uncached_images(selection, devices, vision.POOL, DType.float32)

    def encode(
        self: Any, selection: Any, devices: Any, packed: VisionRawInputs
    ) -> VisionEncodeResult:
        del self, devices
        sizes = [i.end_idx - i.start_idx for _, images in selection for i in images]
        parts = [vision.patches(size) for size in sizes]
        # What the vision graph would be fed: all patches, one image after the other.
        for found, expected in (
            (packed.patches_flat, [values for values, _ in parts]),
            (packed.pixel_position_ids, [grid for _, grid in parts]),
            (packed.cu_seqlens, [np.cumsum([0, *(len(v) for v, _ in parts)])]),
        ):
            np.testing.assert_allclose(
                found[0].to_numpy(), np.concatenate(expected), rtol=1e-6
            )
        rows = np.concatenate([encoded[size] for size in sizes])
        # MAX copies them on a queue, later; numpy's memory must live as long.
        alive.append(rows)
        return VisionEncodeResult(embeddings=[Buffer.from_numpy(rows).to(CPU())])

    def rows_in_the_cache(_: Any) -> tuple[int, DType]:
        return 96, DType.float32

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttnQuantGemma4Model, "pack_vision_inputs", pack)
        patch.setattr(AttnQuantGemma4Model, "vision_execute", encode)
        # In MAX, bfloat16.
        patch.setattr(
            AttnQuantGemma4Config, "get_vision_cache_row_spec", rows_in_the_cache
        )
        with serving(bundle, "gemm") as served:
            # MAX's own, which does not refuse images on a CPU.
            config = served.pipeline.pipeline_config
            served.tokenizer = Gemma4Tokenizer(str(bundle), config, max_length=1024)
            yield served


def context(
    model: InProcessModel, recorded: dict[str, npt.NDArray[Any]], prompt: str
) -> Any:
    """Return MAX's context of a recorded prompt: messages, and images as bytes."""
    content = json.loads(str(recorded[f"{prompt}/content"]))
    return model.context(
        GREEDY_STEPS,
        messages=[{"role": "user", "content": content}],
        images=[vision.png(size) for size in PROMPTS[prompt]],
    )


def check(name: str, expected: npt.NDArray[Any], found: npt.NDArray[Any]) -> None:
    apart = compare_logits(expected, found)
    print(f"{name}: cosine distance {apart.cosine_distance:.1e}, KL {apart.kl:.1e}")
    assert max(apart) < LIMIT


@pytest.mark.parametrize("prompt", PROMPTS)
def test_images_are_continued_as_by_transformers(
    model: InProcessModel, recorded: dict[str, npt.NDArray[Any]], prompt: str
) -> None:
    asked = context(model, recorded, prompt)
    tokens = recorded[f"{prompt}/tokens"].tolist()
    # Messages with images become the very ids that transformers was fed.
    assert asked.tokens.all.tolist() == tokens
    (found,) = model.run([asked])
    check(prompt, recorded[f"{SHARED.name}/{prompt}/logits"], found.logits[:1])
    assert found.tokens == recorded[f"{SHARED.name}/{prompt}/greedy"].tolist()
    # And images matter: with padding in their place it is another text.
    blind = [0 if token == vision.IMAGE else token for token in tokens]
    (text,) = model.generate([blind])
    assert compare_logits(found.logits[:1], text.logits).kl > 1e3 * LIMIT


def test_images_and_text_in_a_batch_give_what_each_gives_alone(
    model: InProcessModel, recorded: dict[str, npt.NDArray[Any]]
) -> None:
    def contexts() -> list[Any]:
        return [
            context(model, recorded, "images"),
            model.context(GREEDY_STEPS, prompt=TEXT),
            context(model, recorded, "image"),
        ]

    alone = [model.run([one])[0] for one in contexts()]
    for one, batched in zip(alone, model.run(contexts()), strict=True):
        assert one.tokens == batched.tokens
        check("in a batch", one.logits, batched.logits)


def test_a_batch_is_one_of_text_until_images_are_put_in(
    model: InProcessModel,
) -> None:
    batch = [[model.context(1, prompt=TEXT)]]
    inner = model.pipeline._pipeline_model
    inputs = inner.prepare_initial_token_inputs(batch, kv_cache_inputs=())
    assert [tuple(rows.shape) for rows in inputs.vision_embeddings] == [(0, 96)]
    assert [tuple(where.shape) for where in inputs.vision_scatter_indices] == [(0,)]


# --- the vision graph's weights --------------------------------------------------


@pytest.mark.parametrize("bundled", [False, True])
def test_the_vision_graph_gets_the_towers_tensors_untouched(
    checkpoint: Path, bundle: Path, *, bundled: bool
) -> None:
    path = bundle if bundled else checkpoint
    weights = vision_weights(
        load_weights(sorted(path.glob("*.safetensors"))), DType.float32
    )
    graph = vision_graph(checkpoint)
    assert weights.keys() == graph.raw_state_dict().keys()
    graph.load_state_dict(weights, weight_alignment=1, strict=True)
    original = load_file(checkpoint / "model.safetensors")
    for name, weight in weights.items():
        linear = name.removesuffix(".weight") + ".linear.weight"
        source = next(
            f"model.{prefix}{candidate}"
            for prefix in ("vision_tower.", "")
            for candidate in (name, linear)
            if f"model.{prefix}{candidate}" in original
        )
        np.testing.assert_array_equal(to_array(weight), original[source])
    towers = [n for n in original if "vision_tower" in n or "embed_vision" in n]
    assert len(weights) == len(towers)


def vision_graph(checkpoint: Path) -> Gemma4VisionModel:
    """Return MAX's module for a tower, which this much can be done with on a CPU."""
    return Gemma4VisionModel(graph_config(checkpoint), CPU_REF)


def graph_config(checkpoint: Path) -> Any:
    config = AutoConfig.from_pretrained(checkpoint)
    found: Any = type("Config", (), {})()
    found.devices = [CPU_REF]
    found.unquantized_dtype = DType.float32
    found.text_config = config.text_config
    found.vision_config = Gemma4VisionConfig.initialize_from_config(
        config.vision_config
    )
    return found


def test_a_tower_without_one_of_its_tensors_is_refused(checkpoint: Path) -> None:
    weights = vision_weights(
        load_weights([checkpoint / "model.safetensors"]), DType.float32
    )
    del weights["encoder.layers.1.self_attn.k_norm.weight"]
    # As far as MAX has come when it makes the graph, and no compiled model.
    model = object.__new__(AttnQuantGemma4Model)
    model.devices = [CPU()]
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.self_attn\.k_norm"
    ) as refused:
        model._vision_spec(graph_config(checkpoint), weights)
    assert refused.value.subject == "the vision tower"
    assert "set vision_config to null" in str(refused.value)


@pytest.mark.parametrize("with_images", [False, True])
def test_the_vision_graph_is_compiled_beside_the_decoder(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, with_images: bool
) -> None:
    def decoder_alone(*_: object) -> dict[str, GraphSpec]:
        return {
            GraphRole.DECODER: GraphSpec(Linear(1, 1, DType.float32, CPU_REF), "d", [])
        }

    monkeypatch.setattr(AttnQuantPipelineModelMixin, "graph_specs", decoder_alone)
    model = object.__new__(AttnQuantGemma4Model)
    model.devices = [CPU()]
    model._vision_weights_dict = vision_weights(
        load_weights([checkpoint / "model.safetensors"]), DType.float32
    )
    config = graph_config(checkpoint)
    if not with_images:
        config.vision_config = None
    specs = model.graph_specs(config)
    if not with_images:
        assert specs.keys() == {GraphRole.DECODER}
        return
    assert specs.keys() == {GraphRole.DECODER, GraphRole.VISION}
    assert specs[GraphRole.DECODER].group == specs[GraphRole.VISION].group is not None
    assert isinstance(specs[GraphRole.VISION].module, Gemma4VisionModel)


def test_a_bundle_keeps_what_prepares_images(checkpoint: Path, bundle: Path) -> None:
    name = "processor_config.json"
    assert (bundle / name).read_bytes() == (checkpoint / name).read_bytes()
    for path in (checkpoint, bundle):
        assert read_checkpoint(path)[1]["vision_config"] == vision.VISION_CONFIG


# --- where images are served -----------------------------------------------------


@pytest.mark.parametrize(
    ("device", "encoding", "served"),
    [
        ("gpu", None, True),
        ("gpu", "bfloat16", True),
        # MAX's cache of encoded images holds bfloat16.
        ("gpu", "float32", False),
        ("cpu", "float32", False),
    ],
)
def test_images_are_served_on_gpus_in_bfloat16(
    tmp_path: Path, device: str, encoding: Any, *, served: bool
) -> None:
    path = vision.write_multimodal_checkpoint(tmp_path / "tiny", dtype="bfloat16")
    config = MAXModelConfig(
        model_path=str(path),
        device_specs=[DeviceSpec(0, device)],
        quantization_encoding=encoding,
    )
    assert serves_images(config.huggingface_config, config) == served


def test_only_a_tower_that_max_has_the_graph_of_counts(
    checkpoint: Path, tmp_path: Path
) -> None:
    text = AutoConfig.from_pretrained(write_tiny_checkpoint(tmp_path / "text"))
    both = AutoConfig.from_pretrained(checkpoint)
    assert not has_vision_tower(text)
    assert has_vision_tower(both)
    # The unified line has a vision config too, of an encoder that MAX does not have.
    both.model_type = "gemma4_unified"
    assert not has_vision_tower(both)


@pytest.mark.parametrize("field", ["use_clipped_linears", "attention_bias"])
def test_a_tower_that_max_does_not_compute_is_refused(field: str) -> None:
    check_vision(vision.VISION_CONFIG)
    with pytest.raises(CheckpointError, match=f"vision_config.{field}") as refused:
        check_vision(vision.VISION_CONFIG | {field: True})
    assert refused.value.found == "True"
