"""The losses: a file for each one, `NAME_loss.py`, with its settings, and the parts that they share."""
