"""What a package says of its model, and the tiny checkpoint made of it."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from attnquant.plugins import Supplied, installed_plugins
from attnquant.testing.random_tensors import random_weights
from attnquant.testing.tokenizer import (
    BOS,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    write_json,
    write_tokenizer,
)
from attnquant.theta.decompose import projection_shapes

Array = npt.NDArray[Any]
Weights = dict[str, Array]


_Class = TypeVar("_Class", bound=type)


def part(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that marks each test of a class as of a part of the kit.

    One by one, since a mark of the class would be one of whatever inherits from it.
    """

    def mark(cls: _Class) -> _Class:
        for attribute, value in list(vars(cls).items()):
            if attribute.startswith("test_"):
                setattr(cls, attribute, pytest.mark.attnquant(name)(value))
        return cls

    return mark


def applies_where(
    predicate: Callable[[ConformanceModel], bool],
) -> pytest.MarkDecorator:
    """Return a decorator for a test that only some models can be put to.

    Args:
        predicate: Says it of a model. Where it is false the test is not collected.
    """
    return pytest.mark.attnquant_applies.with_args(predicate)


@dataclass(frozen=True)
class Setting:
    """A decomposition; passthrough has no shared blocks."""

    shared_blocks: int | None = None
    rank: int = 0
    families: Literal["all", "attn"] = "all"


class ConformanceModel:
    """A model in miniature. Subclasses set two attributes and write two methods.

    No dimension of the tiny config should equal another, no norm be neutral and no
    field have the default that a forgetful implementation would assume: then a swapped
    dimension or a forgotten term shows in the logits.
    """

    architecture: ClassVar[str]
    """As in the ``architectures`` of `config.json`."""

    config: ClassVar[Mapping[str, Any]]
    """A whole `config.json`. On CPUs a sliding window must be at least 128 wide."""

    setting: ClassVar[Setting] = Setting(2, 4)
    """The decomposition that is served: with G below L, and r below full rank."""

    special_tokens: ClassVar[Sequence[str]] = SPECIAL_TOKENS
    """The tokenizer's, from id 0."""

    norm_mean: ClassVar[float] = 1.0
    """About what random norms are scattered; 0 where the gain minus one is stored."""

    prompt_lengths: ClassVar[Sequence[int]] = (7, 1, 40, 170, 300)
    """Tokens of the prompts: some longer than any sliding window, and of two."""

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each tensor of a checkpoint, under its own names."""
        raise NotImplementedError

    def reference(self, weights: Mapping[str, Array], tokens: Sequence[int]) -> Array:
        """Return float64 logits ``[tokens, vocabulary]``: the independent oracle.

        Args:
            weights: The checkpoint's tensors, under its own names. Projections may
                have been replaced by their ``W_eff``.
            tokens: One sequence.
        """
        raise NotImplementedError

    def weights(self) -> Weights:
        """Return the tiny checkpoint's tensors; by default random ones in float32."""
        prefix_map = self.supplied().prefix_map(self.config)
        return random_weights(
            self.tensor_shapes(), prefix_map, norm_mean=self.norm_mean
        )

    def write_checkpoint(self, directory: Path) -> Path:
        """Write the tiny checkpoint in Hugging Face layout, with a tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.weights(), directory / "model.safetensors", {"format": "pt"})
        write_json(directory / "config.json", dict(self.config))
        write_json(
            directory / "generation_config.json",
            {
                "bos_token_id": BOS,
                "do_sample": False,
                "eos_token_id": EOS,
                "pad_token_id": PAD,
            },
        )
        write_tokenizer(
            directory,
            vocab_size=self.decoder_config["vocab_size"],
            special_tokens=self.special_tokens,
            max_length=self.decoder_config["max_position_embeddings"],
        )
        return directory

    # --- what follows from it -----------------------------------------------------

    @property
    def decoder_config(self) -> Mapping[str, Any]:
        """The decoder's part of the config."""
        part: Mapping[str, Any] = self.config.get("text_config") or self.config
        return part

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.decoder_config["num_hidden_layers"])

    @classmethod
    def supplied(cls) -> Supplied:
        """Return the plugin of the architecture; if there is none, it says why."""
        return installed_plugins().find(cls.architecture)

    @classmethod
    def plugin_name(cls) -> str | None:
        """Return the plugin's name; None if it is not loaded."""
        found = installed_plugins().supplied.get(cls.architecture)
        return found.plugin.name if found else None

    def prompts(self) -> list[list[int]]:
        """Return random prompts of `prompt_lengths` tokens, none of them special."""
        first = len(self.special_tokens)
        count = int(self.decoder_config["vocab_size"]) - first
        return [
            [
                int(word % count) + first
                for word in np.random.PCG64(length).random_raw(length)
            ]
            for length in self.prompt_lengths
        ]

    def canonical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by its canonical name."""
        weights = self.weights()
        renamed = self.supplied().prefix_map(self.config).rename(weights)
        return {name: weights[source].shape for name, source in renamed.items()}

    def projection_shapes(self) -> dict[Any, tuple[int, ...]]:
        """Return the shape of each projection by layer and family."""
        shaped = {
            name: np.broadcast_to(np.float32(0), shape)
            for name, shape in self.canonical_shapes().items()
        }
        return projection_shapes(shaped)

    @classmethod
    def project(cls) -> Path:
        """Return the folder of the package's `pyproject.toml`.

        It is looked for upwards from the file of the test.
        """
        file = Path(inspect.getfile(cls)).resolve()
        distribution = cls.supplied().plugin.distribution
        for folder in file.parents:
            pyproject = folder / "pyproject.toml"
            if pyproject.is_file():
                project = tomllib.loads(pyproject.read_text("utf-8")).get("project", {})
                if project.get("name") == distribution:
                    return folder
        pytest.fail(f"no pyproject.toml of {distribution} above {file}")

    # --- fixtures -----------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The tiny checkpoint, which tests do not change."""
        return cls().write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")

    @pytest.fixture(scope="class")
    @classmethod
    def bundle(cls, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A bundle of it under `setting`, in float32."""
        from attnquant.testing.parity import make_bundle

        return make_bundle(
            checkpoint, cls.setting, tmp_path_factory.mktemp("tiny") / "bundle"
        )
