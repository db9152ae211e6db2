"""English texts that every machine has: to calibrate with, and to measure on.

The first two come from the standard library, whose `pydoc_data.topics` is the text of
Python's language reference by topic; the third is legal English, the licence that this
package is installed with. They depend on the version of Python (and the third on this
package's): whoever quotes a figure should quote the SHA-256 as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from attnquant.errors import SettingError

CALIBRATION = "python-topics-calibration"
HELD_OUT = "python-topics-held-out"
LICENCE = "apache-licence"

_DISTRIBUTION = "attnquant-core"
_TOPICS_PER_HELD_OUT = 6
"""Of every six topics, in sorted order, the first is held out."""


@dataclass(frozen=True)
class Text:
    """A text and what to call it.

    Attributes:
        name: For files its name, for texts of this module one of the constants.
        content: The text.
    """

    name: str
    content: str

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the text in UTF-8, in hexadecimal."""
        return hashlib.sha256(self.content.encode("utf-8")).hexdigest()


def calibration_text() -> Text:
    """Return the text that models are calibrated with by default.

    Five sixths of the topics, without any paragraph that the held-out topics have too:
    topics quote one another at length.
    """
    calibration, held_out = _split(_topics())
    known = {_normalised(part) for text in held_out for part in _paragraphs(text)}
    return Text(CALIBRATION, _join(calibration, known))


def held_out_text() -> Text:
    """Return a text of the same source that no calibration by default has seen."""
    _, held_out = _split(_topics())
    return Text(HELD_OUT, _join(held_out, set()))


def licence_text() -> Text:
    """Return a text of another kind of English: this package's licence.

    Raises:
        SettingError: If this package was installed without its licence.
    """
    content = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution(_DISTRIBUTION)
        content = distribution.read_text("licenses/LICENSE")
    if not content:
        raise SettingError(
            LICENCE,
            expected=f"licenses/LICENSE in the metadata of {_DISTRIBUTION}",
            found="none",
            hint=f"Reinstall {_DISTRIBUTION}, or name a text of your own.",
        )
    return Text(LICENCE, content)


def held_out_texts() -> tuple[Text, Text]:
    """Return the two texts that models are compared on by default.

    A calibrated model flatters itself on the kind of text it was calibrated with;
    the second text is of another kind.
    """
    return held_out_text(), licence_text()


def read_text(path: Path) -> Text:
    """Return the text of a UTF-8 file, under the file's name.

    Raises:
        SettingError: If it cannot be read, is not UTF-8 or holds nothing but blanks.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            str(path), expected="a text file in UTF-8", found=str(error)
        ) from error
    if not content.strip():
        raise SettingError(str(path), expected="a text", found="an empty file")
    return Text(path.name, content)


def _topics() -> Mapping[str, str]:
    # Half a megabyte of source, which only those who ask for a text should load.
    from pydoc_data.topics import topics

    return topics


def _split(topics: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the texts to calibrate with and those held out, topics in sorted order."""
    names = sorted(topics)
    held_out = names[::_TOPICS_PER_HELD_OUT]
    return (
        [topics[name] for name in names if name not in held_out],
        [topics[name] for name in held_out],
    )


def _join(texts: Iterable[str], known: set[str]) -> str:
    """Join texts, leaving out each paragraph that is known or came before."""
    seen = set(known)
    kept = []
    for text in texts:
        for part in _paragraphs(text):
            if (normalised := _normalised(part)) not in seen:
                seen.add(normalised)
                kept.append(part)
    return "\n\n".join(kept) + "\n"


def _paragraphs(text: str) -> list[str]:
    parts = re.split(r"\n[ \t]*\n", text)
    return [part.strip("\n") for part in parts if part.strip()]


def _normalised(paragraph: str) -> str:
    """Return a paragraph without its line breaks and indents, which quotes change."""
    return " ".join(paragraph.split())
