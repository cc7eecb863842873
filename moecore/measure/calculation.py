"""Measurements without a trained model, such as a theorem tested on drawn data."""

from abc import abstractmethod
from typing import Any

from moecore.core.files import UserError
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.values import Found, PartStore, Value, Values
from moecore.tasks.classification import Classification

NO_TASK = Classification(classes=("", "."))  # Values asks it for scores, which are of models


class Calculation(Measurement):
    """A measurement that needs no trained model and no data; it runs once per study.

    ``my_lab.bound`` in run.calculations is the class Bound of that module of a listed package, and
    its fields are the section ``my_lab: {bound: …}``. As of any measurement, ``metrics`` declares
    its numbers and ``page`` the section of the page.
    """

    @abstractmethod
    def calculate(self, out: Values, /) -> None:
        """Compute the values and put them in ``out``; they may depend on the settings only.

        Args:
            out: Takes the values of the declared metrics.
        """

    def measure(self, subject: MeasuredModel, out: Any, /) -> None:
        self.calculate(out)

    def collect_values(self, parts: PartStore) -> Found:
        """Return all values that ``calculate`` puts; parts: the store of finished pieces."""
        # UserError for two values whose places give one name of a column.
        out = Values(self.metrics, NO_TASK, parts)
        self.calculate(out)
        result = out.found()
        places: dict[str, Value] = {}
        for value in result.values:
            (name,) = Found(values=(value,)).numbers()
            if name in places:
                both = f"{places[name].at} and {value.at}"
                raise UserError.at(name, found=both, allowed="places of other letters or digits")
            places[name] = value
        return result
