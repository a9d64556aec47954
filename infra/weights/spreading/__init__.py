"""Which site gets which chunk of a version from where."""
