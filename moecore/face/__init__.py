"""What `import moecore` offers: each public name from where it lives, imported at its first use."""

from moecore import attacks as attacks
from moecore import lens as lens
from moecore import measure as measure
from moecore import pages as pages
from moecore import parts as parts
from moecore import testing as testing
from moecore.attacks.attack_setup import Target as Target
from moecore.core.files import UserError as UserError
from moecore.core.routing_records import ModelOutput as ModelOutput
from moecore.core.routing_records import RoutingRecord as RoutingRecord
from moecore.data.prepared import Prepared as Prepared
from moecore.face.family_parts import backbones as backbones
from moecore.face.family_parts import experts as experts
from moecore.face.family_parts import regularizers as regularizers
from moecore.face.family_parts import routers as routers
from moecore.measure.routing_metrics.layer_metrics import expert_agreement as expert_agreement
from moecore.measure.routing_metrics.layer_metrics import expert_counts as expert_counts
from moecore.measure.routing_metrics.layer_metrics import load_cv2 as load_cv2
from moecore.nn.layers.moe import MoELayer as MoELayer
from moecore.nn.layers.moe import update_routers as update_routers
from moecore.nn.predict import predict_in_batches as predict_in_batches
from moecore.nn.router_hooks import routing_collector as trace
from moecore.tracking.model import model_folder as model_folder
from moecore.training.artifacts import load_model as load_model
from moecore.training.job import routing_loss as routing_loss
from moecore.training.upcycle import upcycle_in_place as upcycle
