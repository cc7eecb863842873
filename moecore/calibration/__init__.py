"""Floor 1: calibrators of predictions, a family of parts."""

from moecore.calibration.temperature import Temperature

Calibrator = Temperature
