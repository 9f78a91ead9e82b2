"""From a config's name or path to checked configs, one a run."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from experiments.complaints import in_words
from experiments.config import Config
from experiments.emulation import with_hashes
from experiments.errors import UserError, did_you_mean, one_line
from experiments.overrides import apply_scale, merged, parse_setting, with_settings
from experiments.paths import CONFIGS
from experiments.sweep import Point, points

__all__ = ["config_names", "find_config", "load", "load_runs", "tiers", "with_point"]


def config_names() -> list[str]:
    """Names of all configs that run; files called base-… are only for others to extend."""
    files = [file for file in CONFIGS.rglob("*.toml") if not file.stem.startswith("base-")]
    return sorted(file.relative_to(CONFIGS).with_suffix("").as_posix() for file in files)


def tiers() -> list[str]:
    return sorted({tier for name in config_names() for tier in load(name).tiers})


def find_config(name_or_path: str) -> Path:
    """The file of a config given by its path, or by its name as in `matrix --list`."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise UserError(f"no config file {name_or_path}")
        return path.absolute()
    file = CONFIGS / f"{name_or_path}.toml"
    if name_or_path not in config_names():
        raise UserError(
            f"unknown config {name_or_path!r}{did_you_mean(name_or_path, config_names())}"
        )
    return file


def load(name_or_path: str, settings: Sequence[str] = ()) -> Config:
    """The config with ``settings`` ("a.b=c") applied; of several seeds or points it still is one.

    Raises UserError, in one line that names key and file, for whatever cannot be.
    """
    file = find_config(name_or_path)
    shown = _shown(file)
    whole = _read(file, ())
    given = [parse_setting(text) for text in settings]
    scales = [value for path, value in given if path == ("scale",)]
    document = apply_scale(whole, str(scales[-1]) if scales else None, shown)
    document = with_settings(document, [entry for entry in given if entry[0] != ("scale",)])
    document = {"name": _name(file), **document}
    document["scales"] = () if scales else tuple(whole.get("scales", ()))
    config = _checked(document, shown)
    for path, _ in given:
        if config.sweep is not None and (key := ".".join(path)) in config.sweep:
            raise UserError(f"{shown} sweeps {key}: use --set sweep.{key}=[…], not --set {key}=…")
    if config.waits_for is not None:
        find_config(config.waits_for)
    return config


def load_runs(name_or_path: str, settings: Sequence[str] = ()) -> list[Config]:
    """One config a run: points of ``sweep`` and seeds of ``train.seeds`` become runs of their own.

    Values that are the ``best_of`` a sweep are still to be put in.
    """
    config = load(name_or_path, settings)
    found = [config]
    if config.sweep is not None:
        found = [with_point(config, point, {"swept": point}) for point in points(config.sweep)]
    return [run for config in found for run in _seeded(config)]


def _seeded(config: Config) -> list[Config]:
    if config.train.seeds is None:
        return [config]
    return [
        config.model_copy(
            update={"train": config.train.model_copy(update={"seed": seed, "seeds": None})}
        )
        for seed in config.train.seeds
    ]


def with_point(config: Config, point: Point, record: Mapping[str, Any]) -> Config:
    """The config at a point of a sweep; ``record``: top-level keys that tell of the sweep."""
    document = config.model_dump(mode="json", exclude_none=True, exclude={"sweep"})
    shown = f"{config.name} with {', '.join(f'{key} = {value}' for key, value in point.items())}"
    try:
        changes = [(tuple(key.split(".")), value) for key, value in point.items()]
        document = with_settings(document, changes) | dict(record)
    except UserError as error:
        raise UserError(f"{shown}: {error}") from None
    return _checked(document, shown)


def _checked(document: Mapping[str, Any], shown: str) -> Config:
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        raise UserError(in_words(error, Config, shown)) from None
    _check_systems(config, shown)
    return with_hashes(config, shown)


def _name(file: Path) -> str:
    inside = file.is_relative_to(CONFIGS)
    return file.relative_to(CONFIGS).with_suffix("").as_posix() if inside else file.stem


def _shown(file: Path) -> str:
    return f"configs/{_name(file)}.toml" if file.is_relative_to(CONFIGS) else str(file)


def _read(file: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    """The file's tables, on top of those of the file that it ``extends`` (a name beside it)."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {_shown(file)}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{_shown(file)} is not TOML: {one_line(error)}") from None
    extends = document.pop("extends", None)
    if extends is None:
        return document
    base = file.parent / f"{extends}.toml"
    if not base.is_file():
        raise UserError(f"{_shown(file)} extends {extends!r}, but there is no {_shown(base)}")
    if base in below:
        raise UserError(f"{_shown(file)} extends itself, by way of {_shown(base)}")
    return merged(_read(base, (*below, file)), document)


def _check_systems(config: Config, file: str) -> None:
    # Imported here: schedules are pure Python, but the listing of configs needs none of them.
    from runtimes.systems import PEERS

    named = [(contender.system, contender.options) for contender in config.contenders()]
    if config.switch is not None:
        named.append((config.switch.system.name, config.switch.system.options))
    for name, options in named:
        _check_system(name, options, file)
        if name in PEERS and config.launch.transport == "in-process":
            raise UserError(
                f"{file}: {name} is a peer, which takes a process for each rank, but "
                'launch.transport is "in-process": set it to "distributed"'
            )
        if name in PEERS and config.launch.cluster is not None:
            raise UserError(
                f"{file}: {name} is a peer, whose messages launch.cluster does not delay: leave "
                f"one of them out, or use {PEERS[name][1]}"
            )
        if name in PEERS and config.switch is not None:
            raise UserError(
                f"{file}: {name} is a peer, and a [switch] is from one of ours to another: "
                f"use {PEERS[name][1]}"
            )


def _check_system(name: str, options: Mapping[str, Any], file: str) -> None:
    from runtimes.systems import PEERS, SYSTEMS, get_system

    if name in SYSTEMS:
        try:
            get_system(name, options)
        except ValueError as error:
            raise UserError(f"{file}: {one_line(error)}") from None
    elif name not in PEERS:
        hint = did_you_mean(name, [*SYSTEMS, *PEERS])
        raise UserError(f"{file}: unknown system {name!r}{hint}")
    elif options:
        given = ", ".join(options)
        raise UserError(f"{file}: {name} is a peer without options, not {given}")
