"""Starting a run: in this process, or as ranks under torchrun."""
