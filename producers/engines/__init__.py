"""Engines: what turns prompts into samples."""
