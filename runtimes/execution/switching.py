"""When a run goes on under another system: a pure function of what has been recorded."""

from __future__ import annotations

from collections.abc import Sequence

from runtimes.job import SwitchSpec

__all__ = ["switch_reason"]


def switch_reason(switch: SwitchSpec, epoch: int, accuracies: Sequence[float]) -> str | None:
    """Why the switch is due at the drain after ``epoch`` epochs; None if it is not.

    ``accuracies`` are those of all evaluations up to this drain.  A plateau is reached once
    ``patience`` of them in a row were at most ``min_delta`` above the best before them.
    """
    if switch.patience is None:
        return f"after epoch {epoch}" if epoch == switch.epoch else None
    best, waited = -1.0, 0
    for accuracy in accuracies:
        better = accuracy > best + switch.min_delta
        best, waited = (accuracy, 0) if better else (best, waited + 1)
        if waited >= switch.patience:
            return f"no accuracy above {best:.4f} + {switch.min_delta:g} in {waited} evaluations"
    return None
