"""Attacks on images, a family of parts."""

from typing import Annotated

from pydantic import Field

from moecore.attacks.apgd import Apgd
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.pgd import Pgd

Attack = Annotated[Apgd | Fgsm | Pgd, Field(discriminator="kind")]
