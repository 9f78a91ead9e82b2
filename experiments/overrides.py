"""Changes to a config before it is checked: `extends`, scales and `--set a.b=c`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.errors import UserError, did_you_mean

__all__ = ["apply_scale", "merged", "parse_setting", "with_settings"]

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` on top: tables are merged key by key, all else is replaced."""
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def parse_setting(text: str) -> tuple[tuple[str, ...], Any]:
    """The path and value of ``a.b=c``; c is a TOML value, or else a string as it stands."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not _KEY.fullmatch(key):
        raise UserError(f"--set {text!r} must look like section.key=value, e.g. train.epochs=2")
    try:
        parsed = tomllib.loads(f"value = {value}\n")
    except tomllib.TOMLDecodeError:
        return tuple(key.split(".")), value.strip()
    # A value with a newline in it could smuggle in more keys than one.
    return tuple(key.split(".")), parsed["value"] if len(parsed) == 1 else value.strip()


def with_settings(
    document: Mapping[str, Any], settings: Sequence[tuple[tuple[str, ...], Any]]
) -> dict[str, Any]:
    """``document`` with every (path, value) set, in order; a number in a path indexes a list."""
    result = dict(document)
    for path, value in settings:
        result = _with_one(result, path, value, path)
    return result


def _with_one(node: Any, path: tuple[str, ...], value: Any, whole: tuple[str, ...]) -> Any:
    if not path:
        return value
    here, rest = path[0], path[1:]
    if isinstance(node, Mapping):
        below = node.get(here, {}) if rest else None
        return {**node, here: _with_one(below, rest, value, whole)}
    if isinstance(node, list) and here.isdecimal() and int(here) < len(node):
        changed = list(node)
        changed[int(here)] = _with_one(node[int(here)], rest, value, whole)
        return changed
    where = ".".join(whole[: len(whole) - len(path)])
    raise UserError(f"cannot set {'.'.join(whole)}: {where} is {node!r}, which has no key {here!r}")


def apply_scale(document: Mapping[str, Any], scale: str | None, file: str) -> dict[str, Any]:
    """``document`` without its ``scales``, and with those of the one asked for on top."""
    result = {key: value for key, value in document.items() if key != "scales"}
    scales = document.get("scales", {})
    if not isinstance(scales, Mapping) or not all(isinstance(v, Mapping) for v in scales.values()):
        raise UserError(f"{file}: scales must be tables, e.g. [scales.smoke]")
    if scale is None:
        return result
    if scale not in scales:
        hint = did_you_mean(scale, scales) if scales else ": the config has no scales"
        raise UserError(f"{file} has no scale {scale!r}{hint}")
    return merged(result, scales[scale])
