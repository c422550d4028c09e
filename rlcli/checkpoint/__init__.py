"""Models on disk: read from and written for Hugging Face."""
