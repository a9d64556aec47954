"""The trainer: its stream of samples, micro-batches, losses, learners, ranks and steps."""
