"""Running a recipe: one master worker decides what runs when;
model workers hold the models and tensors."""
