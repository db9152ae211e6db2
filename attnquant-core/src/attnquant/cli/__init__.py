"""The `attnquant` command."""
