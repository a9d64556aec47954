"""The bug zoo: small real runs, each with one fault that has cost people days, to try detectors on.

    fault ──► plants itself in a world ──► a run of some seconds: ledger, log, store ──► streamrl explain

A world has the real trainer, ledger, checkpoints and weight plane. Its generators are a model of transformers
that draws tokens one by one, so that a fault can be planted at any place: in what it is told, computes, or
says. `faults.py` lists the faults, and what has to be named of each. `python -m tests.bench zoo` runs all.
"""
