"""``prune`` and ``merge`` against the pretrained models that they are to give fewer experts."""

from collections.abc import Mapping

from moecore.core.files import UserError
from moecore.data.sources.base import PlannedData
from moecore.nn.backbones.base_model import Backbone, ImageSpec
from moecore.nn.meta_device import meta_device_context
from moecore.study.model_rules import image_spec, split_key_and_message
from moecore.study.study import REDUCING_PHASES, Misfits, Study
from moecore.training.method import Method
from moecore.training.surgery.expert_reduction import ExpertReduction


def reduction_misfits(study: Study, previews: Mapping[str, PlannedData]) -> Misfits:
    """Yield data that are not those of pretraining, and methods that cannot have fewer experts."""
    for phase in REDUCING_PHASES:
        reduction = getattr(study, phase)
        if reduction is None:
            continue
        if phase in study.data and study.data[phase] != study.data.get("pretrain"):
            text = "found others than data.pretrain, which the models are trained on"
            yield ("data", phase), f"{text}; allowed: the same"
        elif study.model is not None and "pretrain" in previews:
            image = image_spec(previews["pretrain"])
            for name in study.run.methods:
                yield from _refusals(reduction, study.model, image, name, study.methods[name])


def _refusals(
    reduction: ExpertReduction, backbone: Backbone, image: ImageSpec, name: str, method: Method
) -> Misfits:
    """Yield why a method's models cannot have fewer experts; a dense one stays as it is."""
    if method.moe is None:
        return
    try:
        moe = reduction.reduced_settings(method.moe)
        with meta_device_context():
            method.merge_model_settings(backbone).build(image, moe)
    except UserError as error:
        key, text = split_key_and_message(error)
        if key[0] == reduction.section:
            yield key, f"{text} (methods.{name})"
        else:
            yield ("methods", name, *key), f"{text} ({reduction.section})"
