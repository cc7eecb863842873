"""Data sources: each is a part that writes the prepared layout (see moecore/data/prepared.py)."""

from typing import Annotated

from pydantic import Field

from moecore.data.sources.bids import Bids
from moecore.data.sources.captioned_mosaic import CaptionedMosaic
from moecore.data.sources.cifar import Cifar
from moecore.data.sources.coco_captions import CocoCaptions
from moecore.data.sources.digits import Digits
from moecore.data.sources.docstrings import Docstrings
from moecore.data.sources.fashion_mnist import FashionMnist
from moecore.data.sources.flickr30k import Flickr30k
from moecore.data.sources.image_folder import ImageFolder
from moecore.data.sources.imagenet import Imagenet
from moecore.data.sources.mosaic import Mosaic
from moecore.data.sources.phantom import Phantom
from moecore.data.sources.wikitext import Wikitext

Source = Annotated[
    FashionMnist
    | Digits
    | ImageFolder
    | Cifar
    | Imagenet
    | Mosaic
    | CaptionedMosaic
    | CocoCaptions
    | Flickr30k
    | Phantom
    | Bids
    | Docstrings
    | Wikitext,
    Field(discriminator="kind"),
]
