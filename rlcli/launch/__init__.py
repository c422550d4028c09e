"""Starts runs: in this process, or as ranks under torchrun."""
