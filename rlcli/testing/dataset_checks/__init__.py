"""The parts of the contract of datasets."""
