"""The page of a run: one HTML file with its curves, the time of its processes, its samples and settings."""
