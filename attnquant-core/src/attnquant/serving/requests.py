"""Requests that would end the server are refused instead, with a message.

MAX 26.7 hands every request that it can parse to its worker. What the worker cannot
run ends it, and with it the server and everybody's requests. MAX answers an
`InputError` of a tokenizer with status 400 and its message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from max.pipelines.context.exceptions import InputError
from max.pipelines.lib import TextTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from max.pipelines.context.sampling_params import SamplingParams
    from max.pipelines.modeling.types import TextGenerationRequest

_INTEGERS = range(-(2**63), 2**64)
"""What MAX's queue between server and worker carries."""


class CheckedRequestsMixin:
    """Mixed in before one of MAX's tokenizers, which see each request first."""

    def __init__(self, model_path: str, pipeline_config: Any, **options: Any) -> None:
        """Load the tokenizer as MAX does, and note what the model can take."""
        # The MAX tokenizer that this is mixed into takes the same arguments.
        host: Any = super()
        host.__init__(model_path, pipeline_config, **options)
        self._vocabulary = vocabulary_size(pipeline_config.model.huggingface_config)
        self._returns_prompt_logits = bool(pipeline_config.model.enable_echo)

    async def new_context(self, request: TextGenerationRequest) -> Any:
        """Tokenize a request.

        Raises:
            InputError: If the model cannot run it; the server answers with it.
        """
        if request.echo and request.logprobs and not self._returns_prompt_logits:
            raise InputError(
                "Log-probabilities of the prompt (echo with logprobs) need a server"
                " that was started with --enable-echo."
            )
        check_sampling(request.sampling_params, self._vocabulary)
        if request.prompt is not None and not isinstance(request.prompt, str):
            check_tokens(request.prompt, self._vocabulary)
        host: Any = super()
        context = await host.new_context(request)
        check_tokens(context.tokens.all.tolist(), self._vocabulary)
        return context


class CheckedTextTokenizer(CheckedRequestsMixin, TextTokenizer):
    """MAX's tokenizer of text, with checked requests."""


def vocabulary_size(huggingface_config: Any) -> int:
    """Return how many tokens have an embedding.

    A tokenizer may know more: Gemma 3's has a place for images that its models of text
    have no embedding for.
    """
    config = getattr(huggingface_config, "text_config", None) or huggingface_config
    return int(config.vocab_size)


def check_tokens(tokens: Iterable[int], vocabulary: int) -> None:
    """Check that each token has an embedding.

    Raises:
        InputError: Naming the first that has none.
    """
    for place, token in enumerate(tokens):
        if not 0 <= token < vocabulary:
            raise InputError(
                f"The prompt's token {place} is {token}, and this model's tokens are 0"
                f" to {vocabulary - 1}."
            )


def check_sampling(params: SamplingParams, vocabulary: int) -> None:
    """Check what MAX's sampler would end the worker by, or its queue cannot carry.

    Raises:
        InputError: Naming the field and what it may be.
    """
    if params.top_k > vocabulary:
        raise InputError(
            f"top_k is {params.top_k}, and there are {vocabulary} tokens to choose from"
            " (-1 is all of them)."
        )
    for name, value in (
        ("seed", params.seed),
        ("max_tokens", params.max_new_tokens or 0),
        ("min_tokens", params.min_new_tokens),
    ):
        if value not in _INTEGERS:
            raise InputError(f"{name} is {value}, which 64 bits do not hold.")
