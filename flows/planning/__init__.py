"""Plans a run before it starts: how fast each part of it would be, and how to split the machines."""
