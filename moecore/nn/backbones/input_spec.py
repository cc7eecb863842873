"""What a model must know of its images: taken from a data card, saved with the model."""

from typing import Any, Self

from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.tasks.base import Task


class ImageSpec(Config):
    """Shape, task and normalisation of the images or volumes that a model is built for."""

    channels: int = Field(ge=1)
    size: int | tuple[int, int, int] | tuple[int] = Field(
        description="height and width of images, pixels; or depth, height and width, voxels; or "
        "tokens of a block of text, whose channels are the blocks that are read"
    )
    mean: tuple[float, ...] = Field(description="per channel, of images in [0, 1]")
    std: tuple[float, ...] = Field(description="per channel, of images in [0, 1]")
    task: Task = Field(description="what is predicted of them")
    truth: int = Field(
        0,
        ge=0,
        description="kinds of tokens that one channel more names, of text a second row of blocks, "
        "unseen by models; 0: none",
    )

    @model_validator(mode="after")
    def _at_least_one_pixel(self) -> Self:
        if min(self.shape) < 1:
            raise ValueError(f"size is {self.size}; allowed: 1 or more along each axis")
        return self

    @classmethod
    def from_card(cls, card: dict[str, Any]) -> Self:
        """The images that a data card describes; KeyError where it lacks a field."""
        fields = cls.model_fields.items()
        return cls(
            **{name: card[name] for name, field in fields if field.is_required() or name in card}
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Pixels along each axis: two axes for images, three for volumes, one for text."""
        if isinstance(self.size, int):
            return (self.size, self.size)
        return self.size

    @property
    def stored_channels(self) -> int:
        """Channels of an image as it is stored and handed to a model."""
        if not self.truth:
            return self.channels
        return 2 * self.channels if len(self.shape) == 1 else self.channels + 1

    @property
    def outputs(self) -> int:
        """Numbers that a head gives."""
        return self.task.outputs

    @property
    def answers(self) -> tuple[str, ...]:
        """Return what is asked; models with the same answers may exchange their heads."""
        return self.task.answers


def check_patches_and_heads(image: ImageSpec, patch: int, width: int, heads: int) -> None:
    """Raise UserError where patches do not tile the images or heads do not divide the width."""
    if any(size % patch for size in image.shape):
        if isinstance(image.size, int):
            size = image.size
        else:
            size = list(image.size)
        raise UserError(f"model.patch: found {patch}; allowed: a divisor of the image size {size}")
    if width % heads:
        raise UserError(f"model.heads: found {heads}; allowed: a divisor of model.width = {width}")
