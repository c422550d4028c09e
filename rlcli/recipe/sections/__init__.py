"""The longer sections of a recipe; `schema` has the others, and puts them together."""
