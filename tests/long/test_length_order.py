"""Jobs in order of length: the same as a sorted list says, whatever comes and goes, and in whatever order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.dispatch import length_order
from producers.dispatch.board import Board, BoardGenerator, Waiting, speed_order
from producers.dispatch.every_nth import EveryNth
from producers.dispatch.jobs import SampleJob
from producers.dispatch.length_order import LengthOrder, OrderedJob
from tests.bench._lengths import CURVE
from tests.unit.test_dispatch import job

LENGTHS = st.integers(1, 12).map(float)  # few, so that many are equal


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few jobs are many blocks."""
    monkeypatch.setattr(length_order, "_BLOCK", 3)


def entry(number: int, length: float) -> OrderedJob:
    return length, (number, 0), job(number, length)


def told(jobs: Sequence[SampleJob]) -> list[float]:
    """Declared lengths that do not always grow with the predicted ones."""
    return [float(one.prompt.predicted * 10 + (one.prompt.group * 7) % 30) for one in jobs]


class Naive:
    """A sorted list with declared lengths: each counts for all behind it.

    One whose job is gone counts, too, and perhaps for some before it: a block remembers its longest.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[OrderedJob, float]] = []
        self.gone: list[tuple[OrderedJob, float]] = []

    def limit(self, one: OrderedJob) -> tuple[float, float]:
        """What a job's declared length is at the least and at the most."""
        here = [length for other, length in self.rows if other <= one]
        return max(here), max(here + [length for _, length in self.gone])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_jobs_come_and_go_in_order(data: st.DataObject) -> None:
    order, naive = LengthOrder(), list[OrderedJob]()
    for number in range(data.draw(st.integers(1, 40))):
        if naive and data.draw(st.booleans()):
            one = data.draw(st.sampled_from(naive))
            naive.remove(one)
            order.remove(one)
        else:
            fresh = [
                entry(100 * number + place, length)
                for place, length in enumerate(data.draw(st.lists(LENGTHS, min_size=1, max_size=9)))
            ]
            naive = sorted([*naive, *fresh])
            order.add(fresh)
        assert list(order) == naive and len(order) == len(naive) and bool(order) == bool(naive)
        if naive:
            assert order.longest()[0] == order[-1] == naive[-1] and order[0] == naive[0]
            place = data.draw(st.integers(0, len(naive) - 1))
            assert order[place] == naive[place]
            shares = sorted(data.draw(st.lists(st.floats(0, 1, exclude_max=True), max_size=5)))
            found = [order.at(share) for share in [0.0, *shares, 1 - 1e-9]]
            assert found == sorted(found) and found[0] == naive[0] and found[-1] == naive[-1]
            assert all(one in naive for one in found)
            step = data.draw(st.floats(1, 20))
            places = [int(number * step) for number in range(len(naive))]
            expected = [naive[-1 - place] for place in places if place < len(naive)]
            assert order.from_the_longest(step) == expected


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_last_job_that_is_short_enough_is_found(data: st.DataObject) -> None:
    """As in the array of the compiled rule: nothing behind a job that is declared too long is taken."""
    order, naive = LengthOrder(told), Naive()
    for number in range(data.draw(st.integers(1, 25))):
        if naive.rows and data.draw(st.booleans()):
            row = data.draw(st.sampled_from(naive.rows))
            naive.rows.remove(row)
            naive.gone.append(row)
            order.remove(row[0])
        else:
            fresh = [
                entry(100 * number + place, length)
                for place, length in enumerate(data.draw(st.lists(LENGTHS, min_size=1, max_size=9)))
            ]
            naive.rows = sorted([*naive.rows, *((one, told([one[2]])[0]) for one in fresh)])
            order.add(fresh)
        most = float(data.draw(st.integers(0, 160)))
        found = order.within(most)
        least = [
            one for one, _ in naive.rows if naive.limit(one)[0] <= most
        ]  # if those that are gone count not
        for_sure = [one for one, _ in naive.rows if naive.limit(one)[1] <= most]
        if found is None:
            assert not for_sure
            continue
        one, length = found
        assert one in least and (not for_sure or one >= for_sure[-1])
        low, high = naive.limit(one)
        assert low <= length <= high and length <= most


def test_without_removals_it_is_the_array_of_the_rule() -> None:
    fresh = [entry(number, float(number % 17)) for number in range(60)]
    order = LengthOrder(told)
    order.add(fresh)
    ordered = sorted(fresh)
    keys = [max(told([one[2] for one in ordered[: place + 1]])) for place in range(len(ordered))]
    assert order.longest() == (ordered[-1], keys[-1])
    for most in range(0, 220, 3):
        place = sum(key <= most for key in keys) - 1
        assert order.within(float(most)) == (None if place < 0 else (ordered[place], keys[place]))


def test_a_place_that_is_none_is_refused() -> None:
    order = LengthOrder()
    order.add([entry(1, 5.0)])
    for place in (1, -2):
        with pytest.raises(IndexError, match="there is no job"):
            order[place]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_waiting_jobs_are_in_order_of_turn_and_length(data: st.DataObject) -> None:
    waiting, naive = Waiting(), dict[tuple[int, int], tuple[SampleJob, float]]()
    for number in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["add", "remove", "reorder"]))
        if what == "add" or not naive:
            one, length = job(number, 1.0, iteration=data.draw(st.integers(0, 2))), data.draw(LENGTHS)
            waiting.add(one, length)
            naive[one.key] = one, length
        elif what == "remove":
            key = data.draw(st.sampled_from(sorted(naive)))
            assert waiting.remove(key) == naive.pop(key)[0]
        else:
            key, length = data.draw(st.sampled_from(sorted(naive))), data.draw(LENGTHS)
            waiting.reorder([(key, length)])
            naive[key] = naive[key][0], length
        turns = sorted({one.turn for one, _ in naive.values()})
        wanted = [
            sorted((length, one.key) for one, length in naive.values() if one.turn == turn) for turn in turns
        ]
        assert [[one[:2] for one in order] for order in waiting.by_turn()] == wanted
        assert len(waiting) == len(naive) and set(naive) == {one.key for one, _ in waiting}
        assert waiting.longest() == (wanted[0][-1][1] if wanted else None)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_board_knows_the_emptiest_and_the_overfull(data: st.DataObject) -> None:
    board, numbers = Board(), iter(range(1000))
    for _ in range(data.draw(st.integers(1, 40))):
        names = sorted(board.generators)
        what = data.draw(st.sampled_from(["join", "leave", "start", "start", "end", "ahead", "curve"]))
        if what == "join" or not names:
            name = data.draw(st.sampled_from("abcdef"))
            if (old := board.generators.get(name)) is not None:
                for gone in old.clear():
                    del board.home[gone.key]
            slots = data.draw(st.integers(1, 4))
            table = CURVE.scaled(data.draw(st.sampled_from([0.5, 1.0]))).table(slots)
            board.generators[name] = BoardGenerator(name, slots, table, 0.0)
            board.regrouped(name)
        else:
            generator = board.generators[data.draw(st.sampled_from(names))]
            if what == "leave":
                for gone in generator.clear():
                    del board.home[gone.key]
                del board.generators[generator.name]
                board.regrouped(generator.name)
            elif what == "start":
                board.start(generator, job(next(numbers), 1.0))
            elif what == "end" and board.home:
                board.end(data.draw(st.sampled_from(sorted(board.home))))
            elif what == "ahead":
                generator.ahead = data.draw(st.integers(0, 2))
                board.changed(generator.name)
            elif what == "curve":
                generator.seconds = CURVE.scaled(data.draw(st.sampled_from([0.5, 2.0]))).table(
                    generator.slots
                )
                board.regrouped(generator.name)
        if data.draw(st.booleans()):
            continue  # it may be asked after one change or after many
        every = board.generators.values()
        free = [one for one in every if one.free > 0]
        assert board.emptiest() is min(free, key=lambda one: (one.next_step_s, one.name), default=None)
        assert {one.name for one in board.overfull()} == {one.name for one in every if one.free < 0}
        assert list(board.fastest_first) == sorted(every, key=speed_order)
        assert set(board.home) == {key for one in every for key in one.running}


@given(st.integers(1, 20), st.integers(0, 500))
def test_every_nth_is_evenly_spaced_and_bounded(most: int, count: int) -> None:
    kept: EveryNth[int] = EveryNth(most)
    for number in range(count):
        kept.add(number)
    assert kept.kept == list(range(0, count, kept.step)) and len(kept.kept) <= most
    assert kept.step == 1 or len(kept.kept) * 2 >= most - 1
