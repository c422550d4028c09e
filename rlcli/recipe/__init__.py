"""Recipes: layers of YAML and overrides become one validated recipe in which every value knows its
origin.

`load_recipe(recipe, overrides)` in `rlcli.recipe.resolve` is the way in. `parsing` makes a tree of
text, `expansion` spells out in it what follows from the rest, `validation` checks it against
`schema` and `sections`, `introspection` describes keys to people and editors, and `authoring`
writes recipes. The modules next to these answer questions about a recipe: what its components
declare (`components`), how its calls depend on each other (`graph`), which devices a role has
(`mesh`).
Nothing here imports torch.
"""
