"""Names for writing your own part: base classes, and the types that they use.

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

if not TYPE_CHECKING:
    _GONE = {  # name of an earlier version → what serves instead
        "Column Shown": "Metric, Values; since 0.4.0 a measurement declares its metrics"
    }

    def __getattr__(name: str) -> Any:
        for gone, allowed in _GONE.items():
            if name in gone.split():
                text = f"found moecore.parts.{name}; allowed: {allowed}"
                raise ImportError(f"{text} (see CHANGELOG.md)")
        raise AttributeError(f"module 'moecore.parts' has no attribute {name!r}")
