"""Floor 1: calibrators of predictions, a family of parts."""

from typing import Annotated

from pydantic import Field

from moecore.calibration.linear import Linear
from moecore.calibration.temperature import Temperature

Calibrator = Annotated[Temperature | Linear, Field(discriminator="kind")]
