"""The serving part: compiled models against the package's reference, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from attnquant.settings import FORMULATIONS
from attnquant.testing.checkpoints import read_checkpoint
from attnquant.testing.conformance.model import ConformanceModel, Weights, part
from attnquant.testing.in_process import Generated, InProcessModel
from attnquant.testing.metrics import compare_logits
from attnquant.testing.parity import LIMIT, serving
from attnquant.theta.bundle import open_bundle
from attnquant.theta.names import base_name, projection_name

STEPS = 8
"""Tokens generated after each prompt."""


@part("serving")
class ServingConformance(ConformanceModel):
    """Every formulation below passthrough, and dense, which costs no graph, at it."""

    passthrough_formulations: ClassVar[Sequence[str]] = ("dense",)
    """Those served at passthrough; the others' graphs differ there, and each graph
    takes minutes to compile. ``--attnquant-all-graphs`` serves all."""

    @pytest.fixture(scope="class", params=FORMULATIONS)
    @classmethod
    def served(
        cls, request: pytest.FixtureRequest, bundle: Path
    ) -> Iterator[InProcessModel]:
        """The bundle in one formulation after the other."""
        with serving(bundle, request.param) as model:
            yield model

    @pytest.fixture(scope="class")
    @classmethod
    def effective(cls, bundle: Path) -> Weights:
        """The checkpoint's tensors with each tied projection as the bundle has it."""
        return cls().effective_weights(bundle)

    @pytest.fixture(scope="class")
    @classmethod
    def agreed(cls) -> list[npt.NDArray[Any]]:
        """Logits that formulations served so far gave, for the next to agree with."""
        return []

    def test_every_step_equals_the_reference(
        self, served: InProcessModel, effective: Weights
    ) -> None:
        """Logits after each prompt and each generated token are the reference's."""
        for prompt in self.prompts():
            (found,) = served.generate([prompt], STEPS)
            self._assert_reference(effective, prompt, found)

    def test_a_batch_gives_what_each_prompt_gives_alone(
        self, served: InProcessModel
    ) -> None:
        """Prompts of different lengths in one batch do not change one another."""
        prompts = self.prompts()
        together = served.generate(prompts, STEPS)
        for prompt, batched in zip(prompts, together, strict=True):
            (alone,) = served.generate([prompt], STEPS)
            assert max(compare_logits(alone.logits, batched.logits)) < LIMIT
            assert alone.tokens == batched.tokens, f"{len(prompt)} tokens"

    def test_formulations_agree(
        self, served: InProcessModel, agreed: list[npt.NDArray[Any]]
    ) -> None:
        """However a projection is computed, the logits are the same."""
        (found,) = served.generate([max(self.prompts(), key=len)], STEPS)
        for other in agreed:
            assert max(compare_logits(other, found.logits)) < LIMIT
        agreed.append(found.logits)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Choose the formulations that are served at passthrough."""
        if "formulation" in metafunc.fixturenames:
            every = metafunc.config.getoption("--attnquant-all-graphs")
            chosen = FORMULATIONS if every else self.passthrough_formulations
            metafunc.parametrize("formulation", chosen)

    def test_passthrough_is_the_original(
        self, checkpoint: Path, formulation: str
    ) -> None:
        """Without any setting, a raw checkpoint is served as the reference has it."""
        weights, _ = read_checkpoint(checkpoint)
        with serving(checkpoint, formulation) as model:
            for prompt in self.prompts():
                (found,) = model.generate([prompt], STEPS)
                self._assert_reference(weights, prompt, found)

    def effective_weights(self, bundle: Path) -> Weights:
        """Return a checkpoint's tensors with projections rebuilt from a bundle.

        The formula stands here once more, in float64 and by the names of tensors alone:
        what serves must not be what is compared with.
        """
        weights = self.weights()
        sources = self.supplied().prefix_map(self.config).rename(weights)
        tensors, _ = read_checkpoint(bundle)
        wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        for base, layers in open_bundle(bundle).info.layout.bases.items():
            for layer in layers:
                matrix = wide[base_name(*base)]
                factor = f"layers.{layer}.{base.family}"
                if f"{factor}.U" in wide:
                    u, s, v = (wide[f"{factor}.{x}"] for x in "UsV")
                    matrix = matrix + (u * s) @ v
                weights[sources[projection_name(layer, base.family)]] = matrix
        return weights

    def _assert_reference(
        self, weights: Weights, prompt: Sequence[int], found: Generated
    ) -> None:
        tokens = [*prompt, *found.tokens[:-1]]
        expected = self.reference(weights, tokens)[len(prompt) - 1 :]
        apart = compare_logits(expected, found.logits)
        print(f"{len(prompt)} tokens: {apart.cosine_distance:.1e}, KL {apart.kl:.1e}")
        assert max(apart) < LIMIT, f"{len(prompt)} tokens"
