"""Theta bundles as what other software reads: plain checkpoints, PEFT adapters."""
