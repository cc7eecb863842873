"""Attacks on images, a family of parts."""

from typing import Annotated

from pydantic import Field

from moecore.attacks.apgd import Apgd
from moecore.attacks.apgd_reference import ApgdReference
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.pgd import Pgd
from moecore.attacks.square import Square

Attack = Annotated[Apgd | ApgdReference | Fgsm | Pgd | Square, Field(discriminator="kind")]
