"""`python -m flows.cli` is `streamrl`."""

from flows.cli import main

main()
