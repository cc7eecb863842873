"""What every calibrator says of itself."""

from typing import ClassVar, Literal

from moecore.core.part_families import Part


class Calibrator(Part):
    """A calibrator of predictions, a family of parts: a child of Temperature or of Linear."""

    predicts: ClassVar[Literal["classes", "numbers"]]  # how the stage ``calibrate`` goes about it
    tasks: ClassVar[tuple[str, ...]]  # the kinds of tasks whose predictions it knows

    @property
    def needs_out_of_fold(self) -> bool:
        """Return whether it is fitted to what the stage ``out_of_fold`` predicts."""
        return False
