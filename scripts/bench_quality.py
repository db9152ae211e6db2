"""What decomposition costs a model, in perplexity, on texts that it was not fitted to.

Calibrates on MAX, decomposes at the settings below, and compares each bundle with the
original on both held-out texts. Exits with 1 if a setting misses the ratio it should
keep on the text of the kind that the calibration text is of. Settings without such a
ratio stand beside the others for comparison.
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
    """Options of `attnquant decompose`, and the largest ratio of perplexities.

    `at_most` is None where no ratio is asked for. `like` names an earlier setting: what
    its bundle takes is the budget, in place of a rank.
    """

    name: str
    options: tuple[str, ...]
    at_most: float | None = None
    like: str | None = None
    weighted: bool = True


SETTINGS = (
    Setting("G=17 all", ("--blocks", "17"), 1.30),
    Setting("G=9 q and k", ("--blocks", "q_proj=9,k_proj=9"), 1.7),
    Setting("G=9 attention", ("--blocks", "9", "--tie", "attn"), 2.1),
    Setting("G=9 all", ("--blocks", "9"), 8.0),
    Setting("G=9 all, ranks by budget", ("--blocks", "9"), like="G=9 all"),
    Setting("G=9 all, bands searched", ("--blocks", "9", "--bands", "auto")),
    Setting("G=9 all, plain method", ("--blocks", "9"), weighted=False),
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
    found: dict[str, Any] = {}
    path = options.out / "bench_quality.json"
    for setting in SETTINGS:
        found[setting.name] = _measure(
            setting, found, options.checkpoint, statistics, options.out
        )
        # After each, since all of them take long.
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    rows = [
        (
            name,
            f"{entry['ratio']:.2f}",
            *(f"{_ratio(text):,.3f}" for text in entry["texts"]),
            "-" if entry["at_most"] is None else f"{entry['at_most']}",
        )
        for name, entry in found.items()
    ]
    names = [text["name"] for text in next(iter(found.values()))["texts"]]
    print(format_table(("setting, r=64", "smaller", *names, "at most"), rows))
    print(f"written to {path}")
    return 0 if all(map(_is_kept, found.values())) else 1


def _measure(
    setting: Setting,
    found: dict[str, Any],
    checkpoint: Path,
    statistics: Path,
    out: Path,
) -> dict[str, Any]:
    """Make a setting's bundle in `out` and compare it with the original."""
    bundle = out / setting.name.replace(" ", "-").replace(",", "")
    if setting.like is None:
        size = ("--rank", RANK)
    else:
        size = ("--budget", str(found[setting.like]["bundle_bytes"]))
    fitted_to = ("--statistics", statistics) if setting.weighted else ()
    made = _attnquant(
        *("decompose", checkpoint, "--out", bundle, "--overwrite", "--json"),
        *(*fitted_to, *size, *setting.options),
    )
    compared = _attnquant("eval", bundle, "--reference", checkpoint, "--json")
    return {
        "at_most": setting.at_most,
        "texts": compared["texts"],
        **{
            name: made[name]
            for name in (
                "ratio",
                "bundle_bytes",
                "ranks",
                "base_ranks",
                "error",
                "weighted_error",
                "seconds",
            )
        },
    }


def _ratio(text: dict[str, Any]) -> float:
    return float(text["perplexity"] / text["reference_perplexity"])


def _is_kept(entry: dict[str, Any]) -> bool:
    if entry["at_most"] is None:
        return True
    own = next(text for text in entry["texts"] if text["name"] == HELD_OUT)
    return _ratio(own) <= float(entry["at_most"])


def _attnquant(*arguments: object) -> Any:
    """Run the command; return its JSON, or None if it prints none."""
    command = [str(Path(sys.executable).with_name("attnquant")), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout) if "--json" in arguments else None


if __name__ == "__main__":
    sys.exit(main())
