"""`python -m prefect`, with a server that can't wait for its own database: the local one is started by this.

An SQLite cursor that is in a cycle of references is closed by Python's garbage collector. In the thread of
the server's event loop that waits while another thread waits for the database's lock on the same connection,
and the request that holds the lock can't go on without the loop: nobody gets an answer for a minute, until
the wait for the lock is given up. So a thread of its own collects garbage, and nobody waits for that one.
"""

import gc
import threading
import time

_EVERY_S = 0.2  # a look at whether there is enough to collect


def collect_apart() -> None:
    """From now on, collect garbage in a thread of its own."""
    gc.disable()
    threading.Thread(target=_collect, name="garbage", daemon=True).start()


def _collect() -> None:
    """Collect what the collector would: young objects when there are many, old ones less often."""
    while True:
        time.sleep(_EVERY_S)
        for generation in (2, 1, 0):
            if gc.get_count()[generation] > gc.get_threshold()[generation]:
                gc.collect(generation)
                break


if __name__ == "__main__":
    collect_apart()
    from prefect.cli import app

    app()
