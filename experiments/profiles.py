"""Profile files: where they lie, and what decides whether two are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.config import Config
from experiments.errors import UserError, one_line
from experiments.paths import PROFILES, named_file
from runtimes.job import ModelSpec
from runtimes.planning.profile import Profile

__all__ = ["check_profile", "content_hash", "load_profile", "model_of", "profile_names"]


def profile_names() -> list[str]:
    return sorted(file.stem for file in PROFILES.glob("*.json"))


def load_profile(name_or_path: str) -> Profile:
    """That of this path, or of this name in experiments/profiles; UserError if there is none."""
    file = named_file(name_or_path, PROFILES, ".json", "profile")
    try:
        return Profile.load(file)
    except ValueError as error:
        raise UserError(one_line(error)) from None


def content_hash(document: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of all of a profile or cluster but where its numbers come from."""
    content = {key: value for key, value in document.items() if key != "provenance"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def model_of(config: Config) -> ModelSpec:
    return ModelSpec(**config.model.model_dump())


def check_profile(profile: Profile, config: Config, image: Sequence[int], named: str) -> None:
    """UserError if the profile, ``named`` so, is of something else than the config trains."""
    for what, profiled, wanted in (
        ("model", _in_words(profile.model), _in_words(model_of(config))),
        ("images", _sides(profile.image), _sides(image)),
        ("precision", profile.precision, config.train.precision),
    ):
        if profiled != wanted:
            raise UserError(
                f"{config.name}: {named} is of {what} {profiled}, but the config has {wanted}: "
                "profile that, or choose another"
            )


def _in_words(spec: ModelSpec) -> str:
    norm = "" if spec.batch_norm is None else f" batch_norm={spec.batch_norm}"
    return f"{spec.name} {json.dumps(spec.args, sort_keys=True, default=str)}{norm}"


def _sides(image: Sequence[int]) -> str:
    return "×".join(map(str, image))
