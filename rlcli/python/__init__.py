"""What `import rlcli` offers to scripts and notebooks: see docs/python.md."""
