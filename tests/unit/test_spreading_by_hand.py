"""Which site gets which chunk from where: small networks whose optimum one sees, and what is refused."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from pytest import approx

from infra.weights.manifest import Chunk
from infra.weights.spreading.links import Link, Links
from infra.weights.spreading.plan import SpreadingPlan, alone, spread
from infra.weights.weights_error import WeightsError

TEN = [Chunk(hash=f"{number:064x}", size=1) for number in range(10)]


def empty(names: str) -> dict[str, Collection[str]]:
    return dict.fromkeys(names, ())


def rates(said: str) -> dict[Link, float]:
    """Of `oa 1, ab 1000`: o is the origin."""
    return {(one[0], one[1]): float(one[3:]) for one in said.split(", ")}


def plan(names: str, said: str, **more: dict[str, float]) -> SpreadingPlan:
    return spread(TEN, empty(names), "o", Links(rates(said), **more))  # type: ignore[arg-type]


def test_two_sites_with_a_fast_link_fetch_half_each_and_swap() -> None:
    found = plan("ab", "oa 1, ob 1, ab 1000, ba 1000")
    assert found.last == approx(5.001)
    halves = [{one.chunk for one in found.fetches[site] if one.source == "o"} for site in "ab"]
    assert [len(half) for half in halves] == [5, 5]
    assert not halves[0] & halves[1]


def test_a_chain_passes_each_chunk_on() -> None:
    assert plan("abc", "oa 1, ab 1, bc 1").finish == approx({"a": 10, "b": 11, "c": 12})


def test_a_star_is_as_fast_as_its_middle() -> None:
    assert plan("abcd", "oa 1, ab 1, ac 1, ad 1").last == approx(11)
    assert plan("abcd", "oa 1, ab 1, ac 1, ad 1", egress={"a": 1}).last == approx(31)


def test_one_site_has_only_the_origin() -> None:
    links = Links(rates("oa 2"), latency={("o", "a"): 0.5})
    found = spread(TEN, empty("a"), "o", links)
    assert found == alone(TEN, empty("a"), "o", links)
    assert found.last == approx(5.5)
    assert [one.chunk for one in found.fetches["a"]] == [chunk.hash for chunk in TEN]


def test_who_shares_an_uplink_gets_a_fair_share_of_it() -> None:
    links = Links(rates("oa 2, ob 20, oc 20"), egress={"o": 10})
    found = alone([Chunk(hash="0" * 64, size=8)], empty("abc"), "o", links)
    assert found.finish == approx({"a": 4, "b": 2, "c": 2})


def test_sites_that_nobody_can_fetch_from_do_not_use_up_the_uplink_of_the_origin() -> None:
    ways = "oa 9, ob 9, oc 9, od 9, ab 9, ac 9, ad 9"
    assert plan("abcd", ways, egress={"o": 1}).last == approx(10, rel=0.05)
    assert alone(TEN, empty("abcd"), "o", Links(rates(ways), egress={"o": 1})).last == approx(40)


def test_who_passes_nothing_on_waits_for_its_share_of_a_narrow_uplink() -> None:
    links = Links(rates("oa 1, ob 1, oc 1, od 1, ab 0.7, ac 0.7, ad 0.7"), egress={"o": 2})
    found = spread([Chunk(hash=f"{number:064x}", size=1) for number in range(100)], empty("abcd"), "o", links)
    assert found.last == approx(100, rel=0.05)  # if nobody waits, 133
    waited = {site for site, mine in found.fetches.items() for one in mine if one.not_before}
    assert waited >= set("bcd")


def test_a_slow_link_is_given_nothing_that_all_would_wait_for() -> None:
    assert plan("ab", "oa 10, ob 0.1, ab 10").last == approx(1.1)


def test_what_a_site_has_others_may_get_from_it() -> None:
    sites = {"a": [chunk.hash for chunk in TEN], "b": ()}
    found = spread(TEN, sites, "o", Links(rates("oa 1, ob 1, ab 9")))
    assert found.fetches["a"] == ()
    assert found.last == approx(1)


def test_a_chunk_that_is_named_twice_is_fetched_once() -> None:
    found = spread([*TEN, TEN[0]], empty("a"), "o", Links(rates("oa 1")))
    assert len(found.fetches["a"]) == 10


def test_nothing_to_be_done() -> None:
    assert spread([], empty("a"), "o", Links(rates("oa 1"))) == SpreadingPlan({"a": ()}, {"a": 0.0})
    assert spread(TEN, {}, "o", Links({})).last == 0


def test_an_untried_link_is_tried_where_half_of_the_slowest_would_help() -> None:
    ways = Links(rates("oa 1, ob 1"), untried=[("a", "b"), ("b", "a")])
    assert ways.guessed()["a", "b"] == 0.5
    found = spread(TEN, empty("ab"), "o", ways)
    assert {one.source for one in found.fetches["b"]} == {"o", "a"}
    assert Links({}, untried=[("o", "a")]).guessed()["o", "a"] > 0
    assert Links(rates("oa 3"), untried=[("o", "a")]).guessed()["o", "a"] == 3


def test_a_link_that_is_not_named_is_not_used() -> None:
    found = plan("ab", "oa 1, ob 1, bz 5, zb 5")
    assert {one.source for mine in found.fetches.values() for one in mine} == {"o"}


def test_nobody_waits_for_a_site_that_nothing_leads_to() -> None:
    found = plan("abc", "oa 1, bc 1, cb 1")
    assert found.unreached == ("b", "c")
    assert found.finish == approx({"a": 10})


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(WeightsError, match="rate of \\('o', 'a'\\)"):
        spread(TEN, empty("a"), "o", Links({("o", "a"): rate}))
    with pytest.raises(WeightsError, match="egress of o"):
        plan("a", "oa 1", egress={"o": rate})


def test_the_origin_is_no_site() -> None:
    with pytest.raises(WeightsError, match="o is the origin"):
        plan("oa", "oa 1")


def test_alone_needs_a_link_from_the_origin_to_each_site() -> None:
    with pytest.raises(WeightsError, match="no link from o"):
        alone(TEN, empty("ab"), "o", Links(rates("oa 1, ab 1")))
