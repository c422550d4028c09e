"""What there is to know about keys and recipes: types, docs and defaults; completion,
JSON Schema, explanations."""
