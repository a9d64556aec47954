"""Dictionaries that packed records name by their hash. None is changed or removed: old records need them."""
