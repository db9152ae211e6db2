"""Encodings that tell the user which flag asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from max.pipelines.modeling.config_enums import SupportedEncoding


class _NamedEncoding(str):
    """Equal to the plain name, but printed with its flag.

    MAX refuses bfloat16 on a CPU before any code of an architecture runs, and its
    message names the encodings that would do, not the flag that selects one. It prints
    them with `str()`.
    """

    __slots__ = ()

    def __str__(self) -> str:
        name = str.__str__(self)
        return f"{name} (--quantization-encoding {name})"


def with_flags(encodings: Iterable[SupportedEncoding]) -> set[SupportedEncoding]:
    """Return encodings, each of which prints with the flag that asks for it."""
    return {cast("SupportedEncoding", _NamedEncoding(name)) for name in encodings}
