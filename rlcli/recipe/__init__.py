"""Recipes: layers of YAML and overrides become one validated recipe in which every value knows its origin.

`load_recipe(recipe, overrides)` in `rlcli.recipe.resolve` is the way in. Nothing here imports torch.
"""
