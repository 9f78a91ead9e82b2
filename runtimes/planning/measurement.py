"""What a rank of a profiling launch does: measures, and the first rank writes the profile."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from runtimes.execution.session import guarded, join_ranks, prepare_process
from runtimes.execution.status import StatusFile
from runtimes.manifest import write_json
from runtimes.model.stack import build_stack
from runtimes.planning.profiler import measure_profile
from runtimes.planning.request import PROFILE_FILE, ProfileRequest

__all__ = ["run_rank"]

_TIMEOUT_S = 600.0


def run_rank(run_dir: Path) -> int:
    """Measure what is asked for in this directory, and leave the profile there; the exit code."""

    def work(rank: int, status: StatusFile) -> None:
        request = ProfileRequest.load(run_dir)
        device = torch.device(request.device)
        prepare_process(request.precision, device, pin_cores=request.pin_cores)
        several = int(os.environ["WORLD_SIZE"]) > 1
        if several:
            join_ranks(device, _TIMEOUT_S)
        profile = measure_profile(request, build_stack(request.model), status.note)
        if rank == 0:
            write_json(run_dir / PROFILE_FILE, profile.to_json())
        status.note("end")
        if several:
            dist.barrier()
            dist.destroy_process_group()

    return guarded(run_dir, work)
