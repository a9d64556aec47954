"""Which instance generates which sample, and when."""

REPORT_S = 0.5  # how often an instance says that it is there
