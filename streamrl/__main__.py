"""`python -m streamrl` is the command `streamrl`."""

from __future__ import annotations

from flows.cli import main

if __name__ == "__main__":
    main()
