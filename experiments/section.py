"""What all sections of a config share: no unknown key, no later change, and kinds of numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["BelowOne", "Count", "Label", "Positive", "Seconds", "Section", "Seed", "Share"]

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class Section(BaseModel):
    # TOML has inf and nan, which no setting means.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
