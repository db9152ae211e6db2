"""Gemma 4's tokenizer for text alone."""

from __future__ import annotations

from dataclasses import fields

from max.pipelines.architectures.gemma4.tokenizer import Gemma4Tokenizer
from max.pipelines.context import TextContext
from max.pipelines.context.exceptions import InputError
from max.pipelines.modeling.types import TextGenerationRequest


class AttnQuantGemma4Tokenizer(Gemma4Tokenizer):
    """MAX's Gemma 4 tokenizer, whose requests are text or are refused."""

    async def new_context(  # type: ignore[override]
        self, request: TextGenerationRequest
    ) -> TextContext:
        """Tokenize a request.

        Raises:
            InputError: If it holds images or videos; the server answers with it.
        """
        if request.images or request.videos:
            msg = (
                "This model is served by AttnQuant, which serves Gemma 4's text only:"
                " images and videos are not supported. Send text, or serve the"
                " original checkpoint without --custom-architectures attnquant."
            )
            raise InputError(msg)
        context = await super().new_context(request)
        # Without the fields for images, which the pipeline would look for an image
        # encoder for.
        return TextContext(
            **{
                field.name: getattr(context, field.name)
                for field in fields(TextContext)
                if field.init
            }
        )
