"""The tokenizer makes what a batch is made of, and refuses images on a CPU."""

from __future__ import annotations

import asyncio

import pytest
from max.pipelines.architectures.gemma4.context import Gemma4Context
from max.pipelines.context.exceptions import InputError
from max.pipelines.context.sampling_params import SamplingParams
from max.pipelines.lib import PipelineConfig
from max.pipelines.lib.config import PipelineArgs
from max.pipelines.modeling.types import TextGenerationRequest
from max.pipelines.request.base import RequestID

from attnquant_gemma4.tokenizer import AttnQuantGemma4Tokenizer
from gemma4_support.tiny import BOS, write_tiny_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> AttnQuantGemma4Tokenizer:
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("tokenizer") / "tiny")
    config = PipelineConfig.from_args(
        PipelineArgs.from_flat_kwargs(
            model_path=str(path),
            device_specs="cpu",
            quantization_encoding="float32",
            custom_architectures=["attnquant"],
        )
    )
    return AttnQuantGemma4Tokenizer(str(path), config, max_length=256)


def request(**fields: object) -> TextGenerationRequest:
    return TextGenerationRequest(
        request_id=RequestID("a"),
        model_name="tiny",
        sampling_params=SamplingParams(max_new_tokens=5),
        **fields,
    )


def test_a_prompt_becomes_a_context_without_images(
    tokenizer: AttnQuantGemma4Tokenizer,
) -> None:
    context = asyncio.run(tokenizer.new_context(request(prompt="The capital")))
    assert type(context) is Gemma4Context
    assert not context.images
    tokens = context.tokens.all.tolist()
    assert tokens == tokenizer.delegate.encode("The capital")
    assert tokens[0] == BOS
    assert context.max_length == len(tokens) + 5
    assert context.request_id == RequestID("a")


def test_an_image_is_refused_with_what_to_do_instead(
    tokenizer: AttnQuantGemma4Tokenizer,
) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": "image"}]
    asked = request(messages=[{"role": "user", "content": content}], images=[b"x"])
    with pytest.raises(InputError, match="runs on a GPU only"):
        asyncio.run(tokenizer.new_context(asked))


def test_a_chat_is_rendered_with_gemmas_turns(
    tokenizer: AttnQuantGemma4Tokenizer,
) -> None:
    asked = request(messages=[{"role": "user", "content": "Hello"}])
    context = asyncio.run(tokenizer.new_context(asked))
    text = tokenizer.delegate.decode(context.tokens.all)
    assert text == "<bos><|turn>user\nHello<turn|>\n<|turn>model\n"
