"""Which instance generates which sample, and when."""
