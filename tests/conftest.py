"""What holds for every test: one thread, no outside settings, no process left behind."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator

# Before numpy and torch start their thread pools: the tests run several processes on few cores.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["MPLBACKEND"] = "Agg"
# Neither the user's tracking account nor a launcher around pytest is the tests' business.
for _name in [*os.environ]:
    if _name.startswith(("WANDB_", "PIPEBENCH_", "TORCHELASTIC_")):
        del os.environ[_name]
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)

import hypothesis
import pytest

from tests.leftovers import MARK, left_behind

LAUNCHER_TESTS = 10

hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile("fixed")

os.environ[MARK] = uuid.uuid4().hex


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    launched = [item.nodeid for item in items if item.get_closest_marker("launcher")]
    if len(launched) > LAUNCHER_TESTS:
        raise pytest.UsageError(
            f"{len(launched)} tests go through the real launcher, but {LAUNCHER_TESTS} is the "
            f"limit: fork from the forkserver instead, as in tests/runtimes ({', '.join(launched)})"
        )


def _fail_if_left_behind(grace_s: float) -> None:
    until = time.monotonic() + grace_s
    while (processes := left_behind(os.environ[MARK])) and time.monotonic() < until:
        time.sleep(0.1)
    if processes:
        lines = [f"{process.pid} {' '.join(process.cmdline())[:200]}" for process in processes]
        for process in processes:
            process.kill()
        pytest.fail("processes left behind, now killed:\n" + "\n".join(lines), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def no_process_left_at_the_end() -> Iterator[None]:
    yield
    _fail_if_left_behind(grace_s=5)


@pytest.fixture(autouse=True)
def no_process_left_by_a_launch(request: pytest.FixtureRequest) -> Iterator[None]:
    """A launch that leaves a rank behind is named at once, not at the end of the session."""
    yield
    if request.node.get_closest_marker("launcher"):
        _fail_if_left_behind(grace_s=5)
