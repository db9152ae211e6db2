"""Fake plugins: a module and a `*.dist-info` in a folder, nothing installed."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

TINY_PLUGIN = """
from attnquant.hookspecs import Architecture, hookimpl
from attnquant.theta.grouping import uniform
from attnquant.theta.prefix_map import PrefixMap


@hookimpl
def attnquant_architectures():
    return [Architecture("TinyForCausalLM", "tiny_arch:arch", api_version=1)]


@hookimpl
def attnquant_prefix_map():
    return PrefixMap({"model.": "", "lm_head.": "lm_head."}, ("*.inv_freq",))


@hookimpl
def attnquant_w0_group():
    return uniform
"""
"""A whole plugin for the models of `core_support.tiny`."""


def supplying(*names: str, api_version: object = 1) -> str:
    """Return the source of a plugin that supplies architectures, and does no more."""
    items = ", ".join(
        f"Architecture({name!r}, 'nowhere:arch', {api_version!r})" for name in names
    )
    return dedent(f"""
        from attnquant.hookspecs import Architecture, hookimpl

        @hookimpl
        def attnquant_architectures():
            return [{items}]
    """)


def install(
    home: Path,
    name: str,
    source: str | None,
    *,
    distribution: str | None = None,
    version: str = "1.0",
    value: str | None = None,
) -> None:
    """Put a plugin into a folder.

    Args:
        home: The folder; it has to be on `sys.path` to be found.
        name: The entry point's name.
        source: The module ``fake_{name}``; None makes none.
        distribution: By default ``attnquant-{name}``.
        version: The distribution's.
        value: What the entry point names; by default the module.
    """
    distribution = distribution or f"attnquant-{name}"
    stem = distribution.replace("-", "_")
    info = home / f"{stem}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        encoding="utf-8",
    )
    (info / "entry_points.txt").write_text(
        f"[attnquant.models]\n{name} = {value or f'fake_{name}'}\n", encoding="utf-8"
    )
    if source is not None:
        (home / f"fake_{name}.py").write_text(source, encoding="utf-8")
