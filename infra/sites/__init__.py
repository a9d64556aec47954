"""A site far from the object store: each byte of weights crosses the way to it once, whoever needs it."""
