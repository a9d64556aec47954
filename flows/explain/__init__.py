"""Explains a run that went wrong: the first bad step, its stage, the sample, the likely cause, and why.

ledger, prompts, evaluations, failed steps ──► detectors ──► findings, the likeliest cause first
                                                   │
             samples of suspect steps, computed anew by transformers' own model; steps that are taken again

A detector is a class with the failure that it is for, and `look`. Those that read the ledger come first; what
they find says where those look that compute.
"""
