"""The table of stages: one row per stage, from which everything about the stage follows.

That is its entry in dvc.yaml, the sections of params.yaml that it reads, the code that its result
depends on, the phases of a study, its parallelism, and how MLflow shows it. A new stage is a row
and a script in stages/; a new phase also has a settings class. After an edit, `moecore study write`
writes the root's dvc.yaml.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

METHODS, SEEDS, PHASES_RUN = "${run.methods}", "${run.seeds}", "${run.phases}"
DVC_MATRICES = {  # the matrix of DVC: the stage runs once per item
    "": {},
    "data": {"key": "${data}"},  # not a matrix but a foreach
    "seed": {"seed": SEEDS},
    "model": {"method": METHODS, "seed": SEEDS},
    "phase": {"phase": PHASES_RUN},
    "phase and seed": {"phase": PHASES_RUN, "seed": SEEDS},
    "measured model": {"phase": PHASES_RUN, "method": METHODS, "seed": SEEDS},
    "measurement": {
        "what": "${run.measurements}",
        "phase": "${run.thorough}",
        "method": METHODS,
        "seed": SEEDS,
    },
    "calculation": {"what": "${run.calculations}"},
}


class Stage(NamedTuple):
    """One row of the table of stages; {method}, {seed} etc. in it stand for a run's values."""

    name: str
    says: str
    each: str = ""  # key of DVC_MATRICES: the matrix with an item per run; "": it runs once
    keys: tuple[str, ...] | None = None  # keys of params.yaml that it reads; None: its name
    code: tuple[str, ...] = ()  # hashes below artifacts/code, except its script's and method's
    after: tuple[str, ...] = ()  # inputs below artifacts, if a stage of the study writes them
    folder: bool = False  # it writes a folder; stages per seed or model always do
    script: str = ""  # in stages/, if not named like the stage
    words: str = ""  # arguments of its command, if not the item
    path: str = ""  # of its result and history, if not its name and the item
    entry: Mapping[str, Any] = {}  # additional keys of its entry in dvc.yaml
    settings: str = ""  # class of its section, if ``Study`` does not name it
    title: str = ""  # on the page, of the phase whose models it makes; "" makes no phase
    trains: bool = False  # several ranks may share it
    alone: bool = False  # takes all cores, as every other stage waits for it
    early: bool = False  # runs before other stages, as many wait for it
    usual: bool = True  # in the root's dvc.yaml, and in studies that name no stages

    @property
    def module(self) -> str:
        return self.script or self.name

    @property
    def item_names(self) -> tuple[str, ...]:
        """The names of the values that differ between the stage's runs: ("method", "seed")."""
        return tuple(DVC_MATRICES[self.each])

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.name,) if self.keys is None else self.keys

    @property
    def item_path(self) -> str:
        """Template of the path of a run's result and history: ``cost/{phase}/{method}/{seed}``."""
        return self.path or "/".join([self.name, *(f"{{{name}}}" for name in self.item_names)])

    @property
    def hash_files(self) -> tuple[str, ...]:
        """The files with hashes of the stage's code, below artifacts/code, without suffix."""
        method = ("methods/{method}",) if "method" in self.item_names else ()
        return (f"stages/{self.module}", *self.code, *method)

    @property
    def is_phase(self) -> bool:
        return bool(self.title)


METHOD_KEY_TEMPLATE = "methods.{method}"
DATA, MODEL = "data/{phase}", "{phase}/{method}/{seed}"
ROUTERS, PRETRAINED = "teacher_router/{method}/{seed}", "pretrain/{method}/{seed}"
OUT_OF_FOLD_PATH = "out_of_fold/{phase}/{method}/{seed}"
STAGE_ROWS = (
    Stage(
        "code",
        "Hash the source files that decide the result of a stage",
        keys=(),
        entry={"outs": [{"artifacts/code": {"persist": True}}], "always_changed": True},
        alone=True,
    ),
    Stage(
        "prepare",
        "Raw data to checked, split, memory-mappable arrays with a card",
        each="data",
        keys=("data.{key}",),
        code=("sections/data.{key}",),
        entry={"outs": ["artifacts/data/${key}", "artifacts/history/prepare/${key}"]},
        alone=True,
    ),
    Stage(
        "teacher",
        "One dense model a seed, trained here, or pretrained weights through timm",
        each="seed",
        code=("sections/teacher",),
        after=("data/pretrain",),
        trains=True,
        alone=True,
        early=True,
    ),
    Stage(
        "teacher_router",
        "Routers on the frozen teacher of a seed, for the methods that it guides",
        each="model",
        keys=("model", "teacher_router", METHOD_KEY_TEMPLATE),
        after=("data/pretrain", "teacher/{seed}"),
        early=True,
    ),
    Stage(
        "pretrain",
        "One method trained from scratch with one seed",
        each="model",
        keys=("model", "pretrain", METHOD_KEY_TEMPLATE),
        after=("data/pretrain", ROUTERS),
        title="Pretrained",
        trains=True,
    ),
    Stage(
        "finetune",
        "A pretrained model goes on with other data at another resolution",
        each="model",
        keys=("finetune", METHOD_KEY_TEMPLATE),
        after=("data/finetune", PRETRAINED, ROUTERS),
        words="finetune {method} {seed}",
        title="Fine-tuned",
        trains=True,
    ),
    Stage(
        "adversarial",
        "The same pretrained model goes on with images that are attacked at every step",
        each="model",
        keys=("adversarial", METHOD_KEY_TEMPLATE),
        code=("sections/adversarial",),
        after=("data/adversarial", PRETRAINED, ROUTERS),
        script="finetune",
        words="adversarial {method} {seed}",
        settings="moecore.training.settings.AdversarialFinetuning",
        title="Adversarially fine-tuned",
        trains=True,
        usual=False,
    ),
    Stage(
        "prune",
        "A pretrained model without the experts of the lowest score",
        each="model",
        after=("data/prune", PRETRAINED),
        script="prune_experts",
        settings="moecore.training.surgery.prune.Prune",
        title="Pruned",
        usual=False,
    ),
    Stage(
        "merge",
        "A pretrained model whose similar experts became one",
        each="model",
        after=("data/merge", PRETRAINED),
        script="merge_experts",
        settings="moecore.training.surgery.merge.Merge",
        title="Merged",
        usual=False,
    ),
    Stage(
        "out_of_fold",
        "Training volumes predicted by models that never saw them, where calibrate.calibrator is "
        "fitted on such",
        each="model",
        keys=("model", "pretrain", METHOD_KEY_TEMPLATE, "calibrate.calibrator", "out_of_fold"),
        code=("sections/calibrate",),
        after=("data/pretrain", ROUTERS),
        path="out_of_fold/pretrain/{method}/{seed}",
        settings="moecore.brain.age_predictions.OutOfFoldSettings",
        usual=False,
    ),
    Stage(
        "baselines",
        "Logistic regression, nearest neighbours and a small CNN on the pixels of a phase",
        each="phase",
        keys=("run.seeds", "{phase}", "baselines"),
        after=(DATA,),
        settings="moecore.measure.pixel_baselines.Baselines",
    ),
    Stage(
        "calibrate",
        "Fit the calibration on the validation split, measure it on the test split",
        each="measured model",
        code=("sections/calibrate",),
        after=(DATA, MODEL, OUT_OF_FOLD_PATH),
        folder=True,
    ),
    Stage(
        "transferred",
        "Images attacked on a model, which robustness.transfer shows to others",
        each="measured model",
        keys=("robustness",),
        code=("measure/robustness",),
        after=(DATA, MODEL),
        folder=True,
        usual=False,
    ),
    Stage(
        "robustness",
        "Attack a model, and see how its routing changes",
        each="measured model",
        code=("measure/robustness",),
        after=(DATA, MODEL, "transferred/{phase}"),
    ),
    Stage(
        "routing",
        "Load, entropy, confidence, agreement with the teacher, who sees which patch",
        each="measured model",
        code=("measure/routing",),
        after=(DATA, MODEL, ROUTERS),
        script="measure",
        words=f"routing {MODEL.replace('/', ' ')}",
    ),
    Stage(
        "measure",
        "One measurement of one trained model",
        each="measurement",
        keys=("{what}", METHOD_KEY_TEMPLATE),
        code=("measure/{what}",),
        after=(DATA, MODEL),
        path=f"{{what}}/{MODEL}",
    ),
    Stage(
        "transfer",
        "Every method's model scored on the images that were attacked on every other's",
        each="phase and seed",
        keys=("run.methods", "transfer"),
        code=("sections/transfer", "methods"),
        after=(DATA, "{phase}"),
        early=True,
    ),
    Stage(
        "calculate",
        "One measurement that needs no trained model",
        each="calculation",
        keys=("{what}",),
        code=("measure/{what}",),
        path="{what}",
        usual=False,
    ),
    Stage(
        "compare",
        "One page, one table, over every method, seed and phase that run names",
        keys=("run", "claims", "questions"),
        entry={
            "deps": [
                "artifacts/code/stages/compare.json",
                "params.yaml",
                "artifacts/measured",
                "artifacts/data",
            ],
            "outs": [
                "artifacts/compare.json",
                "artifacts/items.safetensors",
                "reports/index.html",
                "reports/explorer.html",
                "reports/claims.md",
                "reports/curves",
            ],
            "metrics": ["reports/metrics"],
            "plots": ["reports/plots"],
        },
    ),
    Stage(
        "numbers",
        "The numbers that git keeps, and the items that their intervals are of",
        keys=(),
        entry={
            "cmd": "cp artifacts/compare.json artifacts/items.safetensors reports/",
            "deps": ["artifacts/compare.json", "artifacts/items.safetensors"],
            "outs": [
                {"reports/compare.json": {"cache": False}},
                {"reports/items.safetensors": {"cache": False}},
            ],
        },
    ),
)
STAGES = {stage.name: stage for stage in STAGE_ROWS}
CODE_STAGE = "code"
MEASURE = "measure"
CALCULATE = "calculate"
LAST_STAGES = ("compare", "numbers")

PHASES = tuple(stage.name for stage in STAGE_ROWS if stage.is_phase)
TRAINING_PHASES = tuple(name for name in PHASES if STAGES[name].trains)  # on their own data
REDUCING_PHASES = tuple(name for name in PHASES if not STAGES[name].trains)  # to fewer experts
TRAINING_STAGES = tuple(stage.name for stage in STAGE_ROWS if stage.trains)
MODEL_STAGES = tuple(stage.name for stage in STAGE_ROWS if stage.trains or stage.is_phase)
MEASURED_STAGES = tuple(stage.name for stage in STAGE_ROWS if stage.each == "measured model")
STAGE_SECTIONS = {  # of params.yaml, by the stage that reads them; {what}, {phase}: see ``run``
    stage.name: tuple(dict.fromkeys(key.partition(".")[0] for key in stage.reads if key[0] != "{"))
    for stage in STAGE_ROWS
    if stage.reads
}


def describe_how_to_add(stage: str) -> str:
    command = f"`moecore upgrade --yes --stage {stage}`"
    return f"the stage {stage} (to add it: {command}; in a question or overlay.yaml: `stages`)"


def list_hash_files(name: str, **item: str | None) -> list[str]:
    """Return a stage's or measurement's files in artifacts/code; item: values of {placeholders}."""
    stage = STAGES.get(name, STAGES[MEASURE if item.get("method") else CALCULATE])
    return [hash_file_name(path).format(what=name, **item) for path in stage.hash_files]


def hash_file_name(path: str) -> str:
    """Add .json to an entry of ``Stage.hash_files``, unless it is the folder ``methods``."""
    return path if path == "methods" else f"{path}.json"


def find_stage_of_command(arguments: Sequence[str]) -> str:
    """Return the stage that -m moecore.stages.SCRIPT WORD … runs, else raise StopIteration."""
    script, *rest = arguments[1:]
    script = script.rpartition(".")[2]
    names = [stage.name for stage in STAGE_ROWS if stage.module == script]
    word = rest[0] if rest else ""
    return next(name for name in (word, script, *names) if name in names)
