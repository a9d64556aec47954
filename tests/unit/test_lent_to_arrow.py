"""A query ends when arrow's threads hold none of its Python objects any more."""

from __future__ import annotations

import gc
import threading

from infra.archive.archive_tables import StoredFile
from infra.archive.lent_to_arrow import LentToArrow
from infra.roles.context import RoleContext
from tests.unit.test_archive_query import add, archive, ask
from tests.unit.test_archive_query import context as context


class One:
    pass


def held_files() -> set[int]:
    # `isinstance` would ask each object for its class, and deprecated ones of torch warn then
    return {id(one) for one in gc.get_objects() if type(one) is StoredFile}


def test_it_waits_until_another_thread_lets_go() -> None:
    lent, may_go = LentToArrow(), threading.Event()
    held = [lent.lend(One())]
    thread = threading.Thread(target=lambda: (may_go.wait(10), held.clear()))
    thread.start()
    assert not lent.wait(deadline_s=0.01)
    may_go.set()
    assert lent.wait(deadline_s=10) and not held
    thread.join()


def test_no_file_of_an_archive_is_held_after_a_query(context: RoleContext) -> None:
    add(context, range(40))
    archive(context)
    add(context, range(40, 50))
    before = held_files()
    for _ in range(3):
        assert ask(context, "select count(*) from samples") == [(50,)]
        assert held_files() <= before
