"""Of images and captions: how well prompts that name classes classify other images (CLIP, §3.1).

N images, K classes, P prompts a class, w numbers of an embedding.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn.functional import normalize

from moecore.core.files import UserError
from moecore.core.surroundings import Misfits, Surroundings
from moecore.data.prepared import Prepared, evenly_spaced_indices
from moecore.data.sources.cifar import Cifar
from moecore.data.sources.digits import Digits
from moecore.data.sources.fashion_mnist import FashionMnist
from moecore.data.sources.image_folder import ImageFolder
from moecore.data.sources.imagenet import Imagenet
from moecore.data.text.tokenizers import load_tokenizer
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.values import Metric, OnPage, Values
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import mean_share
from moecore.tasks.classification import BEST
from moecore.tasks.image_text import ImageText, cosine_matrix

Labelled = Annotated[
    FashionMnist | Digits | ImageFolder | Cifar | Imagenet, Field(discriminator="kind")
]
METRICS = {
    "zero_shot_accuracy": Metric(
        "Zero-shot accuracy",
        "higher",
        "share",
        note="the class whose prompts lie nearest, of images that no caption was learned for",
        limits="wilson",
    ),
    "zero_shot_top5": Metric(
        "Zero-shot Acc@5",
        "higher",
        "share",
        note="the class is among the five nearest",
        limits="wilson",
        detail=True,
    ),
}


class ZeroShot(Measurement):
    """Images with classes, and what is asked of them."""

    metrics = METRICS
    page = OnPage("classes by prompts", place=11, heading="Zero-shot")

    source: Labelled = Field(
        description="where they come from: its test split, at the size of the model's images"
    )
    templates: tuple[str, ...] = Field(
        ("a photo of a {}",), min_length=1, description="prompts; {} is a class's name"
    )
    names: tuple[str, ...] | None = Field(
        None, description="other words for the classes, in the source's order; null: its own"
    )
    images: int | None = Field(None, ge=1, description="Test images, evenly spread; null: all.")

    @field_validator("templates")
    @classmethod
    def _with_a_place(cls, templates: tuple[str, ...]) -> tuple[str, ...]:
        for template in templates:
            try:
                said = template.format("")
            except (IndexError, KeyError, ValueError) as error:
                raise ValueError(f"found {template!r}: {error}; allowed: one {{}}") from None
            if said == template:
                raise ValueError(f"found {template!r}; allowed: one {{}}, for the class")
        return templates

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield names and channels that the source has not, where its raw data are here."""
        try:
            card = self.source.describe()
        except UserError:  # only the stage needs them
            return
        if self.names and card.classes and len(self.names) != len(card.classes):
            found = f"found {len(self.names)} names"
            yield ("names",), f"{found}; allowed: {len(card.classes)}, one a class"
        if around.preview is not None and card.channels != around.preview.channels:
            found = f"found images of {card.channels} channels"
            yield ("source",), f"{found}; allowed: {around.preview.channels}"

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Why not, in words: it needs captions."""
        if isinstance(subject.data.task, ImageText):
            return None
        return "the images have no captions, so there is no text tower to ask"

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put accuracy of the class whose prompts lie nearest; UserError for names that do not fit.

        facts: data, images, templates, chance; classes, of each its name, images, how many of them
        are right, and how many words of its prompts the model does not know.
        """
        image = subject.model.image
        with tempfile.TemporaryDirectory() as folder:
            sized = self.source.model_copy(update={"size": image.shape[0]})
            sized.write(Path(folder))
            data = Prepared.open(folder)
            if data.card["channels"] != image.channels:
                problem = f"images of {data.card['channels']} channels"
                raise UserError(f"zero_shot.source: found {problem}; allowed: {image.channels}")
            where = evenly_spaced_indices(len(data.test.labels), self.images)
            images = np.asarray(data.test.images[where])
            labels = torch.from_numpy(np.array(data.test.labels[where]))
            names = self.names or data.task.classes
            about = data.card["name"]
        if len(names) != data.task.outputs:
            problem = f"found {len(names)} names"
            raise UserError(
                f"zero_shot.names: {problem}; allowed: {data.task.outputs}, one a class"
            )
        classes, unknown = class_vectors_and_unknown_words(subject, names, self.templates)
        sides, _ = predict_in_batches(subject.model, images, routing=False)
        order = cosine_matrix(sides, classes).argsort(dim=1, descending=True, stable=True)
        right = order[:, 0] == labels
        among = (order[:, :BEST] == labels[:, None]).any(dim=1)
        out.put("zero_shot_accuracy", right.double().numpy())
        if len(names) > BEST:
            out.put("zero_shot_top5", mean_share(among.numpy()))
        out.facts |= {"data": about, "images": len(labels), "templates": len(self.templates)}
        out.facts["chance"] = 1 / len(names)
        out.facts["classes"] = [
            {
                "name": name,
                "images": int((labels == number).sum()),
                "correct": int(right[labels == number].sum()),
                "unknown": unknown[number],
            }
            for number, name in enumerate(names)
        ]


def class_vectors_and_unknown_words(
    subject: MeasuredModel, names: tuple[str, ...], templates: tuple[str, ...]
) -> tuple[Tensor, list[int]]:
    """The mean unit vector (K, w + 3) of each class's prompts, and the unknown words."""
    task = subject.model.image.task
    assert isinstance(task, ImageText)
    tokenizer = load_tokenizer(subject.data.folder, task)
    encoded = [
        [tokenizer.encode(template.format(name), task.context) for template in templates]
        for name in names
    ]
    tokens = torch.tensor([[one.tokens for one in row] for row in encoded], dtype=torch.int32)
    sides = subject.model.targets(tokens)  # (K, P, w + 3)
    width = task.width
    mean = normalize(sides[:, :, :width].double().mean(dim=1), dim=1).float()
    rest = sides[:, 0, width:]
    return torch.cat([mean, rest], dim=1), [sum(one.unknown for one in row) for row in encoded]
