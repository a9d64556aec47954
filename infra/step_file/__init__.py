"""The step file: one file with all that a replay of some steps needs, made by `streamrl bundle`.

.tar.zst ──► index.json     names, sizes and digests of all that follows, in order
             run.json       the run's record
             records/…      the ledger's steps, and their samples, as they are on the topics
             model/…        config and tokenizer of the model
             tensors/…      weights and optimizer state before the first step; other models that it needs

Whoever opens one believes only the index, and that only after it was checked: no path in it is used, nothing
in it is run, and no more is read than it says.
"""
