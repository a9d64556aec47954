"""The Prefect server's garbage: not one finalizer of it runs in the thread of the event loop."""

import subprocess
import sys

_CODE = """
import threading, time
from infra.stack.prefect_main import collect_apart

class Cursor:
    closed_in = []
    def __init__(self): self.me = self
    def __del__(self): Cursor.closed_in.append(threading.current_thread().name)

collect_apart()
until = time.monotonic() + 30
while not Cursor.closed_in and time.monotonic() < until:
    kept = [Cursor() for _ in range(1000)]
print(set(Cursor.closed_in))
"""


def test_a_thread_of_its_own_closes_cursors_in_cycles() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'garbage'}", done.stdout
