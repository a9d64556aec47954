"""Keeps libraries from drawing progress bars of their own over what we say."""

from __future__ import annotations


def no_model_bars() -> None:
    """Have transformers load models without progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
