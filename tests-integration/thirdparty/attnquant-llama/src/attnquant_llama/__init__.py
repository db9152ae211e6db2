"""Llama for AttnQuant: `LlamaForCausalLM` with shared bases."""

__version__ = "0.1.0"
