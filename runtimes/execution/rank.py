"""One rank: ``python -m runtimes.execution.rank RUN_DIR [MODULE]`` under torchrun's environment.

MODULE has a ``run_rank(run_dir)`` that does a rank's work and returns the exit code; the default
runs RUN_DIR/job.json.  Nothing of experiments is imported: all a rank needs to know is in RUN_DIR.
Torch comes last: a rank whose agent dies while torch is loaded must not outlive it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from runtimes.execution.status import die_with_parent
from runtimes.manifest import write_json

__all__ = ["AGENT_VARIABLE", "main"]

#: The agent's process id, if the agent tells: then a rank also notices that it is already gone.
AGENT_VARIABLE = "PIPEBENCH_AGENT"


def main(run_dir: Path, module: str = "runtimes.execution.session") -> int:
    """Take part in the work of this directory; the exit code says how it ended."""
    agent = os.environ.get(AGENT_VARIABLE)
    die_with_parent(None if agent is None else int(agent))

    try:
        work = importlib.import_module(module)
    except ImportError as error:
        rank = int(os.environ["RANK"])
        document = {"rank": rank, "error": f"ImportError: {error}", "action": "loading torch"}
        write_json(run_dir / f"error-{rank}.json", document)
        raise
    code: int = work.run_rank(run_dir)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
