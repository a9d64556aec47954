"""Children: how much processor time they have used."""

from __future__ import annotations

import sys

from infra.supervise.children import cpu_s, kill, start_child, used_s
from tests.waiting import wait_until


def test_what_children_have_used_is_counted_also_when_they_have_ended() -> None:
    before = cpu_s()
    busy = start_child([sys.executable, "-c", "while True: pass"])
    wait_until(lambda: used_s(busy) > 0.3, what="some processor time")
    alive = cpu_s()
    assert alive - before > 0.25
    kill(busy)
    assert used_s(busy) == 0.0
    assert cpu_s() >= alive - 0.02  # a tick of the clock that /proc counts in
