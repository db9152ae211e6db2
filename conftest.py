"""Test helpers of every package can be imported by every test, and nothing more."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parent

# As a glob, which pytest's `pythonpath` does not take: a new package edits no list.
for _folder in sorted(_ROOT.glob("attnquant-*/tests")):
    sys.path.append(str(_folder))
sys.path.append(str(_ROOT / "scripts"))
