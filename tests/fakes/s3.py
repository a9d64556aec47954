"""An S3 server that answers what it is told: errors as they are on the wire, through botocore and s3fs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass(frozen=True)
class Answer:
    """One refusal."""

    status: int
    code: str = ""
    message: str = "No."
    condition: str = ""

    def body(self) -> bytes:
        more = f"<Condition>{self.condition}</Condition>" if self.condition else ""
        return f"<Error><Code>{self.code}</Code><Message>{self.message}</Message>{more}</Error>".encode()


@dataclass
class Scripted:
    """What is told, and what was asked. When nothing is left to tell, objects are put and got."""

    url: str
    answers: deque[Answer] = field(default_factory=deque)
    asked: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    overwrites: bool = False  # knows no If-None-Match


def _handler(told: Scripted) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _say(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _refused(self) -> bool:
            told.asked.append(self.command)
            if not told.answers:
                return False
            answer = told.answers.popleft()
            self._say(answer.status, answer.body())
            return True

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            once = self.headers.get("If-None-Match") == "*" and not told.overwrites
            if self._refused():
                pass
            elif once and self.path in told.objects:
                self._say(412, Answer(412, "PreconditionFailed", condition="If-None-Match").body())
            else:
                told.objects[self.path] = data
                self._say(200)

        def do_GET(self) -> None:
            if self._refused():
                pass
            elif self.path in told.objects:
                self._say(200, told.objects[self.path])
            else:
                self._say(404, Answer(404, "NoSuchKey").body())

        def do_DELETE(self) -> None:
            if not self._refused():
                told.objects.pop(self.path, None)
                self._say(204)

    return Handler


@contextmanager
def scripted() -> Iterator[Scripted]:
    """The server, on a free port."""
    told = Scripted("")
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(told)) as server:
        told.url = f"http://127.0.0.1:{server.server_address[1]}"
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield told
        finally:
            server.shutdown()
