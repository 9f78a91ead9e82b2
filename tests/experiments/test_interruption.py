"""What Ctrl-C and SIGTERM do, at what time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from experiments.interruption import Interruption


@pytest.fixture
def interruption() -> Iterator[Interruption]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    found = Interruption()
    found.install()
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_at_once_where_nothing_is_under_way(
    interruption: Interruption, number: signal.Signals
) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    assert interruption.stop.is_set()


def test_in_order_where_runs_are_and_at_once_the_second_time(interruption: Interruption) -> None:
    with interruption.deferred() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_threads_see_it(interruption: Interruption) -> None:
    seen = []
    with interruption.deferred() as stop:
        thread = threading.Thread(target=lambda: seen.append(stop.wait(10)))
        thread.start()
        os.kill(os.getpid(), signal.SIGTERM)
        thread.join()
    assert seen == [True]
