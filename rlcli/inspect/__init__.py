"""What can be known before a run starts: about rows, tokens, templates, rewards and files, and
about this machine."""
