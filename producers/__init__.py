"""The Stream Generation Service: feeder, length prediction, generators and their engines."""
