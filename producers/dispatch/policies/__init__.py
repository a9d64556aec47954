"""The dispatch policies: a file for each one, `NAME_policy.py`, with its settings."""
