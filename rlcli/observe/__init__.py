"""The output of a run: folder, metrics, samples, display, learning curve and report."""
