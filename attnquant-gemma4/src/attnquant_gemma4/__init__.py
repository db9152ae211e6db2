"""Gemma 4 for AttnQuant: `Gemma4ForConditionalGeneration` with shared bases."""

__version__ = "0.1.0"
