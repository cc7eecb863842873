"""Calibrators of predictions, a family of parts."""

from typing import Annotated

from pydantic import Field

from moecore.measure.calibrators.linear import Linear
from moecore.measure.calibrators.temperature import Temperature

Calibrator = Annotated[Temperature | Linear, Field(discriminator="kind")]
