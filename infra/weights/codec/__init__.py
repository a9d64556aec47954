"""A lossless code for what changed between two versions of a model, and for whole models.

    old, new ──► scan ──► per band: gaps, steps ──► streams ──► groups ──► chunks
    old ◄────── apply ◄───────────────────────────────────────────────────┘

The receiver has the old weights. How likely a weight is to change follows from its exponent: it doubles with
each lower one, for the same update moves more steps of the last place. So weights are told apart in bands, by
the exponent of the old one. In each band is coded how many weights stay as they are before one that doesn't
(gap), and by how many steps of the last place that one moves (step).

    file         what it has
    tiles        where a model is cut: what is scanned, hashed and verified by itself
    bands        which exponents go together
    scan         gaps and steps of one tile, and back: `scan_fast` compiled (`kernels` has its loops),
                 `scan_plain` in numpy, `scan_gpu` on a GPU
    streams      integers to bytes and back: pcodec, zstd, raw, or `wide` where they are very many
    whole        tiles as they are
    groups       tiles that share streams: banded, or whole
    encoding     tiles to groups
    covered      which elements a way has named: each once
    decoding     groups to tiles, each verified
    chunks       groups that are one object of the store
"""
