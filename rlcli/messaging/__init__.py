"""How the processes of a run find each other, talk, and notice that one is gone. Nothing here knows
a recipe or a model."""
