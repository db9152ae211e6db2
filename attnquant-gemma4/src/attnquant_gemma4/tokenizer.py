"""Gemma 4's tokenizer, which refuses images where nothing could encode them."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.gemma4.context import Gemma4Context
from max.pipelines.architectures.gemma4.tokenizer import Gemma4Tokenizer
from max.pipelines.context.exceptions import InputError
from max.pipelines.lib import PipelineConfig
from max.pipelines.modeling.types import TextGenerationRequest

from attnquant.serving.api import CheckedRequestsMixin
from attnquant_gemma4.model_config import serves_images


class AttnQuantGemma4Tokenizer(CheckedRequestsMixin, Gemma4Tokenizer):
    """MAX's Gemma 4 tokenizer; without a vision encoder, requests are text."""

    def __init__(
        self, model_path: str, pipeline_config: PipelineConfig, **options: Any
    ) -> None:
        """Load the tokenizer as MAX does, and note whether images are served."""
        super().__init__(model_path, pipeline_config, **options)
        self._serves_images = serves_images(
            pipeline_config.model.huggingface_config, pipeline_config.model
        )

    async def new_context(self, request: TextGenerationRequest) -> Gemma4Context:
        """Tokenize a request.

        Raises:
            InputError: If it holds images or videos that nothing here can encode; the
                server answers with it.
        """
        if (request.images or request.videos) and not self._serves_images:
            msg = (
                "Images and videos are not supported here: AttnQuant serves them with"
                " MAX's own vision encoder, which runs on a GPU only, in bfloat16, and"
                " needs a checkpoint with a vision tower. Send text."
            )
            raise InputError(msg)
        context: Gemma4Context = await super().new_context(request)
        return context
