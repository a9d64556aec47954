"""The frame of every process of a run: its arguments, record, log, heartbeat and orderly end."""
