from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.processes import RankError, run_ranks


@dataclass
class Weight:
    value: torch.Tensor


def summed(rank: int, world_size: int, weight: Weight) -> Weight:
    total = weight.value * (rank + 1)
    dist.all_reduce(total)
    return Weight(total)


def stuck(rank: int, world_size: int) -> None:
    if rank == 1:
        dist.recv(torch.zeros(1), src=0)
    time.sleep(60)


def failing(rank: int, world_size: int, how: str) -> None:
    if rank == 1 and how == "raise":
        raise KeyError("no such layer")
    if rank == 1:
        os._exit(7)
    dist.barrier()


def identity(rank: int, world_size: int) -> int:
    return os.getpid()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_ranks_share_a_group_and_return_tensors() -> None:
    results = run_ranks(3, summed, Weight(torch.ones(2)))
    assert [r.value.tolist() for r in results] == [[6.0, 6.0]] * 3
    assert run_ranks(1, summed, Weight(torch.ones(1)))[0].value.item() == 1.0


def test_no_process_is_left() -> None:
    assert all(gone(pid) for pid in run_ranks(2, identity))


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match="rank 1: Traceback(.|\n)*in failing(.|\n)*no such") as info:
        run_ranks(2, failing, "raise")
    assert info.value.rank == 1
    with pytest.raises(RankError, match="rank 1: ended with exit code 7") as info:
        run_ranks(2, failing, "exit")
    assert info.value.rank == 1


def test_a_call_is_bounded_and_shows_the_stacks() -> None:
    begin = time.monotonic()
    with pytest.raises(
        RankError, match=r"no result of ranks \[0, 1\](.|\n)*in recv(.|\n)*in stuck"
    ):
        run_ranks(2, stuck, timeout_s=1.5)
    assert time.monotonic() - begin < 5


def test_only_functions_of_a_file_are_taken() -> None:
    with pytest.raises(ValueError, match="top level"):
        run_ranks(1, lambda rank, world_size: None)
