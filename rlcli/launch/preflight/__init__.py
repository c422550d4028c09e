"""What can be told of a recipe before a model is loaded: its rows, tokens, templates, rewards and files."""
