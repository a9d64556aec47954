"""Packs bytes of which some are more frequent than others with zstd, and unpacks them."""

from __future__ import annotations

import threading

import zstandard

from infra.weights.weights_error import WeightsError

# Exponents repeat by chance only, and to say where costs more than to say them again. So zstd looks for
# long repeats only, in a table that is soon overwritten, and codes the rest by how often each byte occurs.
# That is 2 % less than at its level 1 where weights have one scale, .4 % where they have many, in half the
# time. Higher levels find more repeats, and make more bytes of it.
_OPTIONS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17
)


_own = threading.local()  # a decompressor per thread: making one takes as long as decoding a small tensor


def by_frequency() -> zstandard.ZstdCompressor:
    """Return a compressor that codes bytes by how often each occurs. It is for one thread."""
    return zstandard.ZstdCompressor(compression_params=_OPTIONS)


def unzstd(data: bytes | memoryview, size: int, what: str) -> bytes:
    """Unpack `size` bytes that zstd has packed. Raises WeightsError if there are more or fewer."""
    try:
        if zstandard.get_frame_parameters(data).content_size > size:  # zstd would take memory for it
            raise WeightsError(f"{what} is damaged: it holds more than {size} bytes")
        found: bytes = _decompressor().decompress(data, max_output_size=max(1, size))
    except zstandard.ZstdError as error:
        raise WeightsError(f"{what} is damaged: {error}") from error
    if len(found) != size:
        raise WeightsError(f"{what} is damaged: it holds {len(found)} bytes, not {size}")
    return found


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_own, "decompressor"):
        _own.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _own.decompressor
    return found
