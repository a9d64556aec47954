"""Learners: forward passes, gradients, optimizer steps and their state."""
