"""The structural part: hooks 1 to 3, bundles and the wheel, all without MAX."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from attnquant.errors import AttnQuantError, CheckpointError, SettingError
from attnquant.plugins import State
from attnquant.testing.conformance.model import (
    ConformanceModel,
    Setting,
    Weights,
    part,
)
from attnquant.testing.parity import make_bundle, make_plan
from attnquant.theta.bands import layer_to_band
from attnquant.theta.bundle import open_bundle
from attnquant.theta.decompose import reconstruct
from attnquant.theta.families import FAMILIES, TIE_MODES, tied_families_for
from attnquant.theta.grouping import NoBase
from attnquant.theta.layout import ThetaLayout, make_layout
from attnquant.theta.names import ProjectionKey, is_theta_name, parse_projection

HEAVY = ("max", "torch", "transformers")
IMPORT_BUDGET = 0.05
"""Seconds that a plugin's module may add to what core has imported already."""

_IMPORT = """
import importlib, sys, time
import attnquant.plugins
module, architecture, heavy = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
started = time.perf_counter()
importlib.import_module(module)
seconds = time.perf_counter() - started
supplied = attnquant.plugins.installed_plugins().find(architecture)
import json
config = json.loads(sys.argv[4])
supplied.prefix_map(config)
supplied.grouping(config.get("text_config") or config)
loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(heavy))
print(json.dumps([seconds, loaded]))
"""


@part("structural")
class StructuralConformance(ConformanceModel):
    """The plugin, its names and groups, bundles of its model, and its wheel."""

    def test_plugin_is_loaded(self) -> None:
        """The architecture's plugin is found and loaded."""
        plugin = self.supplied().plugin
        assert plugin.state is State.LOADED, plugin.reason
        assert self.config["architectures"] == [self.architecture]

    def test_plugin_is_light(self) -> None:
        """The plugin's module imports in 50 ms, and hooks 1 to 3 need no MAX."""
        plugin = self.supplied().plugin
        seconds = []
        for _ in range(3):
            done = _python(
                _IMPORT,
                plugin.entry_point.partition(":")[0],
                self.architecture,
                ",".join(HEAVY),
                json.dumps(dict(self.config)),
            )
            took, loaded = json.loads(done)
            assert loaded == [], f"the plugin imports {loaded}"
            seconds.append(took)
        # What is above the least is the machine being busy with others.
        assert min(seconds) < IMPORT_BUDGET

    # --- names --------------------------------------------------------------------

    def test_prefix_map_covers_each_tensor_once(self) -> None:
        """Each tensor of a checkpoint gets one canonical name, and no two the same."""
        weights = self.weights()
        renamed = self.supplied().prefix_map(self.config).rename(weights)
        assert sorted(renamed.values()) == sorted(weights)

    def test_prefix_map_covers_nothing_else(self) -> None:
        """A tensor that no model of this architecture has is refused by its name."""
        prefix_map = self.supplied().prefix_map(self.config)
        name = "surely.no.checkpoint.has.this.weight"
        with pytest.raises(CheckpointError) as caught:
            prefix_map.canonical(name)
        assert caught.value.subject == name

    def test_every_projection_has_its_canonical_name(self) -> None:
        """All seven projections of every layer are there, or said to be absent."""
        grouping = self.supplied().grouping(self.decoder_config)
        expected = {
            ProjectionKey(layer, family)
            for layer in range(self.num_layers)
            for family in FAMILIES
            if grouping(layer, family) is not NoBase.ABSENT
        }
        assert set(self.projection_shapes()) == expected

    # --- groups and bands ---------------------------------------------------------

    @pytest.mark.parametrize("families", TIE_MODES)
    def test_groups_partition_the_projections(self, families: str) -> None:
        """At every G, each projection has one base, is dense, or is absent."""
        for blocks in range(1, self.num_layers + 1):
            layout = self._layout(blocks, 1, families)
            counted = [
                ProjectionKey(layer, base.family)
                for base, layers in layout.bases.items()
                for layer in layers
            ]
            counted += [*layout.kept_dense, *layout.absent]
            assert len(counted) == len(set(counted))
            assert len(counted) == self.num_layers * len(FAMILIES)
            tied = {base.family for base in layout.bases}
            assert tied <= set(tied_families_for(families))

    def test_groups_never_mix_shapes(self) -> None:
        """Layers that share a base have matrices of one shape."""
        shapes = self.projection_shapes()
        layout = self._layout(1, 1)
        for base, layers in layout.bases.items():
            found = {shapes[ProjectionKey(i, base.family)] for i in layers}
            assert found == {layout.shapes[base]}, base

    def test_bands_are_contiguous_and_even(self) -> None:
        """A base serves layers of one band, and bands differ in size by one at most."""
        for blocks in range(1, self.num_layers + 1):
            bands = layer_to_band(self.num_layers, blocks)
            sizes = [bands.count(band) for band in range(blocks)]
            assert list(bands) == sorted(bands)
            assert max(sizes) - min(sizes) <= 1
            for base, layers in self._layout(blocks, 1).bases.items():
                assert {bands[i] for i in layers} == {base.band}

    def test_passthrough_has_no_factors(self) -> None:
        """At G = L every base is a layer's own matrix, and there is nothing else."""
        layout = self._layout(self.num_layers, None)
        assert layout.is_passthrough
        assert not any(layout.rank_of(base) for base in layout.bases)

    def test_settings_out_of_bounds_are_refused(self) -> None:
        """G outside 1 to L, and r above the full rank, are refused by their names."""
        full = max(min(shape) for shape in self.projection_shapes().values())
        for blocks, rank, subject in (
            (0, 1, "shared_blocks"),
            (self.num_layers + 1, 1, "shared_blocks"),
            (1, 0, "lora_rank"),
            (1, full + 1, "lora_rank"),
        ):
            with pytest.raises(SettingError) as caught:
                self._layout(blocks, rank)
            assert caught.value.subject == subject
        assert self._layout(1, full).lora_rank == full

    def _layout(
        self, blocks: int, rank: int | None, families: str = "all"
    ) -> ThetaLayout:
        return make_layout(
            self.projection_shapes(),
            num_layers=self.num_layers,
            shared_blocks=blocks,
            lora_rank=rank,
            tie_families=families,
            grouping=self.supplied().grouping(self.decoder_config),
        )

    # --- bundles ------------------------------------------------------------------

    def test_passthrough_keeps_every_bit(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        """A bundle at G = L rebuilds every projection bit by bit."""
        path = make_bundle(checkpoint, Setting(), tmp_path / "bundle")
        self._assert_rebuilt(path, exact=True)

    def test_full_rank_rebuilds_the_projections(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        """A bundle at full rank rebuilds every projection, up to rounding."""
        full = max(min(shape) for shape in self.projection_shapes().values())
        path = make_bundle(checkpoint, Setting(1, full), tmp_path / "bundle")
        self._assert_rebuilt(path, exact=False)

    def test_bundle_keeps_all_other_tensors_and_files(
        self, checkpoint: Path, bundle: Path
    ) -> None:
        """What is not decomposed is kept bit by bit, the tokenizer included."""
        canonical = self._canonical()
        stored = open_bundle(bundle)
        kept = [name for name in canonical if stored_as_is(name, stored.info.layout)]
        names = [n for n in stored.checkpoint.tensors if not is_theta_name(n)]
        assert sorted(kept) == sorted(names)
        for name in kept:
            found = stored.checkpoint.tensors[name]
            np.testing.assert_array_equal(found, canonical[name], err_msg=name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            assert (bundle / file).read_bytes() == (checkpoint / file).read_bytes()

    def _canonical(self) -> Weights:
        weights = self.weights()
        renamed = self.supplied().prefix_map(self.config).rename(weights)
        return {name: weights[source] for name, source in renamed.items()}

    def _assert_rebuilt(self, path: Path, *, exact: bool) -> None:
        original = self._canonical()
        bundle = open_bundle(path)
        rebuilt = reconstruct(bundle.checkpoint.tensors, bundle.info.layout)
        assert rebuilt
        for name, matrix in rebuilt.items():
            expected = original[name].astype(np.float32)
            if exact:
                np.testing.assert_array_equal(matrix, expected, err_msg=name)
            else:
                scale = float(np.abs(expected).max())
                np.testing.assert_allclose(
                    matrix, expected, rtol=0, atol=1e-5 * scale, err_msg=name
                )

    # --- what is refused ----------------------------------------------------------

    @pytest.mark.parametrize("change", ["missing", "surplus", "shape", "nan", "dtype"])
    def test_wrong_tensors_are_refused(
        self, checkpoint: Path, tmp_path: Path, change: str
    ) -> None:
        """A missing, surplus, misshapen or unusable tensor is refused by its name."""
        prefix_map = self.supplied().prefix_map(self.config)
        sources = prefix_map.rename(load_file(checkpoint / "model.safetensors"))
        last = max(key for name in sources if (key := parse_projection(name)))
        canonical = next(n for n in sources if parse_projection(n) == last)
        name = sources[canonical]
        if change == "surplus":
            name = canonical = "surely.no.checkpoint.has.this.weight"
        broken = copy_checkpoint(
            checkpoint, tmp_path / "broken", {name: _WRONG[change]}
        )
        with pytest.raises(AttnQuantError) as caught:
            make_bundle(broken, self.setting, tmp_path / "bundle")
        assert caught.value.subject in {name, canonical}
        assert not (tmp_path / "bundle").exists()

    def test_plan_is_that_of_the_setting(self, checkpoint: Path) -> None:
        """Planning a decomposition, as the command does, gives the layout asked for."""
        layout = make_plan(checkpoint, self.setting).layout
        assert layout.shared_blocks == self.setting.shared_blocks
        assert layout.lora_rank == self.setting.rank
        assert not layout.is_passthrough, "set a G below the number of layers"

    # --- the package --------------------------------------------------------------

    def test_wheel_holds_what_it_must(self, tmp_path: Path) -> None:
        """The wheel has all sources, py.typed, licence, entry point and needs core."""
        build = pytest.importorskip(
            "build", reason='pip install "attnquant-core[testing]"'
        )
        project = self.project()
        builder = build.ProjectBuilder(project)
        wheel = Path(builder.build("wheel", tmp_path))
        plugin = self.supplied().plugin
        top = plugin.entry_point.partition(":")[0].partition(".")[0]
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (metadata_name,) = (n for n in names if n.endswith(".dist-info/METADATA"))
            metadata = Parser().parsestr(archive.read(metadata_name).decode())
            points = archive.read(metadata_name.replace("METADATA", "entry_points.txt"))
        source = next(
            path for path in (project / "src" / top, project / top) if path.is_dir()
        )
        expected = {
            f"{top}/{path.relative_to(source).as_posix()}"
            for path in source.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert expected <= set(names)
        assert f"{top}/py.typed" in names
        assert any("LICENSE" in name for name in names)
        assert not [n for n in names if n.endswith((".safetensors", ".gguf", ".npz"))]
        assert not [n for n in names if n.startswith("tests/")]
        assert f"{plugin.name} = {plugin.entry_point}" in points.decode()
        requirements = metadata.get_all("Requires-Dist") or []
        assert any(r.startswith("attnquant-core") for r in requirements), requirements
        assert not any("file:" in requirement for requirement in requirements)
        assert metadata["Requires-Python"]


def stored_as_is(name: str, layout: ThetaLayout) -> bool:
    """Return whether a bundle of a layout holds a tensor untouched."""
    key = parse_projection(name)
    return key is None or layout.base_of(*key) is None


def copy_checkpoint(
    source: Path, target: Path, changes: dict[str, Any], **config: object
) -> Path:
    """Copy a checkpoint with tensors and fields of its config changed.

    Args:
        source: The original.
        target: The copy.
        changes: By name, a function of the tensor (None if there is none) whose result
            is stored; None drops it.
        config: Fields of `config.json`.
    """
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    weights: dict[str, Any] = load_file(file)
    for name, change in changes.items():
        weights[name] = change(weights.get(name))
    save_file(
        {n: np.ascontiguousarray(w) for n, w in weights.items() if w is not None}, file
    )
    if config:
        path = target / "config.json"
        known = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(known | config), encoding="utf-8")
    return target


def _nan(tensor: Any) -> Any:
    changed = tensor.copy()
    changed.flat[-1] = np.nan
    return changed


_WRONG: dict[str, Any] = {
    "missing": lambda _: None,
    "surplus": lambda _: np.ones(3, np.float32),
    "shape": lambda tensor: tensor[:-1],
    "nan": _nan,
    "dtype": lambda tensor: tensor.astype(np.int32),
}


def _python(code: str, *arguments: str) -> str:
    """Run code in a fresh process, and return what it prints."""
    done = subprocess.run(  # noqa: S603 (our own interpreter and code)
        [sys.executable, "-c", code, *arguments],
        # As Python has it: MAX, once imported, changes the process's own environment
        # in ways that lead a child's Python astray.
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
