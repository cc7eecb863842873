"""Save and load models (safetensors and their settings), and checkpoints of a training.

A checkpoint has weights, optimizer and step, which is enough: views, order and noise are functions
of (seed, step). A thread writes the files, atomically and with a checksum; none is a pickle. The
first rank writes one safetensors file, or, for sharded parameters, every rank its own
(torch.distributed.checkpoint). Any number of ranks can read it.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from moecore.core import config, files, routing_records, source_layout
from moecore.core.ranks import broadcast_text, check_equal_across_ranks, rank_and_size
from moecore.core.safetensors_files import read_tensors, write_tensors
from moecore.data.prepared import Prepared
from moecore.data.text.tokenizers import load_tokenizer
from moecore.nn.backbones.base_model import Backbone, BackboneModel, ImageSpec, Model
from moecore.nn.layers.moe import MoESettings
from moecore.nn.predict import meta_device_context
from moecore.tasks.image_text import ImageText
from moecore.training import distributed_training
from moecore.training.method import Guide, TeacherRoutedModel

GUIDE_FOLDER = "guide"
VOCABULARY_FILE = "vocabulary.txt"


class ModelCard(config.Config):
    """The settings that rebuild a model, and the versions that wrote it."""

    backbone: Backbone
    image: ImageSpec
    moe: MoESettings | None = None
    guided: bool = False  # its router needs a teacher, stored in the folder guide/
    versions: dict[str, str] = {}  # of moecore, torch and outside packages

    def build(self) -> BackboneModel:
        return self.backbone.build(self.image, self.moe)


class GuideSettings(config.Config):
    """Settings to rebuild a guide (frozen teacher and its routers), if ``needed`` by the method."""

    needed: bool
    blocks: tuple[int, ...] = ()
    experts: int = 0
    features: routing_records.Feature = "final"
    learns: bool = False


def save_model(folder: str | Path, model: Model) -> None:
    """Write ``model.json``, ``model.safetensors`` and, if needed, the teacher into ``folder``."""
    folder = Path(folder)
    guided = isinstance(model, TeacherRoutedModel)
    card = ModelCard(backbone=model.config, image=model.image, moe=model.moe, guided=guided)
    settings = card.model_dump(mode="json")
    used = [kind.partition(".")[0] for kind in source_layout.outside_kinds_in_settings(settings)]
    packages = dict.fromkeys([*source_layout.allowed_packages(), *used])
    settings["versions"] = source_layout.package_versions(packages)
    if isinstance(model, TeacherRoutedModel):
        save_guide(folder / GUIDE_FOLDER, model.guide)
        model = model.model
    if isinstance(model, BackboneModel):
        model.remember(0)  # the state of the training's streams is not part of the model
    write_tensors(folder / "model.safetensors", model.state_dict())
    files.write_json_sha256(folder / "model.json", settings)


def save_vocab(folder: Path, data: Prepared) -> None:
    """Write a text's vocabulary and word-splitting rule, or a tokenizer of captions, or nothing."""
    if isinstance(data.task, ImageText):
        load_tokenizer(data.folder, data.task).write(folder)
    if data.task.long:
        text = (data.folder / VOCABULARY_FILE).read_text(encoding="utf-8")
        files.write_atomic(folder / VOCABULARY_FILE, text)
        files.write_json(folder / "text.json", {"reading": data.card["reading"]})


def load_model_card(folder: str | Path) -> ModelCard:
    """Read a saved model's settings; UserError, naming the file, if it is missing or invalid."""
    if str(folder).startswith("models:"):
        raise files.UserError(
            f"{folder}: an address in MLflow's registry; call "
            f"moecore.load_model(moecore.model_folder({str(folder)!r}))"
        )
    path = Path(folder) / "model.json"
    _refuse_unknown_packages(path, files.read_json(path))
    return config.read_json_settings(path, ModelCard, "the settings of a model")


def _refuse_unknown_packages(path: Path, settings: Any) -> None:
    for kind in source_layout.outside_kinds_in_settings(settings):
        package = kind.partition(".")[0]
        versions = settings.get("versions") if isinstance(settings, dict) else None
        version = versions.get(package) if isinstance(versions, dict) else None
        written = f"written with {package}, version: {version or 'unknown'}"
        if package not in source_layout.allowed_packages():
            raise files.UserError(
                f"{path}: has {kind}, of a package that is not listed ({written}); to import it: "
                f'load_model(folder, packages=["{package}"]), moecore predict --package {package}'
            )
        try:
            source_layout.import_module_of_package(kind)
        except ValueError as error:
            raise files.UserError(f"{path}: {error} ({written})") from error


def load_model(folder: str | Path, packages: Sequence[str] = ()) -> Model:
    """Return the trained model of ``folder``, in evaluation mode, on the CPU.

    ``model(images)`` with images (B, C, H, W), or volumes (B, C, D, H, W), in [0, 1] returns
    ``ModelOutput(prediction, routing)``. The prediction is (B, K) logits of classes, or (B, 1) in
    the unit of the target (years).

    Args:
        folder: where the model was saved.
        packages: packages of parts that may be imported, in addition to the allowed ones.

    Raises:
        UserError: for a missing or invalid file, or parts of other packages.
    """
    with source_layout.allowing_packages(packages):
        model = load_without_teacher(folder)
        guide = load_guide(Path(folder) / GUIDE_FOLDER) if load_model_card(folder).guided else None
        if guide is None:
            return model
        return TeacherRoutedModel(model, guide).eval()


def load_without_teacher(folder: str | Path) -> BackboneModel:
    """Load the model in ``folder`` without the teacher that its router may need."""
    card = load_model_card(folder)
    path = Path(folder) / "model.safetensors"
    weights, _ = read_tensors(path)
    # First weights are drawn and then replaced; the fork leaves the caller's draws unchanged.
    with torch.random.fork_rng(devices=[]):
        with meta_device_context():  # weights of another size are refused before they take memory
            check_and_load_state_dict(card.build(), weights, path, assign=True)
        model = card.build()
    check_and_load_state_dict(model, weights, path)
    return model.eval()


def load_adapted_model(
    folder: str | Path, image: ImageSpec, moe: MoESettings | None
) -> BackboneModel:
    """Load the model in ``folder`` for other images: adapt position embeddings and head."""
    # Images are normalised by their own statistics. A head for other classes is new.
    card = load_model_card(folder)
    weights, _ = read_tensors(Path(folder) / "model.safetensors")
    if card.image.channels != image.channels:
        raise files.UserError(
            f"{folder}: trained on {card.image.channels} channels, the new images have "
            f"{image.channels}; choose data with the same channels"
        )
    model = card.backbone.trained_on(card.image).build(image, moe)
    if not model.moves:
        raise files.UserError(
            f"{folder}: a model of kind {card.backbone.kind} works at one image size only; "
            "fine-tune a vit or a swin"
        )
    axes = len(card.image.shape)
    if axes != len(image.shape):
        raise files.UserError(
            f"{folder}: trained on images of {axes} axes, the new ones have {len(image.shape)}; "
            "choose data with the same number of axes"
        )
    try:
        weights = model.adapt_weights(weights, card.backbone, card.image)
    except ValueError as error:
        raise files.UserError(f"{folder}: {error}") from error
    weights = rescale_or_drop_head_weights(weights, card.image, image)
    unmatched = model.load_state_dict(weights, strict=False)
    names = (*unmatched.missing_keys, *unmatched.unexpected_keys)
    unexpected = [name for name in names if not name.startswith("head")]
    if unexpected:
        shown = ", ".join(unexpected[:5])
        raise files.UserError(f"{folder}: the weights do not fit the model: {shown}")
    return model


def rescale_or_drop_head_weights(
    weights: dict[str, Tensor], old: ImageSpec, new: ImageSpec
) -> dict[str, Tensor]:
    """Rescale the head's weights to the unit of ``new``; drop them if the task's outputs differ."""
    # A rescaled head predicts the same numbers from the new labels' mean and deviation. Bins (two
    # or more outputs, of an SFCN) have edges in the label's unit and do not change.
    if old.answers != new.answers:
        return {name: value for name, value in weights.items() if not name.startswith("head")}
    if old.task.head == new.task.head:
        return weights
    (old_mean, old_deviation), (new_mean, new_deviation) = old.task.head, new.task.head
    heads = {
        name: old_deviation / new_deviation * value
        for name, value in weights.items()
        if name.startswith(("head.", "head_dist.")) and len(value) == 1
    }
    shift = (old_mean - new_mean) / new_deviation
    biases = {name: value + shift for name, value in heads.items() if name.endswith("bias")}
    return weights | heads | biases


def save_guide(folder: Path, guide: Guide) -> None:
    save_model(folder / "teacher", guide.teacher)
    if guide.blocks:  # a dense student has none, and a file without tensors is not readable
        weights = {str(layer): weight for layer, weight in enumerate(guide.routers)}
        write_tensors(folder / "routers.safetensors", weights)
    settings = GuideSettings(
        needed=True,
        blocks=tuple(guide.blocks),
        experts=guide.experts,
        features=guide.features,
        learns=guide.learns,
    )
    files.write_json_sha256(folder / "guide.json", settings.model_dump(mode="json"))


def record_no_guide_needed(folder: Path) -> None:
    """Record in ``folder`` that the method needs no teacher, so a new teacher causes no rerun."""
    files.write_json(folder / "guide.json", {"needed": False})


def load_guide(folder: str | Path, image: ImageSpec | None = None) -> Guide | None:
    """Load the guide in ``folder``, adapted to ``image``; None if the method needs none."""
    folder = Path(folder)
    path = folder / "guide.json"
    settings = config.read_json_settings(path, GuideSettings, "the settings of a guide")
    if not settings.needed:
        return None
    teacher = load_teacher(folder / "teacher", image)
    guide = Guide(teacher, settings.blocks, settings.experts, settings.features, settings.learns)
    if guide.blocks:
        path = folder / "routers.safetensors"
        check_and_load_state_dict(guide.routers, read_tensors(path)[0], path)
    return guide.eval()


def load_teacher(folder: Path, image: ImageSpec | None = None) -> BackboneModel:
    # Positions are interpolated; a channel of true kinds of patches is skipped as in ``image``.
    teacher = load_without_teacher(folder)
    if image is None:
        return teacher
    adapted = teacher.image.model_copy(update={"size": image.size, "truth": image.truth})
    if adapted == teacher.image:
        return teacher
    return load_adapted_model(folder, adapted, None)


def check_and_load_state_dict(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    path: Path,
    assign: bool = False,
    mend: str = "run the stage that writes it again",
) -> None:
    """Load weights into a module; UserError, naming ``path`` and ``mend``, if they do not fit."""
    try:
        module.load_state_dict(dict(weights), assign=assign)
    except RuntimeError as error:
        why = " ".join(str(error).split("\n")[1].split())
        raise files.UserError(f"{path}: not the weights of this model ({why}); {mend}") from error


def guide_folder(method: str, seed: int) -> Path:
    """Return the guide's folder: artifacts/pretrain/…/guide if it exists, else teacher_router/…."""
    with_model = Path("artifacts/pretrain", method, str(seed), GUIDE_FOLDER)
    if with_model.exists():
        return with_model
    return Path("artifacts/teacher_router", method, str(seed))


RESTART_ADVICE = "delete it and start the stage again"
FREE_SPACE_ADVICE = "what was there before is untouched. Free some space and start again"
Tensors = dict[str, Tensor]


class TrainingEditGuardProtocol(Protocol):
    """Raise UserError if code or settings of a training were edited since it began."""

    def refuse_edited_code(self) -> None: ...

    def refuse_edited_settings(self) -> None: ...


class Checkpoint:
    def __init__(self, folder: Path, inputs: TrainingEditGuardProtocol | None = None) -> None:
        """Use ``folder``; each ``save`` raises UserError if ``inputs`` were edited."""
        self.folder = folder
        self.inputs = inputs
        self.path = folder / "checkpoint.safetensors"
        self.pointer = folder / "sharded.json"  # names the folder of a sharded checkpoint
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._group: Any = None  # process group of the saving thread

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, note: dict) -> None:
        """Copy the state after ``step`` steps and ``note``, a JSON object; a thread writes both."""
        self.wait()
        if self.inputs is not None:  # first: the new code may have computed the state
            self.inputs.refuse_edited_code()
        tensors = distributed_training.flatten_training_state(model, optimizer)
        if any(distributed_training.is_sharded_tensor(value) for value in tensors.values()):
            self._writing = self._thread.submit(self._shard_writer(step, tensors, note))
        elif rank_and_size().is_first:
            copied = {
                name: distributed_training.to_full_tensor(value).detach().cpu().clone()
                for name, value in tensors.items()
            }
            about = {"step": str(step), "note": json.dumps(note)}
            self._writing = self._thread.submit(write_tensors, self.path, copied, about)
        if self.inputs is not None:
            try:
                self.inputs.refuse_edited_settings()
            except files.UserError:
                self.wait()  # the training resumes here once the edit is undone
                raise

    def wait(self) -> None:
        """Wait until the last ``save`` is written; UserError if that failed."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def load(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, dict]:
        """Restore model and optimizer; return (steps done, note); (0, {}) without a checkpoint."""
        path = next((path for path in (self.pointer, self.path) if path.exists()), None)
        check_equal_across_ranks("checkpoints", str(path and path.name))
        if path is None:
            return 0, {}
        if path == self.pointer:
            tensors, about = self._read_shards(model, optimizer)
        else:
            tensors, about = read_tensors(self.path)
        check_equal_across_ranks("checkpoints", about["step"])
        state = model.state_dict()
        weights = {}
        for prefixed, value in tensors.items():
            if prefixed.startswith("model."):
                name = prefixed.removeprefix("model.")
                weights[name] = distributed_training.shard_like(value, state.get(name, value))
        check_and_load_state_dict(model, weights, path, mend=RESTART_ADVICE)
        distributed_training.restore_optimizer(optimizer, tensors)
        return int(about["step"]), json.loads(about["note"])

    def _read_shards(self, model: nn.Module, optimizer: Optimizer) -> tuple[Tensors, dict]:
        """Return name → tensor, sharded as on this rank, and the content of sharded.json."""
        about = files.read_json(self.pointer, sealed=True)
        folder = self.folder / about["folder"]
        damaged = ""
        if rank_and_size().is_first:  # for all, so that all raise or all read together
            for name, digest in about["files"].items():
                if not (folder / name).is_file() or files.file_checksum(folder / name) != digest:
                    damaged = str(folder / name)
        if damaged := broadcast_text(damaged):
            raise files.UserError(f"{damaged}: damaged or missing; {RESTART_ADVICE}")
        state = model.state_dict()
        parameters = distributed_training.optimizer_parameters(optimizer)

        def target_of(name: str) -> Tensor:
            kind, _, rest = name.partition(".")
            if kind == "model":
                return state[rest]
            return parameters[int(rest.split(".")[0])].detach()

        return distributed_training.read_sharded_checkpoint(folder, target_of), about

    def _shard_writer(self, step: int, tensors: Tensors, note: dict) -> Callable[[], None]:
        """Return a function that writes the shards of all ranks, then the file that names them."""
        from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
        from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
        target = self.folder / f"sharded-{step}"
        stager = DefaultStager(StagingOptions(False, False, False, False))
        arrays = {key: distributed_training.at_least_1d(value) for key, value in tensors.items()}
        copied: Any = stager.stage(arrays)
        stager.close()

        def write() -> None:
            writer = HuggingFaceStorageWriter(str(target), save_distributed=True)
            try:
                if rank_and_size().is_first:
                    # A killed process may have left shards here, which would be read too.
                    shutil.rmtree(target, ignore_errors=True)
                distributed.barrier(self._group)
                save(copied, storage_writer=writer, process_group=self._group)
            except (Exception, CheckpointException) as error:
                shutil.rmtree(target, ignore_errors=True)  # an incomplete checkpoint is useless
                failures = getattr(error, "failures", {})  # with tracebacks, which are left out
                lines = [f"rank {rank}: {failures[rank][0]}" for rank in sorted(failures)]
                reason = "; ".join(lines) or str(error)
                if "Errno" not in reason and "os error" not in reason:  # another rank has ended
                    raise RuntimeError(f"{target}: could not be written ({reason})") from error
                shards = map(distributed_training.local_shard, copied.values())
                size = sum(shard.nbytes for shard in shards)
                free = shutil.disk_usage(self.folder).free
                raise files.UserError(
                    f"{target}: could not be written ({reason}): it takes {size:,} bytes per rank; "
                    f"{free:,} are free; {FREE_SPACE_ADVICE}"
                ) from error
            if not rank_and_size().is_first:
                return
            about = {"folder": target.name, "step": str(step), "note": json.dumps(note)}
            about |= {"files": {file.name: files.file_checksum(file) for file in target.iterdir()}}
            files.write_json_sha256(self.pointer, about)
            for old in self.folder.glob("sharded-*"):
                if old != target:
                    shutil.rmtree(old)

        return write
