"""Zero-shot classification by P prompts per class (CLIP, §3.1), for images and captions."""

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn.functional import normalize

from moecore.core.config import Misfits, Surroundings
from moecore.core.files import UserError, format_found_and_allowed
from moecore.data.prepared import Prepared, evenly_spaced_indices
from moecore.data.sources import fashion_mnist, image_folder, imagenet
from moecore.data.sources.cifar import Cifar
from moecore.data.sources.digits import Digits
from moecore.data.text.tokenizers import load_tokenizer
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.values import Metric, OnPage, Values
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import mean_share
from moecore.tasks.classification import TOP_FIVE
from moecore.tasks.image_text import ImageText, cosine_matrix

Labelled = Annotated[
    fashion_mnist.FashionMnist | Digits | image_folder.ImageFolder | Cifar | imagenet.Imagenet,
    Field(discriminator="kind"),
]
METRICS = {
    "zero_shot_accuracy": Metric(
        "Zero-shot accuracy",
        "higher",
        "share",
        note="class with the nearest prompts; images of a data set that is not used in training",
        limits="wilson",
    ),
    "zero_shot_top5": Metric(
        "Zero-shot Acc@5", "higher", "share", "among the five nearest", limits="wilson", detail=True
    ),
}


class ZeroShot(Measurement):
    """Zero-shot classification of another data set's test images."""

    metrics = METRICS
    page = OnPage("classes by prompts", place=11, heading="Zero-shot")

    source: Labelled = Field(description="data set whose test split is used, resized for the model")
    templates: tuple[str, ...] = Field(
        ("a photo of a {}",), min_length=1, description="prompts; {} is a class's name"
    )
    names: tuple[str, ...] | None = Field(
        None, description="names of the classes, in the source's order; null: the source's names"
    )
    images: int | None = Field(None, ge=1, description="Test images, evenly spread; null: all.")

    @field_validator("templates")
    @classmethod
    def _check_placeholder_for_class(cls, templates: tuple[str, ...]) -> tuple[str, ...]:
        for template in templates:
            try:
                prompt = template.format("")
            except (IndexError, KeyError, ValueError) as error:
                raise ValueError(f"found {template!r}: {error}; allowed: one {{}}") from None
            if prompt == template:
                raise ValueError(f"found {template!r}; allowed: one {{}}, for the class")
        return templates

    def misfits(self, around: Surroundings) -> Misfits:
        try:
            card = self.source.describe()
        except UserError:  # missing raw data; the stage reports them
            return
        if self.names and card.classes and len(self.names) != len(card.classes):
            names, classes = f"{len(self.names)} names", f"{len(card.classes)}, one per class"
            yield ("names",), format_found_and_allowed(found=names, allowed=classes)
        if around.preview is not None and card.channels != around.preview.channels:
            text = f"images of {card.channels} channels"
            yield ("source",), format_found_and_allowed(found=text, allowed=around.preview.channels)

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        if isinstance(subject.data.task, ImageText):
            return None
        return "the images have no captions, so there is no text tower"

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        # facts: data, images, templates, chance; classes, with name, images, right answers and
        # number of unknown words in the prompts.
        image = subject.model.image
        with tempfile.TemporaryDirectory() as folder:
            self.source.model_copy(update={"size": image.shape[0]}).write(Path(folder))
            data = Prepared.open(folder)
            if data.card["channels"] != image.channels:
                channels = f"images of {data.card['channels']} channels"
                raise UserError.at("zero_shot.source", found=channels, allowed=image.channels)
            indices = evenly_spaced_indices(len(data.test.labels), self.images)
            images = np.asarray(data.test.images[indices])
            labels = torch.from_numpy(np.array(data.test.labels[indices]))
            names = self.names or data.task.classes
            source_name = data.card["name"]
        if len(names) != data.task.outputs:
            expected = f"{data.task.outputs}, one per class"
            raise UserError.at("zero_shot.names", found=f"{len(names)} names", allowed=expected)
        classes, unknown = embed_classes_and_count_unknown(subject, names, self.templates)
        sides, _ = predict_in_batches(subject.model, images, routing=False)
        order = cosine_matrix(sides, classes).argsort(dim=1, descending=True, stable=True)
        is_right = order[:, 0] == labels
        out.put("zero_shot_accuracy", is_right.double().numpy())
        if len(names) > TOP_FIVE:
            is_among_best = (order[:, :TOP_FIVE] == labels[:, None]).any(dim=1)
            out.put("zero_shot_top5", mean_share(is_among_best.numpy()))
        out.facts |= {"data": source_name, "images": len(labels), "templates": len(self.templates)}
        out.facts["chance"] = 1 / len(names)
        out.facts["classes"] = rows = []
        for number, name in enumerate(names):
            hits = is_right[labels == number]
            row = {"name": name, "images": len(hits), "correct": int(hits.sum())}
            rows.append(row | {"unknown": unknown[number]})


def embed_classes_and_count_unknown(
    subject: MeasuredModel, names: tuple[str, ...], templates: tuple[str, ...]
) -> tuple[Tensor, list[int]]:
    """Return (K, w + 3): normalised mean prompt embedding, 1 and hash; and unknown word counts."""
    # w columns of the embedding; a flag that the prompt exists; a 2-number hash (``two_towers``)
    task = subject.model.image.task
    assert isinstance(task, ImageText)
    tokenizer = load_tokenizer(subject.data.folder, task)
    encoded = [
        [tokenizer.encode(template.format(name), task.context) for template in templates]
        for name in names
    ]
    tokens = [[prompt.tokens for prompt in prompts] for prompts in encoded]
    sides = subject.model.targets(torch.tensor(tokens, dtype=torch.int32))  # (K, P, w + 3)
    width = task.width
    mean = normalize(sides[:, :, :width].double().mean(dim=1), dim=1).float()
    rest = sides[:, 0, width:]
    unknown = [sum(prompt.unknown for prompt in prompts) for prompts in encoded]
    return torch.cat([mean, rest], dim=1), unknown
