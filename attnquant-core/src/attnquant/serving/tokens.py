"""Text to tokens, as the tokenizer of a checkpoint or bundle has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from attnquant.errors import ServingError


class Encoder:
    """A checkpoint's tokenizer.

    Attributes:
        start: What every sequence begins with before any text: one token, or none.
    """

    def __init__(self, path: Path) -> None:
        """Load the tokenizer.

        Raises:
            ServingError: If there is none that transformers can load.
        """
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ServingError(
                f"{path}: tokenizer",
                expected="tokenizer files that transformers can load",
                found=str(error).strip().partition("\n")[0],
            ) from error
        # Without a vocabulary transformers makes one up that knows no word.
        files = sorted(set(self._tokenizer.vocab_files_names.values()))
        if not any((path / name).is_file() for name in files):
            raise ServingError(
                f"{path}: tokenizer",
                expected="one of " + ", ".join(files),
                found="none",
                hint="Copy the tokenizer's files from where the checkpoint came from.",
            )
        alone: list[int] = self._tokenizer("").input_ids
        begins = alone[:1] == [self._tokenizer.bos_token_id]
        self.start = tuple(alone[:1]) if begins else ()

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens, nothing put before or after them."""
        # Silent: it warns that the text is longer than the model's longest sequence.
        tokens: list[int] = self._tokenizer(
            text, add_special_tokens=False, verbose=False
        ).input_ids
        return tokens
