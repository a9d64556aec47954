"""A background thread: its owner hears what ended it."""

from __future__ import annotations

import threading

import pytest

from infra.background import Background


def test_the_owner_raises_the_error_that_ended_it() -> None:
    def work() -> None:
        raise ValueError("nobody has foreseen")

    thread = Background(work, "it")
    thread.check()
    thread.start()
    thread.join()
    for _ in range(2):  # each time that it is asked
        with pytest.raises(ValueError, match="nobody has foreseen"):
            thread.check()


def test_it_works_beside_its_owner_and_ends_in_silence() -> None:
    go, names = threading.Event(), list[str]()

    def work() -> None:
        assert go.wait(10)
        names.append(threading.current_thread().name)

    thread = Background(work, "it")
    thread.start()
    go.set()
    thread.join()
    thread.check()
    assert names == ["it"]
