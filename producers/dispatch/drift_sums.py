"""How likely is what is seen of many samples, under many drifts.

In compiled code, rows of one weight are multiplied before a logarithm is taken, since logarithms would take
most of the time. Where nothing is compiled, such loops would take a thousand times as long, so numpy does it.
"""

from __future__ import annotations

import numpy as np

from infra import choices
from infra.compiled import njit

_COMPILED = choices.compiles()

_RUN = 64  # of so many rows the product is a number that is neither 0 nor infinite


def likelihoods(
    below: np.ndarray, ends: tuple[float, float], fine: float, said: np.ndarray, logs: np.ndarray,
    done: np.ndarray, shifts: np.ndarray, moves_bin: bool,
) -> np.ndarray:  # fmt: skip
    """Return how likely each sample (a row) is for each shift (a column).

    below: the share of errors below each of some, evenly spaced by `fine` and as far above 0 as below, a row
    for each bin of predictions. ends: the logs of the first and last bin. said: logs of the predictions.
    logs: of the tokens; `done` says whether a sample has no more than these. moves_bin: whether a
    prediction is in another bin by a shift.
    """
    if _COMPILED:
        found: np.ndarray = _likelihoods(below, ends, fine, said, logs, done, shifts, moves_bin)
        return found
    bins, errors = below.shape
    place = (logs[:, None] - said[:, None] - shifts[None, :] + fine * (errors - 1) / 2) / fine
    place = np.clip(np.rint(place), 1, errors - 2).astype(int)
    part = (said[:, None] + (shifts[None, :] if moves_bin else 0.0) - ends[0]) / (ends[1] - ends[0])
    which = np.clip(np.rint(part * (bins - 1)), 0, bins - 1).astype(int)
    density = (below[which, place + 1] - below[which, place - 1]) / (2 * fine)
    return np.where(done[:, None], density, 1 - below[which, place])


@njit(cache=True, nogil=True)
def _likelihoods(
    below: np.ndarray, ends: tuple[float, float], fine: float, said: np.ndarray, logs: np.ndarray,
    done: np.ndarray, shifts: np.ndarray, moves_bin: bool,
) -> np.ndarray:  # fmt: skip
    bins, errors = below.shape
    furthest = fine * (errors - 1) / 2
    found = np.empty((len(said), len(shifts)))
    which = 0
    for row in range(len(said)):
        for column in range(len(shifts)):
            place = np.rint((logs[row] - said[row] - shifts[column] + furthest) / fine)
            mine = int(min(max(place, 1.0), errors - 2.0))
            if moves_bin or column == 0:
                moved = said[row] + shifts[column] if moves_bin else said[row]
                part = (moved - ends[0]) / (ends[1] - ends[0])
                which = int(min(max(np.rint(part * (bins - 1)), 0.0), bins - 1.0))
            if done[row]:
                found[row, column] = (below[which, mine + 1] - below[which, mine - 1]) / (2 * fine)
            else:
                found[row, column] = 1 - below[which, mine]
    return found


def summed_logs(
    own: np.ndarray, any_length: np.ndarray, weight: np.ndarray, wild: np.ndarray, least: float
) -> np.ndarray:
    """Return the logs of all samples' likelihoods, summed: a row for each shift, a column for each of `wild`.

    own: how likely each sample (a row) is by its prediction, for each shift (a column). any_length: the same
    for a prediction that says nothing. wild: shares of such predictions. weight: what a sample counts; the
    fewer changes from one to the next, the less this costs. least: added to each likelihood.
    """
    if _COMPILED:
        found: np.ndarray = _summed_logs(own, any_length, weight, wild, least)
        return found
    columns = [weight @ np.log((1 - one) * own + one * any_length[:, None] + least) for one in wild]
    return np.stack(columns, axis=1)


@njit(cache=True, nogil=True)
def _summed_logs(
    own: np.ndarray, any_length: np.ndarray, weight: np.ndarray, wild: np.ndarray, least: float
) -> np.ndarray:
    count, shifts = own.shape
    found = np.zeros((shifts, len(wild)))
    product = np.ones((len(wild), shifts))
    factors = 0
    for row in range(count):
        for place in range(len(wild)):
            kept, rest = 1 - wild[place], wild[place] * any_length[row] + least
            for shift in range(shifts):
                product[place, shift] *= kept * own[row, shift] + rest
        factors += 1
        if factors == _RUN or row == count - 1 or weight[row + 1] != weight[row]:
            found += weight[row] * np.log(product.T)
            product[:] = 1.0
            factors = 0
    return found
