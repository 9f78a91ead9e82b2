"""What a config file may say of training itself: [train] with its optimizer and learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from experiments.section import BelowOne, Count, Seconds, Section, Seed, Share

__all__ = ["LearningRate", "Optimizer", "Train"]


class Optimizer(Section):
    """``clip``: largest norm of an update's gradients, ``clip_by`` that of the whole model or of
    each stage, which says nothing without it."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = Field(default=0.1, ge=0)
    momentum: BelowOne = 0.0
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    clip: float | None = Field(default=None, gt=0)
    clip_by: Literal["global", "stage"] = "global"

    @model_validator(mode="after")
    def _of_the_method(self) -> Optimizer:
        if self.name == "adamw" and self.momentum:
            raise ValueError(
                f"momentum is {self.momentum}, but adamw has betas instead: set it to 0"
            )
        if self.nesterov and not (self.name == "sgd" and self.momentum):
            raise ValueError(
                "nesterov needs sgd with a momentum above 0: set one, or nesterov = false"
            )
        return self


class LearningRate(Section):
    """Of the peak ``optimizer.lr``; epochs may be fractions."""

    kind: Literal["constant", "cosine", "step"] = "constant"
    warmup_epochs: float = Field(default=0.0, ge=0)
    floor: Share = 0.0
    milestones: tuple[Annotated[float, Field(ge=0)], ...] = ()
    gamma: float = Field(default=0.1, gt=0)


class Train(Section):
    """``seeds`` stands for one run a seed; ``evaluate_every`` and ``checkpoint_every`` in epochs.

    ``start_from``: id or directory of a run whose last checkpoint is the start, whatever its system
    and plan; copies of parallel pipelines go only to as many, and all others take only their
    reference, which ``start_from_reference`` asks for.  ``action_timeout_s``: a rank that waits
    longer for another ends the run.
    """

    batch_size: Count
    epochs: Count = 1
    seed: Seed = 0
    seeds: tuple[Seed, ...] | None = Field(default=None, min_length=1)
    label_smoothing: BelowOne = 0.0
    precision: Literal["float32", "tf32", "bf16", "float64"] = "float32"
    optimizer: Optimizer = Optimizer()
    learning_rate: LearningRate = LearningRate()
    evaluate_every: Count = 1
    checkpoint_every: Count = 1
    evaluation_batch_size: Count = 256
    start_from: str | None = Field(default=None, min_length=1)
    start_from_reference: bool = False
    action_timeout_s: Seconds = 300.0

    @field_validator("precision", mode="before")
    @classmethod
    def _no_half(cls, value: object) -> object:
        if value in ("fp16", "float16", "half"):
            raise ValueError(
                "fp16 is refused: its gradients underflow without loss scaling, which would make "
                "the step differ from system to system; use bf16"
            )
        return value

    @model_validator(mode="after")
    def _within_epochs(self) -> Train:
        if self.learning_rate.warmup_epochs > self.epochs:
            raise ValueError(
                f"learning_rate.warmup_epochs is {self.learning_rate.warmup_epochs}, but there are "
                f"only {self.epochs} epochs"
            )
        if self.start_from_reference and self.start_from is None:
            raise ValueError(
                "start_from_reference is true, but there is no start_from: name the run whose "
                "reference is the start"
            )
        if self.seeds is not None and len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds {self.seeds} repeat one")
        return self
