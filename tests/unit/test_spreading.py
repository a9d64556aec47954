"""Which site gets which chunk from where: what holds for any network."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from infra.weights.manifest import Chunk
from infra.weights.spreading.links import Links
from infra.weights.spreading.plan import alone, spread
from infra.weights.spreading.trees import branching
from tests.bench._spreading_bound import bound
from tests.following import followed

NAMES = ("amsterdam", "boston", "cairo", "delhi")


@dataclass(frozen=True)
class Case:
    """A network, and what is to be spread: what the functions under test take."""

    chunks: Sequence[Chunk]
    sites: Mapping[str, Collection[str]]
    links: Links

    @property
    def all(self) -> tuple[Any, ...]:
        return self.chunks, self.sites, "origin", self.links


rates = st.floats(0.5, 50)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    names = NAMES[: draw(st.integers(1, 4))]
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=12))
    chunks = [Chunk(hash=f"{number:064x}", size=size) for number, size in enumerate(sizes)]
    pairs = [(source, site) for source in ("origin", *names) for site in names if source != site]
    used = [pair for pair in pairs if pair[0] == "origin" or draw(st.booleans())]
    held = st.one_of(st.just(set[str]()), st.sets(st.sampled_from([chunk.hash for chunk in chunks])))
    links = Links(
        {pair: draw(rates) for pair in used},
        latency={pair: draw(st.sampled_from([0.0, 0.1])) for pair in used},
        egress={name: draw(rates) for name in ("origin", *names) if draw(st.booleans())},
        ingress={name: draw(rates) for name in names if draw(st.booleans())},
    )
    return Case(chunks, {name: draw(held) for name in names}, links)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_every_site_gets_every_chunk_once_from_who_has_it(case: Case) -> None:
    plan, sizes = spread(*case.all), {chunk.hash: chunk.size for chunk in case.chunks}
    arrives = {("origin", chunk.hash): 0.0 for chunk in case.chunks}
    arrives |= {(site, chunk): 0.0 for site, held in case.sites.items() for chunk in held}
    arrives |= {(site, one.chunk): one.arrives for site, mine in plan.fetches.items() for one in mine}
    for site, held in case.sites.items():
        mine = plan.fetches[site]
        assert sorted([*held, *(one.chunk for one in mine)]) == [chunk.hash for chunk in case.chunks]
        assert plan.finish[site] == max((one.arrives for one in mine), default=0.0)
        for one in mine:
            seconds = sizes[one.chunk] / case.links.rates[one.source, site]
            assert arrives[one.source, one.chunk] + seconds <= one.arrives * (1 + 1e-9)
            assert one.not_before + seconds <= one.arrives * (1 + 1e-9)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_never_worse_than_the_origin_alone_nor_better_than_can_be(case: Case) -> None:
    last = spread(*case.all).last
    assert bound(*case.all) * (1 - 1e-6) <= last <= alone(*case.all).last


@settings(deadline=None, max_examples=150)
@given(cases())
def test_who_follows_a_plan_is_done_when_it_says(case: Case) -> None:
    for plan in (spread(*case.all), alone(*case.all)):
        assert followed(plan, *case.all) == approx(plan.finish, rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(cases(), st.randoms(use_true_random=False))
def test_the_same_records_in_another_order_make_the_same_plan(case: Case, rng: random.Random) -> None:
    def mixed(said: Mapping[Any, Any]) -> dict[Any, Any]:
        return dict(rng.sample(list(said.items()), len(said)))

    links = case.links
    other = Links(mixed(links.rates), (), mixed(links.latency), mixed(links.egress), mixed(links.ingress))
    assert spread(case.chunks, mixed(case.sites), "origin", other) == spread(*case.all)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_no_tree_is_cheaper(nodes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, 6, (nodes, nodes)).astype(float)
    cost[rng.random((nodes, nodes)) < 0.3] = np.inf
    parent = np.zeros(nodes, np.int64)
    least = min(_total(cost, one) for one in itertools.product(range(nodes), repeat=nodes - 1))
    assert branching(cost, parent) == (least < math.inf)
    if least < math.inf:
        assert _total(cost, parent[1:].tolist()) == least


def _total(cost: np.ndarray, parents: Sequence[int]) -> float:
    """Of a tree, given each node's parent from node 1 on; infinite where it goes round."""
    for node in range(1, len(cost)):
        for _ in parents:
            node = parents[node - 1] if node else 0
        if node:
            return math.inf
    return sum(float(cost[source, node]) for node, source in enumerate(parents, 1))
