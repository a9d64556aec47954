"""Trackers: where the metrics of a run go besides its folder. A file for each kind, `NAME_tracker.py`."""
