"""Helpers of the core tests: tiny models, an oracle, fake plugins, fresh processes.

What judges the package must not share code with it: nothing here imports `attnquant`,
except to make bundles, and in text that fake plugins and fresh processes run.
"""
