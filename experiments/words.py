"""Words that several commands of the command line take, and how each answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from experiments.errors import UserError

if TYPE_CHECKING:
    from experiments.commands import Answer

__all__ = ["ConfigName", "Json", "Settings", "numbers", "show"]

Number = TypeVar("Number", int, float)

ConfigName = Annotated[
    str, typer.Argument(metavar="CONFIG", help="Name, as of `matrix --list`, or path of a config.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. train.epochs=2."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def show(answer: Answer, as_json: bool) -> int:
    """Print an answer; its exit code."""
    text = json.dumps(answer.document, indent=1) if as_json else answer.text.rstrip("\n")
    sys.stdout.write(f"{text}\n")
    return answer.code


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Of a list like 64,128; UserError for what is none."""
    try:
        return tuple(kind(part) for part in text.split(",") if part)
    except ValueError:
        raise UserError(f"{option} is {text!r}, but must be numbers like 1,2,4") from None
