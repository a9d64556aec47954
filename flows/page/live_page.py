"""Serves the page of a run on the loopback address. The page asks for a newer one every few seconds.

A page is made when a browser asks for it, and no more often than every two seconds, however many ask. Each
time only what is new is read: lines of the files, records of the topics.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

from flows.page.page import page_html
from flows.page.page_data import PageData, SaidState
from flows.page.page_file import add_facts, add_samples, topics_of
from flows.page.run_files import RunFiles
from flows.page.topic_facts import TopicFacts, facts_of
from flows.view.follow import Follower
from infra.runs import RunRecord
from infra.stack.ports import LOOPBACK
from infra.stores.store import Store

REFRESH_S = 3.0
_PAGE_S, _SAMPLES_S, _FIRST_S = 2.0, 10.0, 8.0


class Pages(Protocol):
    """Gives the newest page."""

    def page(self) -> bytes:
        """Return the page."""


class LivePage:
    """The newest page of a run. `close` ends it."""

    def __init__(
        self, record: RunRecord, store: Store, folder: Path, state: Callable[[], SaidState] = SaidState
    ) -> None:
        """`state` says how the run is, as its flow says."""
        self._record, self._store, self._state = record, store, state
        self._files, self._follower = RunFiles(folder), Follower(record)
        self._lock, self._end = threading.Lock(), threading.Event()
        self._page, self._made_at = b"", -_PAGE_S
        self._read: TopicFacts | None = None  # with the newest texts of samples
        self._reading = threading.Thread(target=self._read_samples, name="samples", daemon=True)

    def open(self) -> LivePage:
        """Begin to follow the run. Return itself."""
        self._follower.__enter__()
        self._reading.start()
        self._follower.wait_for(lambda view: view.live or bool(view.trouble), _FIRST_S)
        return self

    def close(self) -> None:
        """End following."""
        self._end.set()
        self._follower.__exit__(None, None, None)

    def page(self) -> bytes:
        """Return the page; it is made anew if it is older than two seconds."""
        with self._lock:
            if time.monotonic() - self._made_at >= _PAGE_S:
                self._page = self._made().encode()
                self._made_at = time.monotonic()
            return self._page

    def _made(self) -> str:
        self._files.refresh()
        data = PageData(self._record, self._files, said=self._state())
        trouble, facts = self._follower.see(lambda view: (view.trouble, facts_of(view)))
        if self._read is not None:
            facts.samples, facts.samples_missing = self._read.samples, self._read.samples_missing
        add_facts(data, None if trouble and not facts.rows else facts, trouble, keep=False)
        if trouble and facts.rows:
            data.missing.append(trouble)
        return page_html(data, refresh_s=REFRESH_S)

    def _read_samples(self) -> None:
        """Read samples of the newest step now and then, beside the page."""
        while not self._end.is_set():
            read = TopicFacts()
            try:
                with topics_of(self._record, self._store) as handle:
                    while not self._end.is_set():
                        read = TopicFacts()
                        add_samples(read, handle)
                        self._read = read
                        if read.samples_missing:
                            break  # with another connection it may work
                        self._end.wait(_SAMPLES_S)
            except Exception as error:  # whatever it is: the page says so
                read.samples_missing = f"Samples can't be read: {str(error)[:500]}"
                self._read = read
            self._end.wait(_SAMPLES_S)


def serving(live: Pages, port: int) -> ThreadingHTTPServer:
    """Return a server of the page on the loopback address, which does not serve yet. Port 0: any free one."""

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a browser that goes away is no error
                super().handle()

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (
                LOOPBACK,
                "localhost",
            ):  # a page elsewhere whose name was made to mean this machine
                self.send_error(403, "ask for it by 127.0.0.1 or localhost")
            elif self.path.partition("?")[0] != "/":
                self.send_error(404)
            else:
                self._send(live.page())

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            for name, value in (
                ("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
                ("X-Frame-Options", "DENY"),
            ):  # fmt: skip
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Say nothing: a browser asks every few seconds."""

    server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    server.daemon_threads = True
    return server
