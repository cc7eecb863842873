"""Data sources: each is a part that writes the prepared layout (see moecore/data/prepared.py)."""

from typing import Annotated

from pydantic import Field

from moecore.data.bids import Bids
from moecore.data.cifar import Cifar
from moecore.data.digits import Digits
from moecore.data.fashion_mnist import FashionMnist
from moecore.data.image_folder import ImageFolder
from moecore.data.imagenet import Imagenet
from moecore.data.mosaic import Mosaic
from moecore.data.phantom import Phantom

Source = Annotated[FashionMnist | Digits | ImageFolder | Cifar | Imagenet | Mosaic | Phantom | Bids, Field(discriminator="kind")]
