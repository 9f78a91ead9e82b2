"""What a user did wrong, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["UserError", "did_you_mean", "one_line"]

MANY, FEW = 24, 8
"""More names than a line should list, and how many it then does."""


class UserError(ValueError):
    """Names the value, the limit and the way out; the command line prints it and exits with 2."""


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'? (known: …)" with the nearest of ``known``, for the end of a message;
    of many only the nearest few are listed."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listed, rest = names, ""
    if len(names) > MANY:
        listed = difflib.get_close_matches(name, names, FEW, cutoff=0.0)
        rest = f" and {len(names) - len(listed)} more"
    return f"{hint} (known: {', '.join(listed)}{rest})" if names else hint
