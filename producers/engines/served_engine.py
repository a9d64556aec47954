"""The engine `served`: its settings. The engine itself is in `on_server.py`."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator

from producers.engines.engine import EngineSettings, lasting_error
from schemas.rank_layout import RankLayout
from schemas.runspec import RunSpec
from schemas.shortening import shown

if TYPE_CHECKING:
    from producers.engines.on_server import ServedEngine


_SHARE = 0.9


def _is_server(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{shown(url)} is no URL of a server: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"{shown(url)} is no URL of a server: write http://host:8000")
    if parts.username or parts.password:
        raise ValueError("a key comes from the environment (STREAMRL_SERVER_KEY), never from the run file")
    if parts.query or parts.fragment:
        raise ValueError(f"{shown(url)} has more than a server's address: write http://host:8000")
    return url.rstrip("/")


ServerUrl = Annotated[str, Field(min_length=1, max_length=2048), AfterValidator(_is_server)]


class ServedSettings(EngineSettings):
    """Settings of the engine served."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset({"urls"})
    on_gpu: ClassVar[bool] = False
    computes_elsewhere: ClassVar[bool] = True
    draws_again: ClassVar[bool] = False

    urls: list[ServerUrl] = Field(
        ["http://127.0.0.1:8000"],
        min_length=1,
        max_length=10_000,
        description="The addresses of servers of vLLM, counted from 0: that of number n is for generator n. "
        "Each generator needs a server of its own. A key comes from STREAMRL_SERVER_KEY.",
    )
    tensor_parallel: int = Field(
        1,
        gt=0,
        le=64,
        description="Ranks of each server: its --tensor-parallel-size.",
    )
    batch_invariant: bool = Field(
        True,
        description="Refuse a server that gives a sample other bits when others are drawn beside it. false: "
        "then steps can't be taken again bit by bit.",
    )

    @field_validator("urls", mode="before")
    @classmethod
    def _as_list(cls, urls: object) -> object:
        return [urls] if isinstance(urls, str) else urls

    @field_validator("urls")
    @classmethod
    def _once_each(cls, urls: list[str]) -> list[str]:
        if twice := sorted({url for url in urls if urls.count(url) > 1}):
            raise ValueError(f"{shown(twice[0])} is there twice: each generator needs a server of its own")
        return urls

    @property
    def layout(self) -> RankLayout:
        return RankLayout(self.tensor_parallel)

    def for_generator(self, number: int) -> ServedSettings:
        """Return the settings with the server of one generator alone."""
        if number < len(self.urls):
            return self.model_copy(update={"urls": [self.urls[number]]})
        raise lasting_error(
            f"generator.urls has {len(self.urls)} servers, and none for generator {number}: name one more"
        )

    def make(self, model: str, spec: RunSpec) -> ServedEngine:
        from producers.engines.on_server import ServedEngine
        from producers.engines.server_link import KEY_VARIABLE, ServerLink

        # a little less than the generator waits, so that this engine can still say so
        deadline_s = _SHARE * spec.deadlines.start_s
        link = ServerLink(self.urls[0], key=os.environ.get(KEY_VARIABLE, ""), deadline_s=deadline_s)
        name = f"a generator of run {spec.run} on {socket.gethostname()} (process {os.getpid()})"
        return ServedEngine(link, model, spec, name=name, batch_invariant=self.batch_invariant).open()
