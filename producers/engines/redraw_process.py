"""The engine process that draws recorded samples again: batch after batch, and nothing beside.

`streamrl replay --regenerate` starts it. The engine is the one that generators run.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec

from producers.engines.engine import LocalEngine
from producers.engines.engine_messages import Report
from producers.engines.engine_process import answer, link_and_engine, report_of
from producers.engines.redrawing import OutOfStep, RedrawBatch, redraw

_batches = msgspec.msgpack.Decoder(RedrawBatch)
_encode = msgspec.msgpack.Encoder().encode


def main() -> None:
    """Draw batches until the process that started this one closes the connection."""
    answer(*link_and_engine(), serve_redraws)


def serve_redraws(link: Connection, engine: LocalEngine) -> None:
    """Draw each batch that comes; the answer to one that is out of step is empty."""
    while True:
        batch = _batches.decode(link.recv_bytes())
        found: list[Report]
        try:
            found = [report_of(one) for one in redraw(engine, batch)]
        except OutOfStep:
            found = []
        link.send_bytes(_encode(found))


if __name__ == "__main__":
    main()
