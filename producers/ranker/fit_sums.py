"""The sums of a least-squares fit of three weights, as a ranker's file has them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def fit_sums(arrays: Mapping[str, np.ndarray], part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return copies of a part's sums. Raises KeyError or ValueError if one is missing or does not fit."""
    square, product = arrays["square"], arrays["product"]
    if square.shape != (3, 3) or product.shape != (3,):
        raise ValueError(
            f"{part}.square has shape {square.shape} and {part}.product {product.shape}; "
            "(3, 3) and (3,) are expected"
        )
    return square.copy(), product.copy()
