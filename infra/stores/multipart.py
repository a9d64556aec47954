"""Sends a large object to S3 in parts, several at once, and holds only the parts that are under way.

The last request commits the object. Until then the old object stands, and an error leaves nothing behind.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_SMALLEST, _MOST = 32 << 20, 9_000  # least bytes of a part, most parts; S3 takes 10,000 of at least 5 MiB
_UNDER_WAY = 4


def put_in_parts(fs: Any, path: str, parts: Iterable[bytes | memoryview], size: int) -> None:
    """Send an object of `size` bytes through s3fs."""
    bucket, _, key = path.partition("/")
    named = {"Bucket": bucket, "Key": key}
    upload = {**named, "UploadId": fs.call_s3("create_multipart_upload", **named)["UploadId"]}

    def send(number: int, data: bytes) -> dict[str, Any]:
        said = fs.call_s3("upload_part", **upload, PartNumber=number, Body=data)
        return {"PartNumber": number, "ETag": said["ETag"]}

    try:
        with ThreadPoolExecutor(_UNDER_WAY) as pool:
            done: list[dict[str, Any]] = []
            ahead: deque[Future[dict[str, Any]]] = deque()
            for number, data in enumerate(_joined(parts, max(_SMALLEST, -(-size // _MOST))), 1):
                ahead.append(pool.submit(send, number, data))
                if len(ahead) >= _UNDER_WAY:
                    done.append(ahead.popleft().result())
            done += [future.result() for future in ahead]
        fs.call_s3("complete_multipart_upload", **upload, MultipartUpload={"Parts": done})
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            fs.call_s3("abort_multipart_upload", **upload)
        raise


def _joined(parts: Iterable[bytes | memoryview], size: int) -> Iterator[bytes]:
    """Yield the same bytes in pieces of `size`; the last piece may be shorter."""
    held = bytearray()
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), size):  # never more than a piece and a part are held
            held += view[at : at + size]
            while len(held) >= size:
                yield bytes(held[:size])
                del held[:size]
    yield bytes(held)
