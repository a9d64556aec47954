"""Versions of weights as Hugging Face folders: promoted, exported, pushed, pulled, audited."""
