"""A checkpoint or bundle served by MAX in this process, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

PREFIX = "ATTNQUANT_"


class Generated(NamedTuple):
    """What one prompt gave.

    Attributes:
        tokens: Greedy continuation.
        logits: ``[steps, vocabulary]`` in float32; the first row follows the prompt.
    """

    tokens: list[int]
    logits: npt.NDArray[np.float32]


class InProcessModel:
    """MAX's in-process model on one CPU, greedy, with every step's logits."""

    def __init__(
        self,
        path: Path,
        *,
        environ: Mapping[str, str] | None = None,
        max_batch_size: int = 8,
        max_length: int | None = None,
    ) -> None:
        """Compile and load, with only these ``ATTNQUANT_`` variables set.

        Args:
            path: A checkpoint or bundle.
            environ: ``ATTNQUANT_`` variables.
            max_batch_size: The most prompts at once.
            max_length: The longest sequence; by default what the config allows.
        """
        from max.pipelines.lib.auto_model import AutoModel

        overrides: dict[str, Any] = (
            {} if max_length is None else {"max_length": max_length}
        )
        with attnquant_environment(environ or {}):
            self._model: Any = AutoModel(
                str(path),
                max_batch_size=max_batch_size,
                devices="cpu",
                custom_architectures=["attnquant"],
                quantization_encoding="float32",
                **overrides,
            )

    def generate(
        self, prompts: Sequence[Sequence[int]], steps: int = 1
    ) -> list[Generated]:
        """Continue prompts (token ids), all of them in one batch."""
        result = self._model.generate(
            [list(prompt) for prompt in prompts],
            max_new_tokens=steps,
            ignore_eos=True,
            # Greedy, whatever the checkpoint asks for in generation_config.json.
            temperature=0.0,
            output_logits=True,
        )
        return [
            Generated(
                [int(token) for token in sequence[len(prompt) :]], np.asarray(logits)
            )
            for prompt, sequence, logits in zip(
                prompts, result.sequences, result.logits, strict=True
            )
        ]

    def close(self) -> None:
        """Let go of the model's memory."""
        self._model.close()


@contextmanager
def attnquant_environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Set ``ATTNQUANT_`` variables to these and no others, for a while."""
    saved = {name: os.environ.pop(name) for name in list(os.environ) if _ours(name)}
    os.environ.update(environ)
    try:
        yield
    finally:
        for name in environ:
            os.environ.pop(name, None)
        os.environ.update(saved)


def _ours(name: str) -> bool:
    return name.startswith(PREFIX)
