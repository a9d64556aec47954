"""Weights over a link of 100 Mbit/s and 50 ms each way: a random 100M model from a trainer to a far site.

Each version is published by the trainer's own publisher to an S3 server, a real relay brings it over the
link, and readers at the far site do what generators do with weights, one of them with an engine that decodes.
Time is from the announcement on; the ideal is bytes over bandwidth. At the end the link is cut for a minute,
and a relay is killed half way.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.weights.folder import ModelFolder
from schemas.messages import SiteReport
from tests.bench._link import RATE, Link, two_sites
from tests.bench._sized import SIZES, make_model
from tests.bench._wan_sites import Far, Near, near_and_far

_CHANGED = 0.025  # of the elements, by one step of the last bit each
_CUT_S = 60.0


def main(*, quick: bool = False, argv: Sequence[str] = ()) -> dict[str, Any]:
    """All of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench wan", description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="30M" if quick else "100M")
    given = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-wan-model-")))
        model = _Model(make_model(folder, given.model, "bfloat16"))
        link = stack.enter_context(two_sites())
        near = stack.enter_context(near_and_far(link, folder))
        return _Bench(near, link, model, stack, quick=quick).run()


class _Model:
    """Its tensors, and how they change."""

    def __init__(self, folder: Path) -> None:
        self._draw = np.random.default_rng(0)
        model = ModelFolder(folder)
        self.tensors = {name: model.tensor(name).clone() for name in model.names}
        self.size = sum(tensor.nbytes for tensor in self.tensors.values())

    def _random(self, like: torch.Tensor) -> torch.Tensor:
        values = self._draw.standard_normal(like.shape, dtype=np.float32) * 0.02
        return torch.from_numpy(values).to(like.dtype)

    def change(self, share: float) -> dict[str, torch.Tensor]:
        """The next version; at a share of one with nothing of the one before."""
        for name, old in self.tensors.items():
            if share == 1.0:
                self.tensors[name] = self._random(old)
                continue
            bits = old.view(torch.int16).numpy().copy()
            places = self._draw.integers(0, bits.size, int(share * bits.size))
            bits.reshape(-1)[places] += 1
            self.tensors[name] = torch.from_numpy(bits).view(torch.bfloat16)
        return dict(self.tensors)


class _Bench:
    def __init__(self, near: Near, link: Link, model: _Model, stack: ExitStack, *, quick: bool) -> None:
        self.near, self.link, self.model, self.quick = near, link, model, quick
        self._stack, self._version = stack, -1

    def _site(self, name: str) -> Far:
        far = Far(self.near, name)
        self._stack.callback(far.close)
        return far

    def run(self) -> dict[str, Any]:
        far = self._site("far")
        far.relay()
        self._arrived(far, self._publish(1.0))  # connections, compiled loops
        found: dict[str, Any] = {"changed": self._changed(far), "readers": self._readers(far)}
        found["engine"] = self._engine(far)
        found["joiner"] = self._joiner()
        found["alone"] = self._alone(far)
        self._relay_again(far)
        found["whole"] = self._whole(far)  # behind the others: for a while nobody tries to tell what changed
        found["cut"] = self._cut(far)
        found["killed"] = self._killed(far)
        return {
            "seconds_over_ideal": found["whole"]["over_ideal"],
            "joiner_over_ideal": found["joiner"]["over_ideal"],
            "bytes_8_over_1": found["readers"]["bytes_8_over_1"],
            "pause_ms": found["engine"]["pause_ms"], **found,
        }  # fmt: skip

    def _publish(self, share: float) -> int:
        self._version += 1
        self.model.change(share)
        self.near.publish(self._version, self.model.tensors)
        return self._version

    def _come(self, far: Far, version: int, deadline_s: float = 300.0) -> SiteReport:
        """The first report by which a version is at a site."""
        seen = self.near.seen
        self.near.until(
            lambda: seen.at_site(far.site, version), f"version {version} at {far.site}", deadline_s
        )
        report = seen.at_site(far.site, version)
        assert report is not None
        return report

    def _arrived(self, far: Far, version: int) -> dict[str, float]:
        """How a version came to a site."""
        report = self._come(far, version)
        size = self.near.seen.crossed_for(report, version)
        if size <= 0:
            raise RuntimeError(
                f"version {version} came to {far.site}, and the relay has fetched nothing of it"
            )
        return {"seconds": report.lag_s, "bytes": size, "over_ideal": report.lag_s / (size / RATE)}

    def _relay_again(self, far: Far) -> None:
        """A relay is started where there was none; until it has told so, and readers know it."""
        heard = len(self.near.seen.reports)
        far.relay()

        def back() -> bool:
            new = self.near.seen.reports[heard:]
            return any(r.site == far.site and r.version >= self._version for r in new)

        self.near.until(back, f"a relay at {far.site} to be back")

    def _mean(self, far: Far, share: float, times: int) -> dict[str, float]:
        rows = [self._arrived(far, self._publish(share)) for _ in range(times)]
        return {key: round(float(np.mean([row[key] for row in rows])), 3) for key in rows[0]}

    def _whole(self, far: Far) -> dict[str, float]:
        return self._say(
            "a version of which everything changed", self._mean(far, 1.0, 1 if self.quick else 3)
        )

    def _changed(self, far: Far) -> dict[str, float]:
        return self._say(f"a version of which {_CHANGED:.1%} changed", self._mean(far, _CHANGED, 5))

    def _readers(self, far: Far) -> dict[str, Any]:
        """What crosses the link for one reader and for eight: chunks, and all else."""
        crossed = {}
        for count in (1, 8):
            name = f"readers-{count}"
            far.readers(name, count)
            self._read(far, name, count, self._version)
            begun, rows = self.link.crossed(), []
            for _ in range(3):
                version = self._publish(_CHANGED)
                rows.append(self._arrived(far, version)["bytes"])
                self._read(far, name, count, version)
            all_else = self.link.crossed() - begun - sum(rows)
            crossed[count] = {"chunks": float(np.mean(rows)), "all_else": all_else / 3}
            far.kill(name)
        ratio = (crossed[8]["chunks"]) / (crossed[1]["chunks"])
        row = {
            "bytes_8_over_1": round(ratio, 4),
            "with_all_else_8_over_1": round(sum(crossed[8].values()) / sum(crossed[1].values()), 4),
        }
        return self._say("eight readers at the site against one", row)

    def _read(self, far: Far, name: str, count: int, version: int, deadline_s: float = 300.0) -> None:
        """Until each reader has a version, of the bits that were announced."""
        root = self.near.seen.announced[version].root

        def there() -> bool:
            said = [one for one in far.read(name) if one["version"] == version]
            wrong = [one for one in said if one["root"] != root]
            assert not wrong, f"wrong bits: {wrong}"
            return len({one["reader"] for one in said}) == count

        self.near.until(there, f"version {version} with {count} readers", deadline_s)

    def _engine(self, far: Far) -> dict[str, float]:
        """How long an engine of vLLM that decodes stands still for a version."""
        far.engine("engine")
        self._read(far, "engine", 1, self._version)
        first = self._version
        for _ in range(5):
            self._read(far, "engine", 1, self._publish(_CHANGED))
        pauses = [said["pause_ms"] for said in far.read("engine") if said["version"] > first]
        far.kill("engine")
        row = {"pause_ms": round(float(np.median(pauses)), 2), "longest_ms": round(max(pauses), 2)}
        return self._say("an engine that decodes meanwhile", row)

    def _joiner(self) -> dict[str, float]:
        """A site that has nothing, late."""
        late = self._site("late")
        began = time.time()
        late.relay()
        row = self._arrived(late, self._version)
        first = next(report for report in self.near.seen.reports if report.site == "late")
        row["seconds"] = time.time() - first.sent_at  # without the seconds in which a process starts
        row["over_ideal"] = row["seconds"] / (row["bytes"] / RATE)
        row["from_start"] = time.time() - began
        late.close()
        return self._say("a site that joins late", {key: round(value, 3) for key, value in row.items()})

    def _cut(self, far: Far) -> dict[str, float]:
        """The link is cut while a version is on its way."""
        begun = self.link.crossed()
        version = self._publish(1.0)
        self._under_way(version, begun)
        self.link.cut()
        time.sleep(_CUT_S)
        self.link.mend()
        mended = time.time()
        self._come(far, version)
        row = {"seconds_after": round(time.time() - mended, 1)}
        return self._say(f"the link was cut for {_CUT_S:.0f} s", row)

    def _killed(self, far: Far) -> dict[str, float]:
        """A relay is killed half way, and started again."""
        begun = self.link.crossed()
        version = self._publish(1.0)
        self._under_way(version, begun)
        begun = self.link.crossed()
        far.kill("relay")
        far.relay()
        self._come(far, version)
        left = self.link.crossed() - begun
        row = {"of_a_version_fetched_again": round(left / (self.model.size * 0.68), 3)}
        return self._say("the relay was killed half way: what the next one fetched", row)

    def _under_way(self, version: int, begun: int) -> None:
        """Until a third of a version has crossed: by the link's count, for reports come once a second."""
        size = self.near.least(version)
        self.near.until(lambda: self.link.crossed() - begun > size // 3, f"a third of version {version}")

    def _alone(self, far: Far) -> dict[str, float]:
        """The relay is gone for good: readers fetch for each other."""
        far.readers("left", 4)
        self._read(far, "left", 4, self._version)
        far.kill("relay")
        begun = self.link.crossed()
        version = self._publish(_CHANGED)
        announced = time.time()
        self._read(far, "left", 4, version)
        far.kill("left")  # they would fetch the next versions for themselves, until they hear a relay
        size = self.near.sizes(version)
        row = {"seconds": round(time.time() - announced, 1),
               "bytes_over_version": round((self.link.crossed() - begun) / size, 2)}  # fmt: skip
        return self._say("no relay: four readers", row)

    def _say(self, what: str, row: dict[str, Any]) -> dict[str, Any]:
        print(f"{what}: " + ", ".join(f"{key} {value:,}" for key, value in row.items()), flush=True)
        return row
