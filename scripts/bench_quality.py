"""What decomposition costs a model, in perplexity, on texts that it was not fitted to.

Calibrates on MAX, decomposes at the settings below, and compares each bundle with the
original on both held-out texts. Exits with 1 if a setting misses the ratio it should
keep on the text of the kind that the calibration text is of.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from attnquant.cli.text import format_table
from attnquant.texts import HELD_OUT


class Setting(NamedTuple):
    """Options of `attnquant decompose`, and the largest ratio of perplexities."""

    name: str
    options: tuple[str, ...]
    at_most: float


SETTINGS = (
    Setting("G=17 all", ("--blocks", "17"), 1.30),
    Setting("G=9 q and k", ("--blocks", "q_proj=9,k_proj=9"), 1.7),
    Setting("G=9 attention", ("--blocks", "9", "--tie", "attn"), 2.1),
    Setting("G=9 all", ("--blocks", "9"), 8.0),
)
RANK = "64"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--statistics", type=Path, help="those of an earlier run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    statistics = options.statistics or options.out / "statistics.safetensors"
    if options.statistics is None:
        _attnquant("calibrate", options.checkpoint, "--out", statistics, "--overwrite")
    found = {}
    for setting in SETTINGS:
        bundle = options.out / setting.name.replace(" ", "-")
        made = _attnquant(
            *("decompose", options.checkpoint, "--out", bundle, "--overwrite"),
            *("--statistics", statistics, "--rank", RANK, *setting.options, "--json"),
        )
        compared = _attnquant(
            "eval", bundle, "--reference", options.checkpoint, "--json"
        )
        found[setting.name] = {
            "at_most": setting.at_most,
            "ratio": made["ratio"],
            "weighted_error": made["weighted_error"],
            "texts": compared["texts"],
        }
    path = options.out / "bench_quality.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    rows = [
        (
            name,
            f"{entry['ratio']:.2f}",
            *(f"{_ratio(text):.3f}" for text in entry["texts"]),
            f"{entry['at_most']}",
        )
        for name, entry in found.items()
    ]
    names = [text["name"] for text in next(iter(found.values()))["texts"]]
    print(format_table(("setting, r=64", "smaller", *names, "at most"), rows))
    print(f"written to {path}")
    return 0 if all(map(_is_kept, found.values())) else 1


def _ratio(text: dict[str, Any]) -> float:
    return float(text["perplexity"] / text["reference_perplexity"])


def _is_kept(entry: dict[str, Any]) -> bool:
    own = next(text for text in entry["texts"] if text["name"] == HELD_OUT)
    return _ratio(own) <= float(entry["at_most"])


def _attnquant(*arguments: object) -> Any:
    """Run the command; return its JSON, or None if it prints none."""
    command = [str(Path(sys.executable).with_name("attnquant")), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout) if "--json" in arguments else None


if __name__ == "__main__":
    sys.exit(main())
