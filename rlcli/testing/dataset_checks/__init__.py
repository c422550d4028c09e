"""What the contract of datasets is made of."""
