"""Makes plans of runs: the allocation of machines, simulated, with intervals, as rows and as a picture."""
