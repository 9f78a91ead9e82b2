"""For which strengths elastic averaging draws copies and reference together.

N  copies x_i of one set of weights, c  their reference, m  the mean of the copies, α  the strength

Without gradients an averaging multiplies the copies' differences x_i − m by 1 − α, and m − c by

    symmetric      1 − (N + 1) α              old c on both sides (Zhang et al. 2015)
    centre-first   (1 − α)(1 − N α)           since c' = c + N α (m − c), and m' = (1 − α) m + α c'

They shrink where every factor lies between −1 and 1:

    symmetric      α < 2 / (N + 1)
    centre-first   α < (N + 1) / N, and also N α² − (N + 1) α + 2 > 0, which from N = 6 on excludes
                   the α between the roots ((N + 1) ± √(N² − 6 N + 1)) / (2 N)

One copy after the other (asynchronously) each step is a map of (x, c) alone.  The symmetric one has
the eigenvalues 1 and 1 − 2 α, and a round of them the determinant (1 − 2 α)^N, so α < 1 is needed,
and it suffices, since each map is symmetric.  In the centre-first form α ≤ 1 suffices: copy and
reference then stay between what they were.
"""

from __future__ import annotations

from math import sqrt

from runtimes.system import Elastic

__all__ = ["complaints", "is_stable", "stable_strengths"]


def is_stable(elastic: Elastic, copies: int) -> bool:
    """Whether averaging so many copies is, for α > 0."""
    alpha = elastic.alpha
    if not elastic.joint:
        return alpha <= 1 if elastic.centre_first else alpha < 1
    apart, together = 1 - alpha, 1 - copies * alpha
    factors = apart, apart * together if elastic.centre_first else apart - copies * alpha
    return all(abs(factor) < 1 for factor in factors)


def stable_strengths(elastic: Elastic, copies: int) -> str:
    """The α for which :func:`is_stable`, and where that is from."""
    ours = "runtimes/avgpipe/stability.py"
    if not elastic.joint:
        return f"α {'≤' if elastic.centre_first else '<'} 1 ({ours})"
    if not elastic.centre_first:
        return f"α < 2/(N + 1) = {2 / (copies + 1):.3g} (Zhang et al. 2015)"
    last, under = (copies + 1) / copies, copies * copies - 6 * copies + 1
    if under < 0:
        return f"α < (N + 1)/N = {last:.3g} ({ours})"
    low, high = ((copies + 1 + sign * sqrt(under)) / (2 * copies) for sign in (-1, 1))
    return f"α < {low:.3g} or {high:.3g} < α < (N + 1)/N = {last:.3g} ({ours})"


def complaints(elastic: Elastic, copies: int) -> tuple[str, ...]:
    """A sentence that names α, bound and source, unless averaging is stable."""
    if is_stable(elastic, copies):
        return ()
    when = "synchronous" if elastic.joint else "asynchronous"
    form = "centre-first" if elastic.centre_first else "symmetric"
    return (
        f"alpha = {elastic.alpha:g} is outside the range in which {when} averaging of {copies} "
        f"copies in the {form} form is stable: {stable_strengths(elastic, copies)}",
    )
