"""Links between real processes, and the line through the times of their messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from runtimes.job import ModelSpec
from runtimes.model.stack import build_stack
from runtimes.planning import concurrency, link_times
from runtimes.planning.line_fit import fit_line
from runtimes.planning.profile import Profile
from runtimes.planning.profiler import measure_profile
from runtimes.planning.request import ProfileRequest
from tests.processes import run_ranks

SIZES = (1_000, 10_000, 100_000, 1_000_000, 16_000_000)
LATENCY, BANDWIDTH = 50e-6, 2e9


def line() -> dict[int, float]:
    return {size: LATENCY + size / BANDWIDTH for size in SIZES}


def test_a_line_is_found_again() -> None:
    fit = fit_line(line())
    assert fit.latency_seconds == pytest.approx(LATENCY)
    assert fit.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH)
    assert fit.largest_error < 1e-6


@pytest.mark.parametrize("size", [1_000, 100_000, 1_000_000, 16_000_000])
@pytest.mark.parametrize("factor", [0.3, 4.0])
def test_one_bad_time_does_not_turn_it(size: int, factor: float) -> None:
    times = line()
    times[size] *= factor
    fit = fit_line(times)
    assert fit.latency_seconds == pytest.approx(LATENCY)
    assert fit.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH)
    assert fit.largest_error == abs(fit.errors[size]) > 0.5


def test_plain_least_squares_would_be_turned() -> None:
    times = line()
    times[16_000_000] *= 4
    slope, latency = np.polyfit(list(times), list(times.values()), 1)
    assert abs(slope * BANDWIDTH - 1) > 1
    assert abs(latency / LATENCY - 1) > 1


def test_no_message_is_there_before_it_is_sent() -> None:
    fit = fit_line({size: size / BANDWIDTH for size in SIZES} | {1_000: 1e-9})
    assert fit.latency_seconds == pytest.approx(0, abs=1e-9)
    assert fit.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH)


def test_what_has_no_line_is_refused() -> None:
    with pytest.raises(ValueError, match="times of two sizes or more, not of 1"):
        fit_line({1000: 1.0})
    with pytest.raises(ValueError, match="longest messages took no longer"):
        fit_line({1000: 2.0, 2000: 1.0, 4000: 0.5})


def measure(rank: int, world: int) -> tuple[Profile, int]:
    link_times.MESSAGE_BYTES, link_times.REDUCE_BYTES = (1_000, 4_000_000), (1_200, 480_000)
    link_times._STOLEN_BYTES, link_times._COMPUTE_SECONDS = 400_000, 0.01
    concurrency._LEAST_SECONDS = 0.01
    spec = ModelSpec(
        "VisionTransformer",
        {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
        | {"num_classes": 3},
    )
    request = ProfileRequest(spec, (3, 8, 8), (1,), repeats=2, warm_up=0)
    before = torch.is_grad_enabled()
    profile = measure_profile(request, build_stack(spec), lambda _: None)
    assert torch.is_grad_enabled() == before
    return profile, dist.get_world_size()


def test_two_ranks_measure_together() -> None:
    (first, world), (second, _) = run_ranks(2, measure, timeout_s=100)
    links: Any = first.links
    assert links.ranks == world == 2
    assert links.latency_seconds >= 0
    assert links.bandwidth_bytes_per_s > 0
    assert set(links.all_reduce_seconds) == {2}
    assert set(links.all_reduce_seconds[2]) == {1_200, 480_000}
    assert all(seconds > 0 for seconds in links.all_reduce_seconds[2].values())
    assert links.stolen_seconds_per_byte >= 0
    # All that ranks measure is put together, so it is the same on each.
    assert second.links == links
    assert second.layers == first.layers
    assert second.optimizer_seconds_per_byte == first.optimizer_seconds_per_byte
    for op in ("SEND_ACT", "SEND_GRAD", "REDUCE"):
        assert second.action_seconds[op] == first.action_seconds[op] > 0
    (pair,) = first.provenance["links"]["pairs"]
    assert pair["ranks"] == [0, 1]
    assert set(pair["relative_error_by_bytes"]) == {1_000, 4_000_000}
    assert first.provenance["ranks"] == 2
