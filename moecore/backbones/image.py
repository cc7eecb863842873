"""What a model must know of its images: taken from a data card, saved with the model."""

from pydantic import Field

from moecore.config import Config


class ImageSpec(Config):
    """Shape, classes and normalisation of the images in [0, 1] that a model is built for."""

    channels: int = Field(ge=1)
    size: int = Field(ge=1, description="height and width, pixels")
    classes: tuple[str, ...] = Field(min_length=2, description="class names, in the order of the labels")
    mean: tuple[float, ...] = Field(description="per channel, of images in [0, 1]")
    std: tuple[float, ...] = Field(description="per channel, of images in [0, 1]")

    @classmethod
    def from_card(cls, card: dict) -> "ImageSpec":
        return cls(**{name: card[name] for name in cls.model_fields})
