"""Runs a run in virtual time: the code that decides is the real one, and what takes time is told how long."""
