"""Timelines of programs that nobody ran: every action takes a given time, messages take none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from runtimes.plan import Plan
from runtimes.schedule import Op, Program
from runtimes.schedule.action import RECEIVES, SENDS, Action
from runtimes.schedule.program import channel
from runtimes.schedule.replay import replay
from runtimes.systems import get_system
from runtimes.timeline import Span, Timeline

__all__ = ["SECONDS", "message", "program_of", "timeline_of"]

SECONDS = {Op.F: 0.01, Op.R: 0.01, Op.B: 0.02, Op.STEP: 0.005, Op.REDUCE: 0.001}


def program_of(plan: Plan, sizes: tuple[int, ...] = (8, 8, 3), system: str = "dapple") -> Program:
    return get_system(system).program(plan, sizes)


def message(action: Action, plan: Plan) -> Any:
    """By which a send and its receive know each other."""
    assert action.interval is not None
    return channel(action, plan), action.unit, action.interval


def timeline_of(program: Program, seconds: Mapping[Op, float] = SECONDS, **about: Any) -> Timeline:
    plan = program.plan
    ranks: dict[int, list[Span]] = defaultdict(list)
    sent: dict[Any, float] = {}
    for action in replay(program):
        rank = plan.rank(action.stage, action.replica)
        start = ranks[rank][-1].end_seconds if ranks[rank] else 0.0
        end = start + seconds.get(action.op, 0.0)
        if action.op in SENDS:
            sent[message(action, plan)] = start
        elif action.op in RECEIVES:
            end = max(start, sent[message(action, plan)])
        ranks[rank].append(Span(action, start, end))
    told = {"label": "dapple", "evidence": "simulated", "segment": "updates 0 … 2", **about}
    return Timeline(
        plan=plan,
        batches=program.batches,
        ranks=tuple(tuple(ranks[rank]) for rank in range(plan.world_size)),
        **told,
    )
