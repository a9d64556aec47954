"""The kinds of object stores by the scheme of their URLs.

A store is opened by its URL before anything else of a run is known, by commands too. So a store of a user's
own is named in the environment, or by an installed package, and not in the run file.
"""

from __future__ import annotations

import os

from schemas.registry import Registry

OWN_STORES = "STREAMRL_STORES"  # SCHEME=FILE.py:CLASS, several with commas
STORES = Registry(word="store", folder="infra.stores", ending="store")


def own_stores() -> dict[str, str]:
    """Return where the store of each scheme is that is not ours, as `FILE.py:CLASS` or `module:CLASS`."""
    pairs = [one.partition("=") for one in os.environ.get(OWN_STORES, "").split(",") if one.strip()]
    return STORES.installed() | {scheme.strip(): where.strip() for scheme, _, where in pairs}


def has_scheme(scheme: str) -> bool:
    """Whether a scheme is one of ours or of own_stores()."""
    return scheme in STORES.built_in() or scheme in own_stores()
