"""What the contract of model families is made of."""
