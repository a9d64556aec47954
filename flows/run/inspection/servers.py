"""Inspects the servers of vLLM that a run's generators are to use: do they answer, do they fit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec

from flows.run.inspection.finding import Finding
from infra.errors import Explained
from producers.engines.served_engine import ServedSettings
from producers.engines.server_checks import wrong_facts
from producers.engines.server_facts import ServerFacts, answer_to
from producers.engines.server_link import KEY_VARIABLE, ServerAway, ServerLink
from schemas.runspec import RunSpec

_ANSWER_S = 15.0
_AT_ONCE = 32


def most_generators(spec: RunSpec) -> int:
    """Return the largest number of generators that a run may have, at all sites."""
    placement = spec.placement
    own = max(placement.generators, placement.balance.most if placement.balance else 0)
    return (own + sum(site.generators for site in placement.sites.values())) if spec.generates else 0


def look_at_servers(spec: RunSpec, model: Path | None) -> Iterator[Finding]:
    """Yield a finding about each server. It is asked, and nothing is changed there."""
    settings = spec.generator
    if not isinstance(settings, ServedSettings) or not (count := most_generators(spec)):
        return
    urls = settings.urls[:count]
    with ThreadPoolExecutor(min(_AT_ONCE, len(urls)), "server") as pool:
        yield from pool.map(lambda url: _server(spec, url, str(model or "")), urls)


def _server(spec: RunSpec, url: str, model: str) -> Finding:
    thing = f"server {url}"
    key = os.environ.get(KEY_VARIABLE, "")
    with closing(ServerLink(url, key=key, deadline_s=_ANSWER_S).open()) as link:
        try:
            facts: ServerFacts = answer_to(ServerFacts, link.facts())
            problems = wrong_facts(facts, spec, model)
        except msgspec.ValidationError as error:
            return Finding(thing, f"generator.urls: it has another version of StreamRL: {error}", wrong=True)
        except Explained as error:
            away = isinstance(error, ServerAway) or not error.lasting
            return Finding(thing, f"generator.urls: {error}", wrong=True, away=away)
    if problems:
        return Finding(thing, "generator.urls: start it differently: " + "; ".join(problems), wrong=True)
    return Finding(thing, f"vLLM {facts.vllm} answers, with {facts.slots} slots in {facts.dtype}")
