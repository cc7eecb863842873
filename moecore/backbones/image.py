"""What a model must know of its images: taken from a data card, saved with the model."""

from typing import Self

from pydantic import Field, model_validator

from moecore.config import Config


class ImageSpec(Config):
    """Shape, answers and normalisation of the images or volumes in [0, 1] that a model is built for.

    The answers are classes, or a real number, the ``target``: exactly one of the two.
    """

    channels: int = Field(ge=1)
    size: int | tuple[int, int, int] = Field(description="height and width of images, pixels; or depth, height and width of volumes, voxels")
    classes: tuple[str, ...] = Field(default=(), description="class names, in the order of the labels; none where there is a target")
    mean: tuple[float, ...] = Field(description="per channel, of images in [0, 1]")
    std: tuple[float, ...] = Field(description="per channel, of images in [0, 1]")
    target: str | None = Field(default=None, description="what real number the labels are, such as age; null for classes")
    target_mean: float = Field(default=0.0, description="of the training labels, in the target's unit: what an untrained head says")
    target_std: float = Field(default=1.0, gt=0, description="of the training labels, in the target's unit: one unit of the head's output")

    @model_validator(mode="after")
    def _answers(self) -> Self:
        if min(self.shape) < 1:
            raise ValueError(f"size is {self.size}; allowed: 1 or more along each axis")
        if self.target is None and len(self.classes) < 2:
            raise ValueError(f"classes are {list(self.classes)}; allowed: two or more, or none and a target")
        if self.target is not None and self.classes:
            raise ValueError(f"target is {self.target} and there are {len(self.classes)} classes; allowed: one of the two")
        return self

    @classmethod
    def from_card(cls, card: dict) -> "ImageSpec":
        """The images that a data card describes. Raises KeyError where it lacks a field that every card has."""
        always = {name: card[name] for name in ("channels", "size", "classes", "mean", "std")}
        return cls(**always, **{name: card[name] for name in ("target", "target_mean", "target_std") if card.get("target") is not None})

    @property
    def shape(self) -> tuple[int, ...]:
        """Pixels along each axis: two axes for images, three for volumes."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def outputs(self) -> int:
        """Numbers that a head gives: one per class, or one for a target."""
        return len(self.classes) if self.target is None else 1

    @property
    def answers(self) -> tuple[str, ...]:
        """What is asked; models with the same answers may exchange their heads."""
        return self.classes if self.target is None else (self.target,)
