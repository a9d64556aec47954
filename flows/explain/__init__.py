"""Explains a run that went wrong: the first bad step, its stage, the sample, the likely cause, and why.

ledger, prompts, evaluations, failed steps ──► detectors ──► findings, the likeliest cause first
                                                   │
             samples of suspect steps, computed anew by transformers' own model; steps that are taken again

A detector is a class with the failure that it is for, and `look`. Detectors that read the ledger come first,
then those that compute.
"""
