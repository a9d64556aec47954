"""The benches' command line."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import signal
import sys

import tests.bench as benches


def main() -> None:
    """Run one bench."""
    # In the background too, and however it is told to end: what it has started ends with it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    names = sorted(m.name for m in pkgutil.iter_modules(benches.__path__) if hasattr_main(m.name))
    # Behind a name, --help is the bench's own.
    own_help = not sys.argv[1:] or sys.argv[1] not in names
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=benches.__doc__, add_help=own_help
    )
    parser.add_argument("name", choices=names)
    parser.add_argument("--quick", action="store_true", help="some minutes, with wider error")
    given, rest = parser.parse_known_args()
    result = importlib.import_module(f"tests.bench.{given.name}").main(quick=given.quick, argv=rest)
    sys.stdout.flush()
    print(f"BENCH {given.name} {json.dumps(result)}")


def hasattr_main(name: str) -> bool:
    """A bench is a module of this folder that does not begin with an underscore."""
    return not name.startswith("_")


main()
