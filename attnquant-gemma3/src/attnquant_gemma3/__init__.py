"""Gemma 3 for AttnQuant: `Gemma3ForCausalLM` with shared bases."""

__version__ = "0.1.0"
