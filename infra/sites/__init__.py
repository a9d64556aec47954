"""A site far from the object store: each byte of weights is brought there once, however many need it."""
