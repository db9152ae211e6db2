"""A checkpoint or bundle served by MAX in this process, for tests."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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


# What makes runs comparable: each step by itself, each prompt in one piece.
_PLAIN: dict[str, Any] = {
    "device_graph_capture": False,
    "enable_overlap_scheduler": False,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
}


class InProcessModel:
    """MAX's pipeline in this process on one CPU, greedy, with every step's logits.

    MAX's `AutoModel` would do for text; architectures whose requests may hold images
    need contexts that their own tokenizer makes.

    Attributes:
        tokenizer: MAX's, as the architecture has it.
        pipeline: MAX's, which runs contexts that the tokenizer makes.
    """

    def __init__(
        self,
        path: Path,
        *,
        environ: Mapping[str, str] | None = None,
        max_batch_size: int = 8,
        max_length: int | None = None,
        devices: str = "cpu",
        encoding: str = "float32",
    ) -> None:
        """Compile and load, with only these ``ATTNQUANT_`` variables set.

        Args:
            path: A checkpoint or bundle.
            environ: ``ATTNQUANT_`` variables.
            max_batch_size: The most prompts at once.
            max_length: The longest sequence; by default what the config allows.
            devices: Where to run, as MAX's ``--devices`` has it.
            encoding: MAX's name of the dtype to compute in.
        """
        from max.pipelines.lib import PIPELINE_REGISTRY, PipelineConfig
        from max.pipelines.lib.config import PipelineArgs

        arguments: dict[str, Any] = {
            **_PLAIN,
            "max_batch_size": max_batch_size,
            "device_specs": devices,
            "custom_architectures": ["attnquant"],
            "quantization_encoding": encoding,
        }
        if max_length is not None:
            arguments["max_length"] = max_length
        # What an earlier one left in reference cycles counts as memory in use.
        gc.collect()
        with attnquant_environment(environ or {}):
            config = PipelineConfig.from_args(
                PipelineArgs.from_flat_kwargs(model_path=str(path), **arguments)
            )
            self.tokenizer: Any
            self.pipeline: Any
            self.tokenizer, self.pipeline = PIPELINE_REGISTRY.retrieve(config)

    def generate(
        self, prompts: Sequence[Sequence[int]], steps: int = 1
    ) -> list[Generated]:
        """Continue prompts (token ids), all of them in one batch."""
        return self.run(
            [self.context(steps, prompt=list(prompt)) for prompt in prompts]
        )

    def context(self, steps: int, **request: Any) -> Any:
        """Return MAX's context of a request that asks for `steps` greedy tokens.

        Args:
            steps: How many tokens, whatever they are.
            request: Fields of MAX's `TextGenerationRequest`: a prompt or messages.
        """
        from max.pipelines.context.sampling_params import SamplingParams
        from max.pipelines.modeling.types import TextGenerationRequest
        from max.pipelines.request.base import RequestID

        asked = TextGenerationRequest(
            request_id=RequestID(),
            model_name="in-process",
            # Greedy, whatever the checkpoint asks for in generation_config.json.
            sampling_params=SamplingParams(
                max_new_tokens=steps, ignore_eos=True, temperature=0.0
            ),
            **request,
        )
        return asyncio.run(self.tokenizer.new_context(asked))

    def run(self, contexts: Sequence[Any]) -> list[Generated]:
        """Run contexts to their ends, all of them in one batch."""
        from max.pipelines.lib.generate import GenerateIterator

        rows: list[list[npt.NDArray[np.float32]]] = []
        for context in contexts:
            rows.append([])
            context.sampling_params = replace(
                context.sampling_params, logits_processors=[_recorder(rows[-1])]
            )
        with GenerateIterator.from_contexts(self.pipeline, contexts) as batch:
            while not batch.done:
                batch.step()
            sequences = batch.sequences
        return [
            Generated(sequence[-len(logits) :], np.stack(logits))
            for sequence, logits in zip(sequences, rows, strict=True)
        ]

    def close(self) -> None:
        """Let go of the model's memory."""
        self.pipeline = None
        gc.collect()


def _recorder(rows: list[npt.NDArray[np.float32]]) -> Callable[[Any], None]:
    def record(inputs: Any) -> None:
        # The last row is what the next token is sampled from; MAX uses the buffer
        # again.
        rows.append(np.array(inputs.logits[-1, :].to_numpy(), dtype=np.float32))

    return record


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
