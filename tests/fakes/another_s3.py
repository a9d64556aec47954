"""Another S3 server, moto's, in a process of its own: vLLM does not start where werkzeug is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import s3fs

from infra.stack.s3 import Credentials, S3Access


@contextmanager
def moto() -> Iterator[S3Access]:
    """The server with an empty bucket, on a free port."""
    command = [sys.executable, "-m", "tests.fakes.another_s3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        access = S3Access(f"http://127.0.0.1:{port}", "bucket", Credentials("key", "secret"))
        s3fs.S3FileSystem(endpoint_url=access.endpoint_url, key="key", secret="secret").mkdir(access.bucket)
        yield access


def _serve() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()  # until who started it is gone


if __name__ == "__main__":
    _serve()
