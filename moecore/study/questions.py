"""Files of questions, ``pipelines/<paper>/<question>.yaml``, and their rounds.

``pipelines/tgr/table_3.yaml`` is the question ``tgr/table_3``. Its layers are the root's
params.yaml, the world that it names, the file, a round, and presets (see ``params_layers.py``). In
addition to sections of params.yaml a question has:

- ``question``, ``answer``: the question and its result, one line each.
- ``world``: settings shared with other questions, ``pipelines/worlds/<world>.yaml``, which also
  say under ``baseline`` what a dense model and classifiers on pixels reach with them.
- ``methods``: the question's methods, or a list of names if all are as in the world or the root.
  They are also ``run.methods``, unless ``run`` names other methods.
- ``asks``: the claims of papers that it answers, by name (``papers.py``).
- ``rounds``: runs of the question with other seeds, methods or claims. ``was``: a round's name as
  a study of moecore 0.2; ``seeds``: ``[0, 1]`` or ``0-1``; ``methods``: a list of names. A question
  without rounds has one, whose keys are in the file itself.
- ``presets``: settings by name that are merged over the rest on request.
- ``tune``: the grids from which ``moecore tune`` chooses learning rates and the router's threshold.

Its results are one file, ``pipelines/results/<paper>/<question>.json``, with a key per round (its
number) and ``tuned`` (what ``moecore tune`` chose). The .safetensors of that name has the items
(``items_and_dates.py``). Files per key, as in moecore 0.3, are read, and merged on storing.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from filelock import FileLock
from pydantic import AfterValidator, Field, model_validator

from moecore.core import config, source_layout
from moecore.core.files import UserError, format_found_and_allowed, read_json, write_atomic
from moecore.study import papers, params_layers, params_reader, run_and_claims
from moecore.study.papers import ASKS, PIPELINES
from moecore.study.yaml_document import YamlDocument, did_you_mean, load_yaml_document, show_value

WORLDS = "worlds"
RESULTS_FOLDER = "results"
TEXT_KEYS = ("question", "answer", "world", "was")
DIRECTIVES = (*TEXT_KEYS, "seeds", "rounds", "presets", "tune", ASKS)
ROUND_DIRECTIVES = ("was", "seeds", ASKS)
SEED_RANGE_PATTERN = re.compile(r"(\d+)-(\d+)")
MAX_SEEDS = 1000
TUNED_PHASE = "pretrain"  # whose learning rate is tuned
TUNED_KEY = "tuned"  # key of a question's results, in addition to its rounds
RATE = "learning_rate"
THRESHOLD_KEY = "threshold"
MIN_GRID_VALUES = 3


def _check_grid(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(values) < MIN_GRID_VALUES or list(values) != sorted(set(values)):
        allowed = f"{MIN_GRID_VALUES} or more values, ascending"
        raise ValueError(format_found_and_allowed(found=list(values), allowed=allowed))
    return values


Grid = Annotated[tuple[float, ...], AfterValidator(_check_grid)]


class FallbackThresholdGrid(config.Config):
    """Grid of a threshold (ERMoE), chosen by the share of tokens with no score above it."""

    method: str
    values: Grid
    fallback: float = Field(0.002, gt=0, lt=1, description="wanted share of validation tokens")


class TuningGrids(config.Config):
    """The grids and the seeds of ``moecore tune``, which are the same for every method."""

    learning_rates: Grid
    seeds: tuple[int, ...] = Field(min_length=1, description="seeds that no round has")
    threshold: FallbackThresholdGrid | None = None


class TuneSection(config.Config):
    """The key ``tune`` of a question's file."""

    tune: TuningGrids | None = None


MIN_DENSE_LEAD = 3  # of a dense model over logistic regression, percentage points
Percent = Annotated[float, Field(ge=0, le=100)]


class WorldBaselineAccuracies(config.Config):
    """Accuracies (%) of simple classifiers and a dense model on a world's validation images.

    A world is a file of settings that several questions share.
    """

    phase: run_and_claims.PhaseName = "pretrain"
    logistic: Percent = 0
    neighbours: Percent = 0
    cnn: Percent = 0
    dense: Percent = 0
    seconds: float = Field(0, ge=0, le=90, description="of one thread, to train the dense model")
    unreached: str = ""

    @model_validator(mode="after")
    def _check_dense_ahead(self) -> Self:
        if not self.unreached and self.dense - self.logistic < MIN_DENSE_LEAD:
            pair = f"dense {self.dense:g}, logistic {self.logistic:g}"
            allowed = f"dense ahead by {MIN_DENSE_LEAD} or more; or unreached, with the reason"
            raise ValueError(format_found_and_allowed(found=pair, allowed=allowed))
        return self


class WorldBaselineAccuraciesSection(config.Config):
    """The key ``baseline`` of a world's file, in addition to sections of params.yaml."""

    baseline: WorldBaselineAccuracies


class QuestionFile:
    """A research question's file: its layers of settings, runs (rounds) and optional presets."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.path = root / PIPELINES / f"{name}.yaml"
        self.document = load_yaml_document(self.path)
        self.world: YamlDocument | None = None
        self.layers = self._read_layers()
        pairs = enumerate(self._read_rounds(), 1)
        self.rounds = [QuestionRound(self, number, *pair) for number, pair in pairs]

    def text(self, key: str) -> str:
        """Return the text at ``key``, such as question, answer or world; "" if missing."""
        return self.document.data.get(key) or ""

    @cached_property
    def presets(self) -> dict[str, YamlDocument]:
        presets = self.document.data.get("presets") or {}
        if not isinstance(presets, dict):
            text = f"found {show_value(presets)}; allowed: presets by their names"
            raise self.document.error(("presets",), text)
        return {name: self.document.below("presets").below(name) for name in presets}

    def round(self, number: int | None) -> "QuestionRound":
        """Return the round ``number``, counted from 1; None: the last one."""
        if number is None:
            return self.rounds[-1]
        if not 1 <= number <= len(self.rounds):
            allowed = f"1 to {len(self.rounds)}" if len(self.rounds) > 1 else "1, the only round"
            raise UserError.at(self.name, found=f"round {number}", allowed=allowed)
        return self.rounds[number - 1]

    @cached_property
    def tuning(self) -> TuningGrids | None:
        """The question's grids for ``moecore tune``; None if its learning rates are fixed."""
        return params_reader.extract_settings(TuneSection, self.document).tune

    @property
    def results_path(self) -> Path:
        return self.root / PIPELINES / RESULTS_FOLDER / f"{self.name}.json"

    def find_old_files(self, suffix: str) -> dict[str, Path]:
        """Return round or "tuned" → file of results, or items (``suffix``), from moecore 0.3."""
        paths = sorted(self.results_path.parent.glob(f"{self.results_path.stem}.*{suffix}"))
        parts = {path.stem.rpartition(".")[2]: path for path in paths}
        return {part: path for part, path in parts.items() if _is_results_key(part)}

    def read_results(self) -> dict[str, Any]:
        """Return part (a round's number as text, or "tuned") → stored results; {} without any."""
        parts = {part: read_json(path) for part, path in self.find_old_files(".json").items()}
        if self.results_path.is_file():
            parts |= split_results_by_round(read_json(self.results_path))
        if not all(isinstance(part, dict) for part in parts.values()):
            allowed = "the results of rounds"
            raise UserError.at(self.results_path, found="no results", allowed=allowed)
        return parts

    def lock_results(self) -> FileLock:
        """Return the lock to hold while results are read and written again."""
        path = self.root / ".state/results.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(path)

    def update_results_file(self, part: str, value: Mapping[str, Any]) -> None:
        """Store the results of ``part``, a round's number or "tuned", and keep the other parts."""
        with self.lock_results():
            parts = self.read_results() | {part: value}
            texts = [
                f'"{key}": {json.dumps(parts[key], indent=2, allow_nan=False, ensure_ascii=False)}'
                for key in sorted(parts)
            ]
            write_atomic(self.results_path, "{\n" + ",\n".join(texts) + "\n}\n")
            for path in self.find_old_files(".json").values():
                path.unlink()

    def check_world_baseline(self) -> None:
        if self.world is not None:
            params_reader.extract_settings(WorldBaselineAccuraciesSection, self.world)

    @property
    def asking_files(self) -> list[Path]:
        """The question's file, and the project's paper.yaml files with its claims."""
        data = self.document.data
        parts = (data, *(data.get("rounds") or ()))
        asks = (ask for part in parts for ask in part.get(ASKS) or ())
        folders = (papers.parse_asked_claim(ask)[0] for ask in asks)
        files = [papers.find_paper_file(self.root, folder) for folder in dict.fromkeys(folders)]
        return [self.path, *(file for file in files if self.root in file.parents)]

    def read_round_or_preset(
        self, document: YamlDocument, directives: Sequence[str]
    ) -> params_layers.SettingsLayer:
        """Return a round or preset as a layer, with the claims that ``asks`` names filled in."""
        # directives: keys of ``document`` that are not sections.
        packages = tuple(name for layer in self.layers for name in layer.document.packages)
        return self._expand_claims(params_layers.read_layer(document, packages, directives))

    def _expand_claims(self, layer: params_layers.SettingsLayer) -> params_layers.SettingsLayer:
        """Return the layer with complete claims instead of their names under ``asks``."""
        if ASKS not in (layer.document.data or {}):
            return layer
        if "claims" in layer.sections:
            text = f"found it together with {ASKS}; allowed: one of them"
            raise layer.document.error(("claims",), text)
        claims, moved = papers.resolve_asked_claims(layer.document, self.root)
        sections = {**layer.sections, "claims": claims}
        return layer._replace(sections=sections, moved={**layer.moved, **moved})

    def _read_layers(self) -> list[params_layers.SettingsLayer]:
        layers = [params_layers.load_root_layer(self.root)]
        question = params_layers.read_layer(self.document, layers[0].document.packages, DIRECTIVES)
        if not isinstance(self.document.data, dict):
            raise UserError(f"{self.path}:1:1: is empty; allowed: a question and its sections")
        for key in TEXT_KEYS:
            value = self.document.data.get(key, "")
            if not isinstance(value, str):
                raise self.document.error((key,), f"found {show_value(value)}; allowed: a text")
        if name := self.text("world"):
            folder = self.root / PIPELINES / WORLDS
            worlds = sorted(path.stem for path in folder.glob("*.yaml"))
            if name not in worlds:
                text = f"found {name!r}{did_you_mean(name, worlds)}; allowed: {', '.join(worlds)}"
                raise self.document.error(("world",), text)
            self.world = load_yaml_document(folder / f"{name}.yaml")
            layers.append(params_layers.read_layer(self.world, (), ("baseline",)))
        return [*layers, self._expand_claims(question)]

    def _read_rounds(self) -> Iterator[tuple[YamlDocument, list[params_layers.SettingsLayer]]]:
        """Yield (document, layers) of each round; one round if the file lists none."""
        below = self.layers[:-1]
        question = self.layers[-1]
        rounds = self.document.data.get("rounds")
        if rounds is None:
            yield self.document, [*below, _fill_run_section(question)]
            return
        if not isinstance(rounds, list) or not rounds:
            text = f"found {show_value(rounds)}; allowed: a list of at least one round"
            raise self.document.error(("rounds",), text)
        for key in ("was", "seeds"):
            if key in self.document.data:
                text = "found it together with rounds; allowed: in each of them"
                raise self.document.error((key,), text)
        for index in range(len(rounds)):
            part = self.document.below("rounds").below(index)
            layer = self.read_round_or_preset(part, ROUND_DIRECTIVES)
            if not isinstance(layer.sections.get("methods", []), list):
                text = f"found {show_value(layer.sections['methods'])}; allowed: a list of names"
                raise part.error(("methods",), text)
            yield part, [*below, _fill_run_section(question), _fill_run_section(layer)]


class QuestionRound(NamedTuple):
    """One run of a question, with its seeds, methods and claims; ``number`` counts from 1."""

    question: QuestionFile
    number: int
    document: YamlDocument
    layers: list[params_layers.SettingsLayer]

    @property
    def name(self) -> str:
        """The round's name: ``tgr/table_3``, or ``tgr/table_3.2`` for the second round."""
        suffix = f".{self.number}" if self.number > 1 else ""
        return self.question.name + suffix

    @property
    def old_name(self) -> str:
        return (self.document.data or {}).get("was") or ""

    @property
    def folder(self) -> Path:
        return self.question.root / source_layout.RUNS / self.name.replace("/", ".")

    @property
    def results_key(self) -> str:
        """The round's key in the question's results."""
        return str(self.number)

    def read_numbers(self) -> dict[str, Any]:
        """Return the round's stored results, as compare.json has them; {} without any."""
        return self.question.read_results().get(self.results_key, {})

    @property
    def command(self) -> str:
        chosen = f" --round {self.number}" if len(self.question.rounds) > 1 else ""
        return f"moecore study run {self.question.name}{chosen}"

    def compose(self, presets: Sequence[str] = ()) -> params_layers.ComposedParams:
        """Return the round's params.yaml, with the settings of ``presets`` merged over it."""
        question = self.question
        layers = [*self.layers]
        if question.tuning and (tuned := question.read_results().get(TUNED_KEY)):
            layers.append(self._layer_of_tuned_rates(tuned["methods"]))
        for name in presets:
            if name not in question.presets:
                allowed = ", ".join(question.presets) or "none, as there are no presets"
                text = f"found no preset {name!r}{did_you_mean(name, [*question.presets])}"
                raise UserError(f"{question.name}: {text}; allowed: {allowed}")
            layers.append(question.read_round_or_preset(question.presets[name], (ASKS,)))
        return params_layers.compose_layers(layers, question.root)

    def _layer_of_tuned_rates(self, choices: Mapping[str, Any]) -> params_layers.SettingsLayer:
        untuned = params_layers.compose_layers(self.layers, self.question.root).document.data
        names = [name for name in untuned.get("methods", ()) if name in choices]
        rates = {
            name: {TUNED_PHASE: {RATE: choices[name][RATE]}} | choices[name].get("also", {})
            for name in names
        }
        sections = {"methods": rates}
        document = YamlDocument(str(self.question.results_path), sections)
        return params_layers.SettingsLayer(document, sections)


def _is_results_key(key: str) -> bool:
    return key == TUNED_KEY or key.isdigit()


def split_results_by_round(content: Any) -> dict[str, Any]:
    """Return a file as part → results; a file of moecore 0.3 has only those of the first round."""
    if isinstance(content, dict) and all(map(_is_results_key, content)):
        return dict(content)
    return {"1": content}


def list_question_names(root: Path) -> list[str]:
    """Return the sorted names ``folder/file`` of all questions of a project."""
    files = sorted((root / PIPELINES).glob("*/*.yaml"))
    for file in files:
        if file.name == params_layers.OVERLAY:
            allowed = f"{PIPELINES}/ours/{file.parent.name}.yaml instead (CHANGELOG.md, 0.3.0)"
            raise UserError.at(file, found="a study's folder of moecore 0.2", allowed=allowed)
    return [
        f"{file.parent.name}/{file.stem}"
        for file in files
        if file.parent.name not in (WORLDS, RESULTS_FOLDER) and file.name != papers.PAPER_FILE
    ]


def load_questions(root: Path) -> list[QuestionFile]:
    return [QuestionFile(root, name) for name in list_question_names(root)]


def load_rounds(root: Path) -> list[QuestionRound]:
    return [part for question in load_questions(root) for part in question.rounds]


def find_question(root: Path, name: str) -> QuestionFile:
    """Return a question by its name ``folder/file``, or by ``file`` if that is unique."""
    names = list_question_names(root)
    short = name.strip("/").removeprefix(f"{PIPELINES}/").removesuffix(".yaml")
    if short in names:
        return QuestionFile(root, short)
    fitting = [candidate for candidate in names if candidate.partition("/")[2] == short]
    if len(fitting) == 1:
        return QuestionFile(root, fitting[0])
    if len(fitting) > 1:
        raise UserError(f"found {name!r}, which is {' or '.join(fitting)}; allowed: one of them")
    if old := find_round_by_old_name(root, short):
        raise UserError(f"found {name!r}, an old name; it is now: {old.command}")
    shown = ", ".join(names) or "none here; start from the folder that has pipelines/"
    raise UserError(f"found no question {name!r}{did_you_mean(short, names)}; allowed: {shown}")


def find_round_by_old_name(root: Path, name: str) -> QuestionRound | None:
    return next((candidate for candidate in load_rounds(root) if candidate.old_name == name), None)


def _fill_run_section(layer: params_layers.SettingsLayer) -> params_layers.SettingsLayer:
    """Return the layer with its ``seeds`` and names of ``methods`` copied into ``run``."""
    sections = dict(layer.sections)
    run = sections.get("run", {})
    added: dict[str, Any] = {}
    methods = sections.get("methods")
    names = None
    if isinstance(methods, dict):
        names = tuple(methods)
        added["methods"] = [name for name in names if methods[name] is not None]
    elif isinstance(methods, list) and all(isinstance(name, str) for name in methods):
        names = tuple(methods)
        added["methods"] = sections.pop("methods")
    data: Mapping[str, Any] = layer.document.data or {}
    if "seeds" in data:
        added["seeds"] = seeds = data["seeds"]
        match = SEED_RANGE_PATTERN.fullmatch(seeds) if isinstance(seeds, str) else None
        if match and int(match[2]) - int(match[1]) < MAX_SEEDS:  # others are refused as run.seeds
            added["seeds"] = list(range(int(match[1]), int(match[2]) + 1))
    present = run if isinstance(run, dict) else {}
    moved = {("run", key): (layer.document, (key,)) for key in added if key not in present}
    if added and isinstance(run, dict):
        sections["run"] = added | run
    return layer._replace(sections=sections, names=names, moved={**layer.moved, **moved})
