"""Gemma 3's layers."""
