"""Recipes: layers of YAML and overrides become one validated recipe in which every value knows its
origin.

`load_recipe(recipe, overrides)` in `rlcli.recipe.resolve` is the way in. `parsing` makes a tree of
text, `validation` checks it against `schema`, `introspection` describes keys to people and editors.
Nothing here imports torch.
"""
