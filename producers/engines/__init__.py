"""Engines: programs that draw the tokens of samples, and the classes that drive them."""
