"""What is wrong with a recipe: types and unknown keys against the schema,
then what its sections mean together."""
