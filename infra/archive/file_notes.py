"""Notes of files that may have to be removed: their names, as a JSON list."""

from __future__ import annotations

import json
from contextlib import suppress

from infra.stores.store import Missing, Store


def noted_names(store: Store, key: str, largest: int) -> list[str]:
    """Return the names in a note; none if it can't be read. `largest`: bytes."""
    with suppress(ValueError, RecursionError, Missing):
        said = json.loads(store.get(key, largest)[:largest])
        if isinstance(said, list):
            return [one for one in said if isinstance(one, str)]
    return []
