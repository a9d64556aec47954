"""Keeps the two sides of a run balanced: how many generators it needs, as lengths change."""
