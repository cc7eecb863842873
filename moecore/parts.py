"""Names for writing your own part: base classes, the types that they use, columns of the page.

A file that imports a name from here depends only on the file that defines the name.
"""

from typing import TYPE_CHECKING, Any

from moecore.attacks.base import Attack as Attack
from moecore.core.config import Config as Config
from moecore.core.config import Surroundings as Surroundings
from moecore.core.routing_records import ObjectiveInputs as ObjectiveInputs
from moecore.core.routing_records import RoutingContext as RoutingContext
from moecore.core.routing_records import RoutingRecord as RoutingRecord
from moecore.core.routing_records import TokenLayout as TokenLayout
from moecore.data.card import Card as Card
from moecore.data.layouts.images import SplitToWrite as SplitToWrite
from moecore.data.layouts.images import write_images as write_images
from moecore.data.sources.base import Source as Source
from moecore.measure.base import Calculation as Calculation
from moecore.measure.base import MeasuredModel as MeasuredModel
from moecore.measure.base import Measurement as Measurement
from moecore.measure.calibrators.base import Calibrator as Calibrator
from moecore.measure.calibrators.base import FittedCalibrator as FittedCalibrator
from moecore.measure.values import Chart as Chart
from moecore.measure.values import Metric as Metric
from moecore.measure.values import OnPage as OnPage
from moecore.measure.values import PartStore as PartStore
from moecore.measure.values import Values as Values
from moecore.nn.backbones.base_model import Backbone as Backbone
from moecore.nn.backbones.base_model import BackboneModel as BackboneModel
from moecore.nn.backbones.base_model import Encoded as Encoded
from moecore.nn.backbones.base_model import EncodeOptions as EncodeOptions
from moecore.nn.backbones.base_model import ImageSpec as ImageSpec
from moecore.nn.balances.base import Balance as Balance
from moecore.nn.balances.base import BalanceModule as BalanceModule
from moecore.nn.dispatch import Rows as Rows
from moecore.nn.dispatch import SparsePlan as SparsePlan
from moecore.nn.experts.base import Experts as Experts
from moecore.nn.experts.base import ExpertsModule as ExpertsModule
from moecore.nn.kernels.grouped import full_precision as full_precision
from moecore.nn.layers.moe import MoESettings as MoESettings
from moecore.nn.routers.base import Router as Router
from moecore.nn.routers.token_choice import plan_and_record as plan_and_record
from moecore.nn.routers.token_choice import router_logits as router_logits
from moecore.nn.routers.token_choice import top_k as top_k
from moecore.tasks.base import Score as Score
from moecore.tasks.base import Task as Task
from moecore.tasks.classification import Classification as Classification
from moecore.training.regularizers.base import Regularizer as Regularizer
from moecore.training.regularizers.base import sum_over_layers as sum_over_layers
from moecore.training.teachers.base import Teacher as Teacher
from moecore.training.upcycling_kinds import Drop as Drop
from moecore.training.upcycling_kinds import Granular as Granular

if TYPE_CHECKING:
    from moecore.report.results import Column as Column
    from moecore.report.results import Shown as Shown
else:  # for the page of your own measurement; importing them loads the room `report`
    _OF_PAGES = ("Column", "Shown")
    _OF_OLD_SOURCES = ("DatasetInfo", "PlannedData", "write_prepared")

    def __dir__() -> list[str]:
        return sorted([*globals(), *_OF_PAGES])

    def __getattr__(name: str) -> Any:
        if name in _OF_OLD_SOURCES:
            now = "since 0.3.0 a source has describe and write (see CHANGELOG.md)"
            raise ImportError(f"found moecore.parts.{name}; allowed: Card, write_images; {now}")
        if name not in _OF_PAGES:
            raise AttributeError(f"module 'moecore.parts' has no attribute {name!r}")
        from pkgutil import resolve_name

        return resolve_name(f"moecore.report.results:{name}")
