"""Helpers of the Gemma 3 tests: an oracle, tiny checkpoints, golden records.

Nothing here imports `attnquant`, MAX or torch: what judges the package must not
share code with it.
"""
