"""Helpers of the Gemma 4 tests: an oracle, tiny checkpoints, golden records.

Nothing here but `parity` imports `attnquant` or MAX, and nothing torch: what judges
the package must not share code with it.
"""
