"""A lossless code for what changed between two versions of a model, and for whole models.

    old, new ──► scan ──► per band: gaps, steps ──► streams ──► groups ──► chunks
    old ◄────── apply ◄───────────────────────────────────────────────────┘

The receiver has the old weights. How likely a weight is to change follows from its exponent: with each lower
exponent it doubles, for the same update then moves more steps of the last place. So weights are sorted into
bands by the exponent of the old weight. For each band the code says how many weights stay before one that
changes (gap), and by how many steps of the last place that one moves (step).

    file         content
    tiles        the pieces of a model that are each scanned, hashed and verified by themselves
    bands        the choice of exponents that form a band
    scan         gaps and steps of one tile, and back: `scan_fast` compiled (`kernels` has its loops),
                 `scan_plain` in numpy
    rows         tensors of which few rows change
    streams      integers to bytes and back: pcodec, zstd, raw, or `wide` where there are very many
    whole        tiles coded whole, without old ones
    groups       tiles that share streams: banded, or whole
    encoding     tiles to groups
    covered      the elements that a path has named: each only once
    decoding     groups to tiles, each verified
    chunks       groups that are one object of the store

Weights that lie on a GPU stay there, and the chunks are the same:

    laid_tiles     all tiles of a run, one behind the other
    gpu_encoding   what changes in them; the processor codes it
    gpu_decoding   changes made in them, and verified
    gpu_hash       their hashes
    gpu_kernels    the kernels of all that, in Triton
"""
