"""Llama's layers."""
