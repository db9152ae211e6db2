"""The kit itself: what it compares with is right, and what is wrong does not pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnquant.testing.conformance.model import ConformanceModel, Setting, part
from attnquant.testing.conformance.serving import ServingConformance
from attnquant.testing.conformance.structural import copy_checkpoint
from attnquant.testing.in_process import Generated
from attnquant.testing.parity import make_bundle
from attnquant.theta import reconstruct
from attnquant.theta.bundle import open_bundle
from core_support.processes import environment, python

FAMILIES = {
    "self_attn.q_proj": (16, 12),
    "self_attn.k_proj": (8, 12),
    "self_attn.v_proj": (8, 12),
    "self_attn.o_proj": (12, 16),
    "mlp.gate_proj": (20, 12),
    "mlp.up_proj": (20, 12),
    "mlp.down_proj": (12, 20),
}


class Tiny(ServingConformance):
    """A model whose logits depend on nothing but its last projection."""

    architecture = "TinyForCausalLM"
    setting = Setting(2, 3)
    config = {  # noqa: RUF012
        "architectures": ["TinyForCausalLM"],
        "num_hidden_layers": 4,
        "vocab_size": 320,
        "max_position_embeddings": 64,
    }

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (320, 12)}
        for layer in range(4):
            for name, shape in FAMILIES.items():
                shapes[f"model.layers.{layer}.{name}.weight"] = shape
        return shapes

    def reference(self, weights: Mapping[str, Any], tokens: Sequence[int]) -> Any:
        embedding = weights["model.embed_tokens.weight"].astype(np.float64)
        down = weights["model.layers.3.mlp.down_proj.weight"].astype(np.float64)
        return embedding[list(tokens)] @ down @ down.T @ embedding.T


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_plugin: Path) -> Path:
    assert tiny_plugin.is_dir()
    return Tiny().write_checkpoint(tmp_path / "checkpoint")


def test_effective_weights_are_those_of_the_bundle_under_the_checkpoints_names(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = make_bundle(checkpoint, Tiny.setting, tmp_path / "bundle")
    found, original = Tiny().effective_weights(path), Tiny().weights()
    assert found.keys() == original.keys()
    bundle = open_bundle(path)
    rebuilt = reconstruct(bundle.checkpoint.tensors, bundle.info.layout)
    assert len(rebuilt) == 4 * len(FAMILIES)
    for name, expected in rebuilt.items():
        effective = found[f"model.{name}"]
        np.testing.assert_allclose(effective, expected, rtol=0, atol=1e-5)
        assert np.abs(effective - original[f"model.{name}"]).max() > 1e-3


@pytest.mark.usefixtures("tiny_plugin")
@pytest.mark.parametrize("change", [0.0, 0.05])
def test_logits_that_are_not_the_references_do_not_pass(change: float) -> None:
    tiny = Tiny()
    weights = tiny.weights()
    prompt = tiny.prompts()[0]
    generated = [7, 8, 9]
    logits = tiny.reference(weights, [*prompt, *generated[:-1]])[len(prompt) - 1 :]
    logits = logits.astype(np.float32)
    # Of one step after the prompt only, and of one token.
    logits[1, 5] += np.float32(change) * np.abs(logits).max()
    found = Generated(generated, logits)
    if change:
        with pytest.raises(AssertionError):
            tiny._assert_reference(weights, prompt, found)
    else:
        tiny._assert_reference(weights, prompt, found)


@pytest.mark.usefixtures("tiny_plugin")
def test_prompts_are_as_long_as_said_and_hold_no_special_token() -> None:
    prompts = Tiny().prompts()
    assert [len(prompt) for prompt in prompts] == list(Tiny.prompt_lengths)
    assert max(map(len, prompts)) > 2 * 128
    assert min(map(min, prompts)) >= len(Tiny.special_tokens)
    assert max(map(max, prompts)) < 320


def test_a_copy_changes_what_was_asked_for_and_nothing_else(
    checkpoint: Path, tmp_path: Path
) -> None:
    name = "model.embed_tokens.weight"
    copy = copy_checkpoint(checkpoint, tmp_path / "copy", {name: lambda _: None}, x=1)
    assert (checkpoint / "tokenizer.json").read_bytes() == (
        copy / "tokenizer.json"
    ).read_bytes()
    assert '"x": 1' in (copy / "config.json").read_text()
    assert '"x"' not in (checkpoint / "config.json").read_text()


def test_each_test_belongs_to_the_part_of_its_own_class() -> None:
    @part("structural")
    class First(ConformanceModel):
        def test_a(self) -> None: ...

    @part("serving")
    class Second(First):
        def test_b(self) -> None: ...

    marks = [
        [mark.args for mark in test.pytestmark]  # type: ignore[attr-defined]
        for test in (Second.test_a, Second.test_b)
    ]
    assert marks == [[("structural",)], [("serving",)]]


# --- the pytest plugin ---------------------------------------------------------------

TESTS = """
import pytest

class TestX:
    @classmethod
    def plugin_name(cls):
        return "x"

    @pytest.mark.attnquant("structural")
    def test_a(self): ...

    @pytest.mark.attnquant("hooks")
    def test_b(self): ...

def test_c(): ...
"""


@pytest.mark.parametrize(
    ("options", "ran"),
    [
        ([], "3 passed"),
        (["--attnquant-parts", "structural"], "2 passed, 1 deselected"),
        (["--attnquant-plugin", "x"], "2 passed, 1 deselected"),
        (["--attnquant-plugin", "y"], "3 deselected"),
        (
            ["--attnquant-plugin", "x", "--attnquant-parts", "hooks"],
            "1 passed, 2 deselected",
        ),
        (
            ["--attnquant-parts", "all"],
            "expected structural, hooks, serving, found 'all'",
        ),
    ],
)
def test_options_choose_parts_and_plugins(
    tmp_path: Path, options: list[str], ran: str
) -> None:
    (tmp_path / "test_x.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = python(
        code, "-q", "-p", "no:cacheprovider", tmp_path, *options, env=environment()
    )
    assert ran in done.stdout + done.stderr


APPLICABLE = """
from attnquant.testing.conformance.model import ConformanceModel, applies_where, part

@part("hooks")
class Kit(ConformanceModel):
    @applies_where(lambda model: model.decoder_config.get("sliding_window"))
    def test_a_window(self): ...

class TestPlain(Kit):
    config = {}

class TestSliding(Kit):
    config = {"sliding_window": 128}
"""


def test_what_a_model_has_no_use_for_is_not_collected(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(APPLICABLE)
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = python(code, "-v", "-p", "no:cacheprovider", tmp_path, env=environment())
    assert "TestSliding::test_a_window PASSED" in done.stdout
    assert "1 passed, 1 deselected" in done.stdout
