"""Settings: environment variables and a bundle's block, as one validated object."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnquant.errors import SettingError
from attnquant.sizes import parse_bytes
from attnquant.theta.bands import check_shared_blocks
from attnquant.theta.bundle import BundleInfo
from attnquant.theta.families import TIE_MODES, tied_families_for
from attnquant.theta.layout import ThetaLayout

FORMULATIONS = ("gemm", "dense", "fused")
"""How a projection can be computed; the first is the default."""

_PREFIX = "ATTNQUANT_"

# Below MAX's own name, since MAX's console shows no other.
logger = logging.getLogger("max.pipelines.attnquant")


def _positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _size(text: str) -> int:
    if (size := parse_bytes(text)) < 0:
        raise ValueError(text)
    return size


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _pins(text: str) -> dict[str, str]:
    pairs = [name.partition("=") for name in _names(text)]
    if not all(left.strip() and right.strip() for left, _, right in pairs):
        raise ValueError(text)
    return {left.strip(): right.strip() for left, _, right in pairs}


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Its name.
        parse: Text to value; ValueError if it is not in range.
        range: The allowed values, in words.
        default: What holds when it is not set, in words.
        effect: What it does, in a sentence.
    """

    name: str
    parse: Callable[[str], object]
    range: str
    default: str
    effect: str

    def read(self, environ: Mapping[str, str]) -> object | None:
        """Return the variable's value, or None if it is not set.

        Raises:
            SettingError: Naming the variable, its range and what was found.
        """
        if (text := environ.get(self.name)) is None:
            return None
        try:
            return self.parse(text)
        except ValueError:
            raise SettingError(
                self.name, expected=self.range, found=repr(text)
            ) from None


RANK = Variable(
    "ATTNQUANT_RANK",
    _positive_integer,
    "a positive integer, at most the largest full rank of a projection",
    "none: needed where G < L and no bundle says it",
    "The rank r of the low-rank terms (field `lora_rank`).",
)
BLOCKS = Variable(
    "ATTNQUANT_BLOCKS",
    _positive_integer,
    "an integer from 1 to the number of layers",
    "the bundle's; for a raw checkpoint the number of layers (passthrough)",
    "The number of bands G (field `shared_blocks`).",
)
TIE = Variable(
    "ATTNQUANT_TIE",
    _one_of(TIE_MODES),
    "one of " + ", ".join(TIE_MODES),
    "the bundle's; for a raw checkpoint all",
    "Which families are decomposed (field `tie_families`).",
)
FORMULATION = Variable(
    "ATTNQUANT_FORMULATION",
    _one_of(FORMULATIONS),
    "one of " + ", ".join(FORMULATIONS),
    FORMULATIONS[0],
    "How projections are computed when serving.",
)
PLUGINS = Variable(
    "ATTNQUANT_PLUGINS",
    _names,
    "plugin names, separated by commas",
    "all that are installed",
    "Load these plugins only.",
)
DISABLE = Variable(
    "ATTNQUANT_DISABLE",
    _names,
    "plugin names, separated by commas",
    "none",
    "Do not load these plugins.",
)
PIN = Variable(
    "ATTNQUANT_PIN",
    _pins,
    "architecture=distribution pairs, separated by commas",
    "none",
    "Which distribution supplies an architecture that several claim.",
)
CACHE_LIMIT = Variable(
    "ATTNQUANT_CACHE_LIMIT",
    _size,
    "a size such as 500MB or 5GB",
    "none: nothing is removed",
    "How large MAX's compile cache may be after a start; what was used longest ago is"
    " removed first.",
)
VARIABLES = (RANK, BLOCKS, TIE, FORMULATION, PLUGINS, DISABLE, PIN, CACHE_LIMIT)


@dataclass(frozen=True)
class Settings:
    """What a model is decomposed and served with.

    Attributes:
        shared_blocks: G.
        lora_rank: r; 0 at passthrough.
        tie_families: ``"all"`` or ``"attn"``.
        formulation: One of `FORMULATIONS`.
        requested_rank: r as asked for, also where it has no effect.
        origin: Where G, r and the tie mode come from, in words.
    """

    shared_blocks: int
    lora_rank: int
    tie_families: str
    formulation: str
    origin: str
    requested_rank: int | None = None

    @property
    def tied_projections(self) -> tuple[str, ...]:
        """The families that are decomposed."""
        return tied_families_for(self.tie_families)


def resolve_settings(
    num_layers: int,
    bundle: BundleInfo | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Combine the environment with a bundle's block.

    A bundle's settings win over nothing and lose to nothing silently: a variable may
    repeat what the bundle says, and is refused if it says something else.

    Args:
        num_layers: L.
        bundle: The block, when a bundle is served; None for a raw checkpoint.
        environ: By default the process's environment.

    Raises:
        SettingError: If a variable is out of range, missing, or contradicts the
            bundle; the message names it.
    """
    environ = os.environ if environ is None else environ
    warn_unknown_variables(environ)
    blocks, rank = BLOCKS.read(environ), RANK.read(environ)
    tie = TIE.read(environ)
    formulation = FORMULATION.read(environ) or FORMULATIONS[0]
    if isinstance(blocks, int):
        _check_blocks(blocks, num_layers)
    if bundle is not None:
        layout = bundle.layout
        _agree(BLOCKS, blocks, bundled_blocks(layout))
        _agree(TIE, tie, layout.tie_families)
        if not layout.is_passthrough:
            # At passthrough there is no low-rank term that r could be the rank of.
            _agree(RANK, rank, bundled_rank(layout))
        return Settings(
            layout.shared_blocks,
            layout.lora_rank,
            layout.tie_families,
            str(formulation),
            "the bundle",
        )
    if rank is not None and blocks is None:
        raise SettingError(
            BLOCKS.name,
            expected=f"{BLOCKS.range}, since {RANK.name} is set",
            found="nothing (not set)",
        )
    requested = rank if isinstance(rank, int) else None
    origin = BLOCKS.name if blocks else f"no {BLOCKS.name} set: passthrough"
    shared_blocks = blocks if isinstance(blocks, int) else num_layers
    if shared_blocks == num_layers:
        rank = 0
    elif not isinstance(rank, int):
        raise SettingError(
            RANK.name,
            expected=f"{RANK.range}, since {BLOCKS.name}={blocks} is below the"
            f" {num_layers} layers of this model",
            found="nothing (not set)",
        )
    return Settings(
        shared_blocks,
        rank if isinstance(rank, int) else 0,
        str(tie or TIE_MODES[0]),
        str(formulation),
        origin,
        requested,
    )


def bundled_blocks(layout: ThetaLayout) -> int | str:
    """Return G, or in words the bands that no single G stands for."""
    if layout.has_equal_bands:
        return layout.shared_blocks
    counts = (f"{family}={count}" for family, count in layout.blocks.items())
    return "bands by family: " + ",".join(counts)


def bundled_rank(layout: ThetaLayout) -> int | str:
    """Return r, or in words the ranks that no single r stands for."""
    if layout.has_equal_ranks:
        return layout.lora_rank
    ranks: dict[str, set[int]] = {family: set() for family in layout.bands}
    for base, rank in layout.base_ranks.items():
        if rank:
            ranks[base.family].add(rank)
    spans = (
        f"{family}={min(found)}" + (f"..{max(found)}" if len(found) > 1 else "")
        for family, found in ranks.items()
        if found
    )
    return "ranks by base: " + ",".join(spans)


def warn_unknown_variables(environ: Mapping[str, str]) -> None:
    """Log each ``ATTNQUANT_`` variable that means nothing, with its likely spelling."""
    # Without the prefix, which would make any two names look alike.
    known = [variable.name.removeprefix(_PREFIX) for variable in VARIABLES]
    for name in environ:
        rest = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and rest not in known:
            close = difflib.get_close_matches(rest, known, n=1)
            hint = f"; did you mean {_PREFIX}{close[0]}?" if close else ""
            logger.warning("%s is set, but means nothing%s", name, hint)


def _check_blocks(blocks: int, num_layers: int) -> None:
    try:
        check_shared_blocks(blocks, num_layers)
    except SettingError as error:
        raise error.renamed({error.subject: BLOCKS.name}) from None


def _agree(variable: Variable, found: object | None, bundled: object) -> None:
    if found is not None and found != bundled:
        raise SettingError(
            variable.name,
            expected=f"{bundled} (what the bundle was made with) or nothing",
            found=str(found),
            hint=f"Unset {variable.name}, or make another bundle.",
        )
