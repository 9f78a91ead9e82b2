"""Stands in for the rank program, without torch: python rank_stand_in.py RUN_DIR RANK=BEHAVIOUR…

Behaviours: "ends" at once, "waits" for ever, "deaf" (waits, and ignores SIGTERM).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from runtimes.execution.status import StatusFile, die_with_parent


def main(run_dir: Path, behaviours: dict[int, str]) -> None:
    die_with_parent()
    rank = int(os.environ["RANK"])
    behaviour = behaviours[rank]
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    StatusFile(run_dir / "ranks" / f"{rank}.status").note(f"p0.s{rank}.r0.F0@0")
    (run_dir / f"pid-{rank}").write_text(str(os.getpid()))
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} {behaviour}", flush=True)
    while behaviour != "ends":
        time.sleep(0.05)


if __name__ == "__main__":
    pairs = [argument.split("=") for argument in sys.argv[2:]]
    main(Path(sys.argv[1]), {int(rank): behaviour for rank, behaviour in pairs})
