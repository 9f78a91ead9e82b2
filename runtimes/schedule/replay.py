"""The order in which one process performs the streams of all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from runtimes.schedule.action import RECEIVES, SENDS, Action, Op
from runtimes.schedule.choice import urgency
from runtimes.schedule.joining import Joining
from runtimes.schedule.program import Program, channel

__all__ = ["replay"]


def replay(program: Program) -> Iterator[Action]:
    """Rank after rank, each as far as it gets; of a rank's streams the most urgent that can go on.

    The rule of ``runtimes.execution.inprocess``.  The program must be valid.
    """
    plan = program.plan
    streams = [[iter(stream) for stream in program.of_rank(r)] for r in range(plan.world_size)]
    heads = [[next(stream, None) for stream in of_rank] for of_rank in streams]
    mailbox: Counter[object] = Counter()
    #: (pipeline, stage, update) → part → replicas that have joined its reduction.
    joined: dict[tuple[int, int, int], Counter[int | None]] = defaultdict(Counter)
    normed: Counter[tuple[int, int]] = Counter()
    joining = [Joining(program, rank) for rank in range(plan.world_size)]
    done: set[Action] = set()
    awaited = {edge for edges in program.after.values() for edge in edges}

    def ready(rank: int, action: Action) -> bool:
        if not done.issuperset(program.after.get(action, ())):
            return False
        if action.op in RECEIVES:
            return mailbox[channel(action, plan)] > 0
        if action.op == Op.AVERAGE:
            return joining[rank].ready(action)
        if action.op not in (Op.NORM, Op.STEP):
            return True
        reductions = joined[action.pipeline, action.stage, action.unit].values()
        if any(count < plan.stages[action.stage].replicas for count in reductions):
            return False
        norms = normed[action.pipeline, action.unit]
        return action.op == Op.NORM or norms in (0, plan.world_size)

    def perform(rank: int, action: Action) -> None:
        if action.op in RECEIVES | SENDS:
            mailbox[channel(action, plan)] += 1 if action.op in SENDS else -1
        elif action.op == Op.REDUCE:
            joined[action.pipeline, action.stage, action.unit][action.part] += 1
        elif action.op == Op.NORM:
            normed[action.pipeline, action.unit] += 1
        joining[rank].made(action)
        done.update({action} & awaited)

    def chosen(rank: int, mine: list[Action | None]) -> int | None:
        """The stream that goes on, if one can."""
        coming = [(urgency(action, program.batches), n) for n, action in enumerate(mine) if action]
        for _, place in sorted(coming):
            action = mine[place]
            if action is not None and ready(rank, action):
                return place
        return None

    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(heads):
            while (place := chosen(rank, mine)) is not None:
                action = mine[place]
                assert action is not None
                perform(rank, action)
                yield action
                mine[place] = next(streams[rank][place], None)
                moved = True
