"""Networks of several sites, for `spreading`. Rates are megabytes a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from infra.weights.spreading.links import Link, Links

Rng = np.random.Generator


def _links(rates: Mapping[Link, float], **ports: Mapping[str, float]) -> Links:
    room = {side: {name: rate * 1e6 for name, rate in mine.items()} for side, mine in ports.items()}
    return Links({link: rate * 1e6 for link, rate in rates.items()}, (), dict.fromkeys(rates, 0.05), **room)


def _names(count: int) -> list[str]:
    return [f"s{number:02d}" for number in range(count)]


def _drawn(rng: Rng, names: Sequence[str], sigma: float = 1.0) -> dict[Link, float]:
    """All links, of about 10 MB/s."""
    pairs = [(source, site) for source in ("origin", *names) for site in names if source != site]
    return {pair: 10 * float(rng.lognormal(0, sigma)) for pair in pairs}


def _near_and_far(rng: Rng) -> Links:
    far = ("origin", "far"), ("near", "far"), ("far", "near")
    return _links({("origin", "near"): 100, **dict(zip(far, (10, 12, 12), strict=True))})


def _two_far(rng: Rng) -> Links:
    return _links({("origin", "a"): 10, ("origin", "b"): 10, ("a", "b"): 1000, ("b", "a"): 1000})


def _continents(rng: Rng) -> Links:
    europe, asia = ["lyon", "paris"], ["osaka", "tokyo"]
    rates: dict[Link, float] = {("origin", site): 12 for site in (*europe, *asia)}
    for here, there in ((europe, asia), (asia, europe)):
        rates |= {(here[0], here[1]): 100, (here[1], here[0]): 100}
        rates |= {(source, site): 8 for source in here for site in there}
    return _links(rates)


def _straggler(rng: Rng) -> Links:
    return _links({link: 1 if link[1] == "s05" else rate for link, rate in _drawn(rng, _names(6)).items()})


def _walled(rng: Rng) -> Links:
    rates = {link: rate for link, rate in _drawn(rng, _names(6), 0.3).items() if link[0] in ("origin", "s00")}
    return _links(rates, egress={"origin": 20})


def _narrow(rng: Rng) -> Links:
    names = _names(16)
    out, into = ({name: float(rng.uniform(30, 90)) for name in names} for _ in range(2))
    return _links(_drawn(rng, names), egress=out | {"origin": 60}, ingress=into)


TOPOLOGIES: dict[str, Callable[[Rng], Links]] = {
    "one near, one far": _near_and_far,
    "two far, a fast link between": _two_far,
    "four on two continents": _continents,
    "16, log-normal": lambda rng: _links(_drawn(rng, _names(16))),
    "6, one of them slow": _straggler,
    "8, narrow origin": lambda rng: _links(_drawn(rng, _names(8)), egress={"origin": 20}),
    "6, narrow origin, one gives": _walled,
    "16, everything narrow": _narrow,
}
