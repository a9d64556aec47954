"""What every process of a run has: its arguments, its run, log, heartbeat and an orderly end."""
