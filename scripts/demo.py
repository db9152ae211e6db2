"""The demo: decompose a checkpoint, generate from the bundle with MAX, show a table.

Two bundles are made. The first is a passthrough (one band per layer): it is the
original model in theta form, so its text is the original's. The second shares bases
among layers, for its figures; what such a bundle is worth as a model is in the docs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnquant.cli.text import format_table
from attnquant.sizes import format_bytes

PROMPT = "The capital of France is"
NEW_TOKENS = 16
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Bundle:
    """A bundle to make: its name, and the options of `attnquant decompose`."""

    name: str
    options: tuple[str, ...]


def main() -> int:
    options = _parse()
    layers = _layer_count(options.checkpoint)
    bundles = (
        Bundle("passthrough", ("--blocks", str(layers))),
        Bundle(
            "shared-attention",
            ("--blocks", str(layers // 2), "--rank", "64", "--tie", "attn"),
        ),
    )
    try:
        summaries = [_decompose(options.checkpoint, options.out, b) for b in bundles]
        text = _generate(options.out / bundles[0].name)
    except subprocess.CalledProcessError as error:
        print(f"demo: {error.cmd[0]} failed, see above", file=sys.stderr)
        return 1
    print(f"\n{PROMPT}{text}\n")
    print(_table(summaries))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _layer_count(checkpoint: Path) -> int:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return int(config["num_hidden_layers"])


def _run(command: list[str]) -> str:
    print("$", " ".join(command), flush=True)
    # Progress and MAX's log go to stderr, and so to the terminal.
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def _decompose(checkpoint: Path, out: Path, bundle: Bundle) -> dict[str, Any]:
    command = [str(BIN / "attnquant"), "decompose", str(checkpoint)]
    command += ["--out", str(out / bundle.name), *bundle.options]
    summary: dict[str, Any] = json.loads(_run([*command, "--overwrite", "--json"]))
    return summary


def _generate(bundle: Path) -> str:
    print("Compiling takes some minutes the first time; MAX caches the result.")
    os.environ.pop("ATTNQUANT_BLOCKS", None)
    command = [str(BIN / "max"), "generate", "--model", str(bundle)]
    command += ["--custom-architectures", "attnquant", "--devices", "cpu"]
    command += ["--quantization-encoding", "float32", "--max-length", "1024"]
    command += ["--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS)]
    return _text_of(_run(command))


def _text_of(output: str) -> str:
    """Return the generated text: MAX prints it before its own statistics."""
    return output.partition("\nPrompt size:")[0].rstrip()


def _table(summaries: list[dict[str, Any]]) -> str:
    source = summaries[0]["source_bytes"]
    rows = [("original", format_bytes(source), "1.00", "0.0000")]
    for summary in summaries:
        worst = max(summary["error"].values())
        size = format_bytes(summary["bundle_bytes"])
        name = Path(summary["bundle"]).name
        rows.append((name, size, f"{summary['ratio']:.2f}", f"{worst:.4f}"))
    header = ("model", "size", "times smaller", "largest relative error of a family")
    return format_table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
