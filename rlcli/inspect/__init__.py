"""What can be known before a run starts: of rows, tokens, templates, rewards and files, and of this machine."""
