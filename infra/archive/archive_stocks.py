"""The archives of runs as stocks of records, by the names of their topics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from infra.archive.archive_reading import ArchiveIndex, ArchiveStock
from infra.archive.archived_topics import KINDS, split_name
from infra.errors import Explained
from infra.stores.store import Store, StoreError

IdentityOf = Callable[[str], str]  # the identity of a run, by its id


class ArchiveStocks(Mapping[str, ArchiveStock]):
    """The archives of the runs whose topics are asked for. Each run's is opened when it is first needed."""

    def __init__(self, store: Store, identity_of: IdentityOf, *, still: bool = False) -> None:
        """`identity_of`: raises Explained if the store has no such run.

        `still`: an archive stays as it was when it was first looked at, whatever passes add to it.
        """
        self._store, self._identity_of, self._still = store, identity_of, still
        self._indexes: dict[str, ArchiveIndex | None] = {}
        self._stocks: dict[str, ArchiveStock] = {}

    def index(self, run: str) -> ArchiveIndex | None:
        """Return the segments of a run's archive; None if the store has no such run.

        Raises StoreError if the store can't be asked: the archive may be there.
        """
        if run not in self._indexes:
            try:
                identity = self._identity_of(run)
                self._indexes[run] = ArchiveIndex(self._store, run, identity, still=self._still)
            except StoreError:
                raise
            except Explained:
                self._indexes[run] = None
        return self._indexes[run]

    def __getitem__(self, topic: str) -> ArchiveStock:
        if topic not in self._stocks:
            run, short = split_name(topic)
            index = self.index(run) if short in KINDS else None
            if index is None:
                raise KeyError(topic)
            self._stocks[topic] = ArchiveStock(index, topic, short)
        return self._stocks[topic]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stocks)

    def __len__(self) -> int:
        return len(self._stocks)
