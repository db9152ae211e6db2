"""Bundles as a page to look at: what was shared, what it cost, and where."""
