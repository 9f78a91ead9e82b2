"""Delays of the asynchronous references, by a table of versions written down by hand.

Three stages of one weight each, one sample a unit: gradients in closed form, in plain floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.oracles.asynchronous import ashpipe, pipedream, pipedream_2bw
from tests.oracles.cases import (
    ETAS,
    INITIAL,
    THREE_SCALARS,
    TWO_SCALARS,
    XS,
    System,
    scalar_batches,
    scalar_start,
    scalars,
)
from tests.oracles.synchronous import History, Recipe


def by_hand(
    versions: Sequence[tuple[int, int, int]],
    rounds: Sequence[Sequence[tuple[int, ...]]],
    rates: Sequence[Sequence[float]],
    momentum: float = 0.0,
    decay: float = 0.0,
    decays: Callable[[list[float], int], float] = lambda history, _: history[-1],
) -> list[float]:
    """z = x a b c, dL/dz = −1/(1 + exp z), so dL/da = −x b c/(1 + exp z), and so on.

    ``versions[k]``: of a, b, c for unit k; ``rounds[s]``: the units of each update of weight s.
    """
    w = [[value] for value in INITIAL]
    gradients: list[list[float]] = []
    moments, done = [0.0] * 3, [0] * 3
    for k, used in enumerate(versions):
        a, b, c = (w[s][v] for s, v in enumerate(used))
        slope = -1 / (1 + math.exp(XS[k] * a * b * c))
        gradients.append([slope * XS[k] * b * c, slope * XS[k] * a * c, slope * XS[k] * a * b])
        for s in range(3):
            if done[s] < len(rounds[s]) and rounds[s][done[s]][-1] == k:
                units, n = rounds[s][done[s]], done[s]
                mean = sum(gradients[unit][s] for unit in units) / len(units)
                moments[s] = momentum * moments[s] + mean + decay * decays(w[s], used[s])
                w[s].append(w[s][-1] - rates[s][n] * moments[s])
                done[s] += 1
    return [w[s][-1] for s in range(3)]


def ends(history: History) -> list[float]:
    return [float(history.updates[-1].weights[f"{i}.weight"]) for i in range(3)]


EACH = [[(k,) for k in range(6)]] * 3
RAMP = [(0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5)]


@pytest.mark.parametrize("system", [ashpipe, pipedream])
def test_delays_by_hand_without_a_drain(system: System) -> None:
    history = system(scalars, scalar_start(), Recipe(), THREE_SCALARS, [scalar_batches()], ETAS)
    assert [update.versions for update in history.updates] == RAMP
    assert ends(history) == pytest.approx(by_hand(RAMP, EACH, [ETAS] * 3), rel=1e-12)
    undelayed = by_hand([(k, k, k) for k in range(6)], EACH, [ETAS] * 3)
    assert ends(history) != pytest.approx(undelayed, rel=1e-6)


@pytest.mark.parametrize("system", [ashpipe, pipedream])
def test_delays_ramp_up_again_after_a_drain_by_hand(system: System) -> None:
    data = scalar_batches()
    segments = [data[:4], data[4:5], data[5:]]
    history = system(scalars, scalar_start(), Recipe(), THREE_SCALARS, segments, ETAS)
    # In versions of the run: each segment begins with the latest everywhere.
    versions = [*RAMP[:4], (4, 4, 4), (5, 5, 5)]
    assert [u.versions for u in history.updates] == [*RAMP[:4], (0, 0, 0), (0, 0, 0)]
    assert ends(history) == pytest.approx(by_hand(versions, EACH, [ETAS] * 3), rel=1e-12)


def test_momentum_and_decay_act_on_the_latest_weights_by_hand() -> None:
    recipe = Recipe(momentum=0.9, weight_decay=0.3)
    history = ashpipe(scalars, scalar_start(), recipe, THREE_SCALARS, [scalar_batches()], ETAS)
    assert ends(history) == pytest.approx(by_hand(RAMP, EACH, [ETAS] * 3, 0.9, 0.3), rel=1e-12)
    stale = by_hand(RAMP, EACH, [ETAS] * 3, 0.9, 0.3, lambda weights, used: weights[used])
    assert ends(history) != pytest.approx(stale, rel=1e-6)


def test_vertical_sync_by_hand() -> None:
    history = pipedream(
        scalars,
        scalar_start(),
        Recipe(),
        THREE_SCALARS,
        [scalar_batches()],
        ETAS,
        vertical_sync=True,
    )
    versions = [(0,) * 3, (0,) * 3, (0,) * 3, (1,) * 3, (2,) * 3, (3,) * 3]
    assert [update.versions for update in history.updates] == versions
    expected = by_hand(versions, EACH, [ETAS] * 3)
    assert ends(history) == pytest.approx(expected, rel=1e-12)


def test_2bw_by_hand_over_a_drain() -> None:
    data = scalar_batches()
    history = pipedream_2bw(
        scalars,
        scalar_start(),
        Recipe(),
        TWO_SCALARS,
        [data[:1], data[1:4], data[4:]],
        ETAS,
    )
    versions = [(0,) * 3, (0,) * 3, (1,) * 3, (2,) * 3, (3,) * 3, (4,) * 3]
    expected = by_hand(versions, EACH, [ETAS] * 3)
    assert ends(history) == pytest.approx(expected, rel=1e-12)
    assert [u.versions for u in history.updates] == [(t, t) for t in (0, 0, 1, 2, 0, 1)]


PAIRS, SINGLES, TRIPLES = [(0, 1), (2, 3), (4,)], [(k,) for k in range(5)], [(0, 1, 2), (3, 4)]


@pytest.mark.parametrize(
    ("replicas", "rounds", "versions"),
    [
        # w = (4 - 1) // 2, (2 - 1) // 1, 0
        (
            (2, 1, 1),
            (PAIRS, SINGLES, SINGLES),
            [(0, 0, 0), (0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 3, 4)],
        ),
        # w = 4 - 1, (3 - 1) // 2, 0
        (
            (1, 2, 1),
            (SINGLES, PAIRS, SINGLES),
            [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (1, 1, 4)],
        ),
        # w = 5 - 1, 4 - 1, 0
        (
            (1, 1, 3),
            (SINGLES, SINGLES, TRIPLES),
            [(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 1, 1)],
        ),
        # w = (6 - 1) // 3, (3 - 1) // 1, (2 - 1) // 2
        (
            (3, 1, 2),
            (TRIPLES, SINGLES, PAIRS),
            [(0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 2, 2)],
        ),
    ],
)
@pytest.mark.parametrize("lr_scaling", ["none", "published"])
def test_replicated_stages_by_hand(
    replicas: tuple[int, int, int],
    rounds: Any,
    versions: Any,
    lr_scaling: Any,
) -> None:
    history = pipedream(
        scalars,
        scalar_start(),
        Recipe(),
        THREE_SCALARS,
        [scalar_batches()[:5]],
        ETAS[:5],
        replicas=replicas,
        lr_scaling=lr_scaling,
    )
    factors = [R / replicas[0] if lr_scaling == "published" else 1.0 for R in replicas]
    rates = [
        [factor * ETAS[units[0]] for units in stage]
        for factor, stage in zip(factors, rounds, strict=True)
    ]
    assert [update.versions for update in history.updates] == versions
    assert ends(history) == pytest.approx(by_hand(versions, rounds, rates), rel=1e-12)
    for s, stage in enumerate(rounds):
        updated = [f"{s}.weight" in update.gradients for update in history.updates]
        assert [k for k, at in enumerate(updated) if at] == [units[-1] for units in stage]


def test_rounds_begin_anew_after_a_drain() -> None:
    data = scalar_batches()
    arguments: Any = (scalars, scalar_start(), Recipe(), THREE_SCALARS)
    whole = pipedream(*arguments, [data[:3], data[3:]], ETAS, replicas=(2, 1, 1))
    first = [[(0, 1), (2,), (3, 4), (5,)], [(k,) for k in range(6)], [(k,) for k in range(6)]]
    rates = [
        [ETAS[0], ETAS[2], ETAS[3], ETAS[5]],
        ETAS,
        ETAS,
    ]
    versions = [(0, 0, 0), (0, 0, 1), (0, 1, 2), (2, 3, 3), (2, 3, 4), (2, 4, 5)]
    assert ends(whole) == pytest.approx(by_hand(versions, first, rates), rel=1e-12)
