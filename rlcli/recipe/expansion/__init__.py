"""What a recipe need not say because it follows from the rest: each module spells one such thing
out in the tree."""
