"""Helpers of the Gemma 3 tests: an oracle, tiny checkpoints, golden records.

`oracle`, `tiny`, `checkpoint` and `golden` import neither `attnquant` nor MAX nor
torch: what judges the package must not share code with it. `parity` serves a model
with the package and holds it against them.
"""
