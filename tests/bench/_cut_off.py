"""A process in a clean folder, cut off from everything: takes the steps of step files again.

unshare -rn python -m tests.bench._cut_off FOLDER BROKER
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

from flows.run.replaying import replaying


def main(folder: Path) -> list[int]:
    """Take the steps of all step files in a folder again; return how many are equal, and of how many."""
    equal = count = 0
    for file in sorted(folder.glob("*.tar.zst")):
        with replaying(str(file), "", lambda done, total: None) as opened:
            assert opened.index is not None
            for found in opened.again.each(opened.index.first, opened.index.last):
                equal, count = equal + found.equal, count + 1
    return [equal, count]


def reaches(server: str) -> bool:
    """Whether a server answers."""
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(json.dumps({"reaches_broker": reaches(sys.argv[2]), "equal": main(Path(sys.argv[1]))}))
