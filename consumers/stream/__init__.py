"""The stream of samples that a trainer takes in."""
