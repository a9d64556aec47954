"""The trainer: stream, batches, learner, checkpoint, publisher."""
