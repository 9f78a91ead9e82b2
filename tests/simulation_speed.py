"""How long a program of 1,024 ranks takes to be lowered and simulated, and in how much memory.

    python -m tests.simulation_speed

Each case runs in a process of its own.  Processor time is printed beside the wall's, since a
machine may have other things to do.  Takes a minute or two, so it is no part of the test suite.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from runtimes.plan import Plan
from runtimes.simulation.cluster import Cluster, Link, Node
from runtimes.simulation.costs import UniformCosts
from runtimes.simulation.simulator import simulate
from runtimes.systems import get_system

__all__ = ["CASES", "measure"]

UNITS = 256
#: System, stages, replicas of each.
CASES = [("dapple", 1024, 1), ("ashpipe", 1024, 1), ("dapple", 8, 128), ("ashpipe", 8, 128)]


def measure(system: str, stages: int, replicas: int) -> str:
    """Of UNITS micro-batches of one batch, or batches that are not cut."""
    whole = system == "ashpipe"
    plan = Plan.even(stages, stages, [replicas] * stages, micro_batches=1 if whole else UNITS)
    sizes = (replicas,) * UNITS if whole else (replicas * UNITS,)
    nodes = tuple(Node(8) for _ in range(plan.world_size // 8))
    cluster = Cluster("1,024 devices", nodes, Link(3e11, 1e-6), Link(2.5e10, 1e-5))
    costs = UniformCosts(
        plan, 1e-3, 2e-3, optimizer_seconds=1e-4, sample_bytes=1e6, parameter_bytes=1e8
    )
    wall, busy = time.perf_counter(), time.process_time()
    found = simulate(get_system(system).program(plan, sizes), cluster, costs, keep=False)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"{system}, {stages} stages × {replicas} replicas × {UNITS} units: "
        f"{busy:.1f} s of processor time, {wall:.1f} s of wall, {memory:.2f} GiB; "
        f"makespan {found.makespan_seconds:.3f} s"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(measure(*CASES[int(sys.argv[1])]) + "\n")
    else:
        for number in range(len(CASES)):
            subprocess.run(
                [sys.executable, "-m", "tests.simulation_speed", str(number)], check=True
            )
