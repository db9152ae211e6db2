"""Gemma 4's layers."""
