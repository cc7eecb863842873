"""Sparse mixture-of-experts models, their training, and what the papers measure.

The names below are public (docs/api.md); everything else may change. Each is imported at its first
use, so ``import moecore`` does not load torch.

Letters of shapes, where a file does not say otherwise: B images of a batch, N of a split, C
channels, H × W pixels, P patches, T tokens per image, E experts, k chosen per token, d width, K
classes, M tokens of a text, V words.
"""

from typing import TYPE_CHECKING, Any

RENAMED: dict[str, str] = {}  # public name of the last minor version → new name

if TYPE_CHECKING:  # read by type checkers, by HOMES below, and by pipeline/code_hashes.py
    from moecore import attacks as attacks
    from moecore import backbones as backbones
    from moecore import balances as balances
    from moecore import calibrators as calibrators
    from moecore import experts as experts
    from moecore import lens as lens
    from moecore import measure as measure
    from moecore import parts as parts
    from moecore import regularizers as regularizers
    from moecore import routers as routers
    from moecore import sources as sources
    from moecore import tasks as tasks
    from moecore import teachers as teachers
    from moecore import testing as testing
    from moecore.attacks.attack_target import Target as Target
    from moecore.core.files import UserError as UserError
    from moecore.core.routing_records import ModelOutput as ModelOutput
    from moecore.core.routing_records import RoutingRecord as RoutingRecord
    from moecore.data.prepared import Prepared as Prepared
    from moecore.measure.routing_metrics.layer_metrics import expert_agreement as expert_agreement
    from moecore.measure.routing_metrics.layer_metrics import expert_counts as expert_counts
    from moecore.measure.routing_metrics.layer_metrics import load_cv2 as load_cv2
    from moecore.nn.layers.moe import MoELayer as MoELayer
    from moecore.nn.layers.moe import update_routers as update_routers
    from moecore.nn.predict import predict_in_batches as predict_in_batches
    from moecore.nn.routing_collection import routing_collector as trace
    from moecore.predict.export import export_module as export
    from moecore.predict.robustbench import LogitsModel as LogitsModel
    from moecore.tracking.mlflow_run import model_folder as model_folder
    from moecore.training.artifacts import load_model as load_model
    from moecore.training.job import routing_loss as routing_loss
    from moecore.training.upcycle import upcycle_in_place as upcycle

    # pyright takes renamed imports for private, except ``X as X``
    __all__ = ("export", "trace", "upcycle")
    __version__: str
else:
    import ast
    from pathlib import Path

    _FILE = Path(__file__)
    HOMES = {  # of the imports above: public name → module of a package, or module:name
        alias.asname: f"{node.module}{'.' if folder.is_dir() else ':'}{alias.name}"
        for node in ast.walk(ast.parse(_FILE.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for folder in [_FILE.parents[1].joinpath(*node.module.split("."))]
        for alias in node.names
        if alias.asname
    }
    __all__ = sorted(["__version__", *HOMES])

    def __dir__() -> list[str]:
        return __all__

    def __getattr__(name: str) -> Any:
        if name in RENAMED:
            import warnings

            text = f"moecore.{name} is now moecore.{RENAMED[name]}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            name = RENAMED[name]
        if name == "__version__":
            from importlib.metadata import version

            return version("moecore")
        if name not in HOMES:
            raise AttributeError(f"module 'moecore' has no attribute {name!r}")
        from pkgutil import resolve_name

        return resolve_name(HOMES[name])
