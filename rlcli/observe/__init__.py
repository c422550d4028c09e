"""What a run shows and leaves behind: folder, metrics, samples, display, learning curve and report."""
