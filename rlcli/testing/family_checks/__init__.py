"""The parts of the contract of model families."""
