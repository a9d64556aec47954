"""Generators at a far site, as far as weights are concerned: each says when it has which version."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from producers.weights_watch import WeightsWatch


def body(context: RoleContext) -> None:
    """So many as READERS says, until told to stop."""
    bell = threading.Event()
    tails = [WeightsWatch(context, bell).open() for _ in range(int(os.environ["READERS"]))]
    try:
        while True:
            context.check_stop()
            for number, tail in enumerate(tails):
                for version in tail.take():
                    said = {"reader": number, "version": version.version, "root": version.root}
                    print(json.dumps(said | {"at": time.time()}), flush=True)
            bell.wait(0.2)
            bell.clear()
    finally:
        for tail in tails:
            tail.close()


if __name__ == "__main__":
    sys.exit(run_role("generator", body))
