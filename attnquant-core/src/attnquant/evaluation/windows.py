"""Long texts as windows: runs of tokens that a model sees by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from attnquant.errors import SettingError
from attnquant.texts import Text

WINDOW = 512
"""The tokens of a window by default."""

_SMALLEST = 2
"""A window of one token predicts nothing."""


@dataclass(frozen=True)
class Tokens:
    """A text's tokens, and what a sequence of this model begins with.

    Attributes:
        text: The text.
        start: The tokens that come before any text: Gemma's ``<bos>``, or none.
        body: The text's own.
    """

    text: Text
    start: tuple[int, ...]
    body: tuple[int, ...]

    def windows(self, size: int) -> Iterator[tuple[int, ...]]:
        """Cut the text into windows of `size` tokens, the last one shorter.

        Each begins as a sequence of its own: nothing of the text before it is seen.
        """
        step = size - len(self.start)
        for first in range(0, len(self.body), step):
            yield self.start + self.body[first : first + step]


@dataclass(frozen=True)
class Windows:
    """Some texts in windows of one size, counted before anything is run.

    Attributes:
        texts: The texts' tokens.
        size: Tokens in a window.
    """

    texts: tuple[Tokens, ...]
    size: int

    @cached_property
    def total(self) -> int:
        """The tokens of all windows, each window's start included."""
        return sum(len(window) for text in self.texts for window in self.of(text))

    def of(self, text: Tokens) -> Iterator[tuple[int, ...]]:
        """Cut one of the texts."""
        return text.windows(self.size)


def cut(texts: Sequence[Tokens], size: int, limit: int | None = None) -> Windows:
    """Prepare texts to be run in windows.

    Args:
        texts: The texts' tokens.
        size: Tokens in a window, at least 2 and more than a sequence's start.
        limit: How many tokens of each text to use at most; None for all.

    Raises:
        SettingError: If a number is out of range.
    """
    smallest = max([_SMALLEST, *(len(text.start) + 1 for text in texts)])
    if size < smallest:
        raise SettingError("window", expected=f"at least {smallest}", found=str(size))
    if limit is not None and limit < 1:
        raise SettingError("tokens", expected="at least 1", found=str(limit))
    short = tuple(Tokens(text.text, text.start, text.body[:limit]) for text in texts)
    return Windows(short, size)
