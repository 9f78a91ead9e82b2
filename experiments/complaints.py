"""What pydantic says of a TOML file, in one line that names key, value and what may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from experiments.errors import did_you_mean, one_line

__all__ = ["in_words"]


def in_words(error: ValidationError, model: type[BaseModel], file: str) -> str:
    """The first of pydantic's complaints, which names its key, its value and what may be."""
    details = error.errors()
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{file}: {_complaint(details[0], model)}{more}"


def _complaint(detail: ErrorDetails, model: type[BaseModel]) -> str:
    *above, last = detail["loc"] or ("file",)
    key = ".".join(str(part) for part in detail["loc"])
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        known = _keys_at(model, above)
        section = f" in [{'.'.join(str(part) for part in above)}]" if above else ""
        return f"unknown key {last!r}{section}{did_you_mean(str(last), known)}"
    if kind == "missing":
        return f"{key} is missing"
    if kind == "value_error":
        said = one_line(context["error"])
        return f"{key}: {said}" if key else said
    if kind == "literal_error":
        known = [
            choice.strip(" '") for choice in context["expected"].replace(" or ", ",").split(",")
        ]
        return f"{key} is {value!r}, which is unknown{did_you_mean(str(value), known)}"
    kinds = {"model_type": "a table", "tuple_type": "a list", "finite_number": "a finite number"}
    if kind in kinds:
        return f"{key} is {value!r}, but must be {kinds[kind]}"
    limits = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("above", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("below", "lt"),
    }
    if kind in limits:
        words, name = limits[kind]
        return f"{key} is {value!r}, but must be {words} {context[name]}"
    return f"{key} is {value!r}: {one_line(detail['msg'])}"


def _keys_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that the section at ``path`` has."""
    here: Any = model
    for part in path:
        if isinstance(part, str):
            here = here.model_fields[part].annotation
        sections = [kind for kind in (here, *_arguments(here)) if _is_section(kind)]
        here = sections[0]
    names: Mapping[str, Any] = here.model_fields
    return list(names)


def _arguments(annotation: Any) -> list[Any]:
    return [inner for outer in get_args(annotation) for inner in (outer, *_arguments(outer))]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
