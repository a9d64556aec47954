"""Children: how they start, and how much processor time they have used."""

from __future__ import annotations

import subprocess
import sys

from infra.code import ROOT
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


STANDS_STILL = """
import os, sys, time
os.register_at_fork(after_in_child=lambda: time.sleep(600))
from infra.supervise.children import start_child
print(start_child([sys.executable, "-S", "-c", "pass"]).wait(60))
"""


def test_nothing_of_a_process_runs_in_its_child_before_the_command() -> None:
    """A library's hook, or a lock that another thread holds, would stop the child for ever."""
    done = subprocess.run([sys.executable, "-c", STANDS_STILL], cwd=ROOT, capture_output=True, timeout=60)
    assert done.stdout == b"0\n", done.stderr
