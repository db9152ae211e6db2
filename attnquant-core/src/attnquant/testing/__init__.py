"""Helpers for testing architectures; the tests of plugins use them too."""
