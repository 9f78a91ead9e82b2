"""What a config says of its data: which, how many of them, and how they are augmented."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from experiments.section import Count, Section

__all__ = ["Augmentation", "Data", "Sizes"]


class Augmentation(Section):
    cutout: int = Field(default=0, ge=0)
    crop_padding: int = Field(default=0, ge=0)
    flip: bool = False


class Sizes(Section):
    """Numbers of samples; None: all there are.

    ``held_out``: so many of the training images, none of which is trained on, are the validation
    part instead, so that a choice can be made that has not seen the test images.
    """

    train: Count | None = None
    validation: Count | None = None
    held_out: Count | None = None

    @model_validator(mode="after")
    def _one_validation_part(self) -> Sizes:
        if self.validation is not None and self.held_out is not None:
            raise ValueError(
                f"validation is {self.validation} test images and held_out {self.held_out} "
                "training images, but there is one validation part: leave one of them out"
            )
        return self


class Data(Section):
    """``root``: where files lie that pipebench does not make itself; ``download`` fetches them.

    ``image_size``: pixels a side, images are resized.  ``seed`` draws the split, the subset and
    random images: it belongs to the data, so runs of several seeds share them.  ``classes`` and
    ``channels`` are for random images.
    """

    set: Literal["digits", "fashion-mnist", "cifar100", "random"]
    image_size: Count
    root: str | None = None
    download: bool = False
    sizes: Sizes = Sizes()
    seed: int = Field(default=0, ge=0)
    classes: Count | None = None
    channels: Count | None = None
    augmentation: Augmentation = Augmentation()

    @model_validator(mode="after")
    def _inside_the_image(self) -> Data:
        for name in ("cutout", "crop_padding"):
            pixels = getattr(self.augmentation, name)
            if pixels > self.image_size:
                raise ValueError(
                    f"augmentation.{name} is {pixels} pixels, but images have only "
                    f"{self.image_size} a side"
                )
        return self

    @model_validator(mode="after")
    def _random_only(self) -> Data:
        given = {"classes": self.classes, "channels": self.channels}
        extra = [key for key, value in given.items() if value is not None]
        if extra and self.set != "random":
            raise ValueError(f'{", ".join(extra)}: only for set = "random"')
        if self.sizes.held_out is not None and self.set == "random":
            raise ValueError('sizes.held_out: not for set = "random", whose accuracy means nothing')
        return self
