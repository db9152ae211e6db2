"""The layout: which theta tensors a decomposition has, and of which shape.

A layout follows from the number of layers, bands, ranks, the tie mode, the W0 groups
and the projections' shapes alone. Bands may differ between families and ranks between
bases; `base_of` and `rank_of` are the one way to ask for either. The layout is what a
bundle's reader checks tensors against, what the decomposition walks through and what
the serving layers are built from, so that these three cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from attnquant.errors import CheckpointError, PluginError, SettingError
from attnquant.theta.bands import check_bands, check_shared_blocks, layer_to_band
from attnquant.theta.families import (
    FAMILIES,
    PerFamily,
    per_family,
    tied_families_for,
)
from attnquant.theta.grouping import Grouping, NoBase, uniform
from attnquant.theta.names import (
    BaseKey,
    ProjectionKey,
    base_name,
    factor_name,
    projection_name,
)

Shape = tuple[int, ...]
Matrix = tuple[int, int]
MATRIX_RANK = 2


@dataclass(frozen=True)
class ThetaLayout:
    """The shape of a decomposition.

    Attributes:
        num_layers: L.
        shared_blocks: G; where families differ in it, the largest.
        lora_rank: r as asked for, 0 at passthrough; where ranks differ, the largest.
        tie_families: The tie mode.
        bands: For each decomposed family, the band of each layer.
        base_ranks: For each shared base, the rank of the factors around it.
        bases: For each shared base, the layers that share it, in order.
        shapes: For each shared base, its shape ``(out, in)``.
        kept_dense: Projections that the checkpoint has and that stay dense.
        absent: Projections that the checkpoint must not have.
    """

    num_layers: int
    shared_blocks: int
    lora_rank: int
    tie_families: str
    bands: Mapping[str, tuple[int, ...]]
    base_ranks: Mapping[BaseKey, int]
    bases: Mapping[BaseKey, tuple[int, ...]]
    shapes: Mapping[BaseKey, Matrix]
    kept_dense: frozenset[ProjectionKey]
    absent: frozenset[ProjectionKey]

    @property
    def tied_projections(self) -> tuple[str, ...]:
        """The families that are decomposed."""
        return tied_families_for(self.tie_families)

    @property
    def is_passthrough(self) -> bool:
        """Whether each band has one layer, so that the model is the original."""
        return all(count == self.num_layers for count in self.blocks.values())

    @cached_property
    def blocks(self) -> dict[str, int]:
        """G of each decomposed family: its number of bands."""
        return {family: 1 + bands[-1] for family, bands in self.bands.items()}

    @property
    def has_equal_bands(self) -> bool:
        """Whether G alone says what the bands of every family are."""
        split = layer_to_band(self.num_layers, self.shared_blocks)
        return all(bands == split for bands in self.bands.values())

    @property
    def has_equal_ranks(self) -> bool:
        """Whether r alone says what the rank of every base is."""
        return all(
            rank == _rank_within(self.lora_rank, self.bases[base], self.shapes[base])
            for base, rank in self.base_ranks.items()
        )

    @cached_property
    def _base_of(self) -> dict[ProjectionKey, BaseKey]:
        return {
            ProjectionKey(layer, base.family): base
            for base, layers in self.bases.items()
            for layer in layers
        }

    def base_of(self, layer: int, family: str) -> BaseKey | None:
        """Return the base that a projection uses; None if it has none."""
        return self._base_of.get(ProjectionKey(layer, family))

    def rank_of(self, base: BaseKey) -> int:
        """Return the rank of the factors around a base.

        It is never more than the matrix can have, and 0 where a base serves one
        layer only: that base is the layer's own matrix, the residual is zero. At 0
        a base that serves several stands for each of them alone.
        """
        return self.base_ranks[base]

    def with_ranks(self, ranks: Mapping[BaseKey, int]) -> ThetaLayout:
        """Return this layout with other ranks.

        Args:
            ranks: For every base the rank wanted; where a matrix cannot have it, or a
                base serves one layer only, it is lowered as `rank_of` says.
        """
        within = {
            base: _rank_within(ranks[base], self.bases[base], shape)
            for base, shape in self.shapes.items()
        }
        return replace(self, base_ranks=within, lora_rank=max(within.values()))

    def with_bands(self, bands: Mapping[str, Sequence[int]]) -> ThetaLayout:
        """Return this layout with other bands of some families.

        Every base of a family gets the largest rank that the family has here.

        Args:
            bands: The band of each layer, per family.

        Raises:
            SettingError: If they are no contiguous runs.
        """
        splits = dict(self.bands)
        for family, found in bands.items():
            splits[family] = check_bands(found, self.num_layers)
        members: dict[BaseKey, list[int]] = {}
        shapes: dict[BaseKey, Matrix] = {}
        for (layer, family), old in self._base_of.items():
            base = BaseKey(splits[family][layer], old.group, family)
            members.setdefault(base, []).append(layer)
            shapes[base] = self.shapes[old]
        order = sorted(
            members, key=lambda base: (FAMILIES.index(base.family), members[base])
        )
        return replace(
            self,
            shared_blocks=max(1 + split[-1] for split in splits.values()),
            bands=splits,
            bases={base: tuple(members[base]) for base in order},
            shapes={base: shapes[base] for base in order},
            base_ranks={
                base: _rank_within(self.ranks[base.family], members[base], shapes[base])
                for base in order
            },
        )

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The largest rank in use per decomposed family."""
        ranks = dict.fromkeys(self.tied_projections, 0)
        for base in self.bases:
            ranks[base.family] = max(ranks[base.family], self.rank_of(base))
        return ranks

    def base_tensors(self, base: BaseKey) -> Iterator[tuple[str, Shape]]:
        """Yield the name and shape of a base and of all factors around it."""
        yield base_name(*base), self.shapes[base]
        rank = self.rank_of(base)
        if not rank:
            return
        out_dim, in_dim = self.shapes[base]
        for layer in self.bases[base]:
            yield factor_name(layer, base.family, "U"), (out_dim, rank)
            yield factor_name(layer, base.family, "s"), (rank,)
            yield factor_name(layer, base.family, "V"), (rank, in_dim)

    def tensors(self) -> dict[str, Shape]:
        """Return the name and shape of every theta tensor."""
        return {
            name: shape
            for base in self.bases
            for name, shape in self.base_tensors(base)
        }


def make_layout(
    shapes: Mapping[ProjectionKey, Shape],
    *,
    num_layers: int,
    shared_blocks: int | PerFamily,
    lora_rank: int | PerFamily | None,
    tie_families: str = "all",
    grouping: Grouping = uniform,
    bands: Mapping[str, Sequence[int]] | None = None,
) -> ThetaLayout:
    """Build the layout of a decomposition.

    Args:
        shapes: Shape ``(out, in)`` of each projection the checkpoint has.
        num_layers: L.
        shared_blocks: G, of all families or of each; a decomposed family for which
            nothing says it has a base per layer.
        lora_rank: r, of all families or of each. It has no effect where ``G == L``,
            and may be left out there.
        tie_families: ``"all"`` or ``"attn"``.
        grouping: The W0 grouping key.
        bands: For some decomposed families the band of each layer, in place of the
            equal split that G stands for.

    Raises:
        SettingError: If G, r, the bands or the tie mode are out of bounds, or given
            for a family that is not decomposed.
        CheckpointError: If a projection is missing, is there but must not be, is
            not a matrix, or has another shape than those it shares a base with.
        PluginError: If the grouping key returns what is no group, or leaves nothing
            to decompose.
    """
    tied = tied_families_for(tie_families)
    splits = _splits(per_family(shared_blocks), bands or {}, tied, num_layers)
    members: dict[BaseKey, list[int]] = {}
    kept_dense: set[ProjectionKey] = set()
    absent: set[ProjectionKey] = set()
    for family in FAMILIES:
        for layer in range(num_layers):
            key = ProjectionKey(layer, family)
            group = grouping(layer, family)
            if group is NoBase.ABSENT:
                absent.add(key)
            elif isinstance(group, NoBase) or family not in tied:
                kept_dense.add(key)
            else:
                _check_group(key, group)
                base = BaseKey(splits[family][layer], group, family)
                members.setdefault(base, []).append(layer)
    _check_presence(shapes, num_layers, absent)
    if not members:
        raise PluginError(
            "W0 grouping key",
            expected="a group for a projection among " + ", ".join(tied),
            found="none: all are dense or absent",
        )
    base_shapes = _base_shapes(members, shapes)
    shared = [family for family in tied if 1 + splits[family][-1] < num_layers]
    ranks = _ranks(per_family(lora_rank), shared, tied, base_shapes)
    return ThetaLayout(
        num_layers=num_layers,
        shared_blocks=max(1 + split[-1] for split in splits.values()),
        lora_rank=max(ranks.values(), default=0),
        tie_families=tie_families,
        bands=splits,
        base_ranks={
            base: _rank_within(ranks.get(base.family, 0), layers, base_shapes[base])
            for base, layers in members.items()
        },
        bases={base: tuple(layers) for base, layers in members.items()},
        shapes=base_shapes,
        kept_dense=frozenset(kept_dense),
        absent=frozenset(absent),
    )


def _splits(
    blocks: PerFamily,
    bands: Mapping[str, Sequence[int]],
    tied: Sequence[str],
    num_layers: int,
) -> dict[str, tuple[int, ...]]:
    """Return the band of each layer, per decomposed family."""
    _check_tied("shared_blocks", blocks.named, tied)
    _check_tied("layer_to_band", bands, tied)
    splits = {}
    for family in tied:
        if family in bands:
            splits[family] = check_bands(bands[family], num_layers)
            continue
        count = blocks.of(family)
        if count is None and blocks.named:
            count = num_layers
        splits[family] = layer_to_band(
            num_layers, check_shared_blocks(count, num_layers)
        )
    return splits


def _ranks(
    asked: PerFamily,
    shared: Sequence[str],
    tied: Sequence[str],
    shapes: Mapping[BaseKey, Matrix],
) -> dict[str, int]:
    """Return r of each family that has shared bases, checked."""
    _check_tied("lora_rank", asked.named, tied)
    ranks = {}
    for family in shared:
        rank = asked.of(family)
        if rank is None and asked.named:
            raise SettingError(
                "lora_rank",
                expected=f"a positive integer for {family}, whose bases are shared",
                found=str(asked),
            )
        ranks[family] = check_positive_rank(rank)
    names = {base: base_name(*base) for base in shapes}
    for family in ranks.keys() & asked.named.keys():
        own = {names[base]: shapes[base] for base in shapes if base.family == family}
        if own:
            check_rank_bound(ranks[family], own)
    if asked.default is not None and ranks.keys() - asked.named.keys():
        check_rank_bound(
            asked.default, {names[base]: shape for base, shape in shapes.items()}
        )
    return ranks


def _check_tied(subject: str, named: Mapping[str, object], tied: Sequence[str]) -> None:
    if strange := [family for family in named if family not in tied]:
        raise SettingError(
            subject,
            expected="families among those decomposed, " + ", ".join(tied),
            found=strange[0],
        )


def _rank_within(rank: int, layers: Sequence[int], shape: Matrix) -> int:
    return min(rank, *shape) if len(layers) > 1 else 0


def check_positive_rank(lora_rank: object) -> int:
    """Return `lora_rank` (r) if it is a positive integer.

    Raises:
        SettingError: Naming what was found.
    """
    if isinstance(lora_rank, bool) or not isinstance(lora_rank, int) or lora_rank < 1:
        raise SettingError(
            "lora_rank",
            expected="a positive integer",
            found="nothing" if lora_rank is None else repr(lora_rank),
        )
    return lora_rank


def check_rank_bound(lora_rank: int, shapes: Mapping[str, Shape]) -> int:
    """Return `lora_rank` if some matrix can have that rank.

    Args:
        lora_rank: r.
        shapes: Shapes of the matrices, by any name.

    Raises:
        SettingError: If r is above the largest full rank.
    """
    bound, name = max(((min(shape), name) for name, shape in shapes.items()))
    if lora_rank > bound:
        raise SettingError(
            "lora_rank",
            expected=f"at most {bound} (the full rank of the largest, {name})",
            found=str(lora_rank),
        )
    return lora_rank


def _check_group(key: ProjectionKey, group: object) -> None:
    if not isinstance(group, str) or "." in group:
        raise PluginError(
            f"W0 group of {projection_name(*key)}",
            expected="a name without dots, UNNAMED or a NoBase",
            found=repr(group),
        )


def _check_presence(
    shapes: Mapping[ProjectionKey, Shape],
    num_layers: int,
    absent: set[ProjectionKey],
) -> None:
    for key in shapes:
        if key.layer >= num_layers:
            raise CheckpointError(
                projection_name(*key),
                expected=f"layers 0 to {num_layers - 1}",
                found=f"layer {key.layer}",
            )
        if key in absent:
            raise CheckpointError(
                projection_name(*key),
                expected="no such tensor (this layer has no such projection)",
                found="one in the checkpoint",
            )
    for family in FAMILIES:
        for layer in range(num_layers):
            key = ProjectionKey(layer, family)
            if key not in absent and key not in shapes:
                raise CheckpointError(
                    projection_name(*key),
                    expected=f"a projection in each of {num_layers} layers",
                    found="no such tensor",
                )


def _base_shapes(
    members: Mapping[BaseKey, list[int]], shapes: Mapping[ProjectionKey, Shape]
) -> dict[BaseKey, Matrix]:
    """Return the shape of each base; all matrices of a family and group have one."""
    firsts: dict[tuple[str, str], ProjectionKey] = {}
    for base, layers in members.items():
        for layer in layers:
            key = ProjectionKey(layer, base.family)
            first = firsts.setdefault((base.group, base.family), key)
            if len(shapes[key]) != MATRIX_RANK or 0 in shapes[key]:
                raise CheckpointError(
                    projection_name(*key),
                    expected="a matrix (out, in)",
                    found=f"shape {shapes[key]}",
                )
            if shapes[key] != shapes[first]:
                raise CheckpointError(
                    projection_name(*key),
                    expected=f"shape {shapes[first]}, as {projection_name(*first)} of"
                    " the same W0 group",
                    found=f"shape {shapes[key]}",
                )
    by_group = {group: shapes[key] for group, key in firsts.items()}
    return {
        base: (shape[0], shape[1])
        for base in members
        for shape in [by_group[base.group, base.family]]
    }
