"""Evidence stored with a result: values per test item, and the commit that asked each question.

items.safetensors, in the folder of compare.json, has the values of each seed and test item for
every metric and method of a claim or question: (S, N) as bits if a seed has two different values,
as bytes for up to 256, else as fp16 deviations from the exact mean; (S,) for a metric without
items. pipelines/results/ has one such file per question, in which the round's number and a slash
precede each name.

Under ``asked`` a result has the commit and file of the question when the run's folder was written,
or null if it was not committed. Results of moecore 0.2 also have the commit of the answer, and
which entries were asked elsewhere, or late.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor

from moecore.core.files import UserError, read_json
from moecore.core.safetensors_files import read_tensors, write_tensors
from moecore.core.source_layout import run_git
from moecore.report.claims import evaluation
from moecore.report.claims.significance import crossed_or_paired_difference
from moecore.report.tables.cells import interval_from_json
from moecore.report.tables.metrics_by_method import expected_metrics
from moecore.statistics.comparisons import Difference
from moecore.study import papers, run_and_claims
from moecore.study.questions import QuestionFile, QuestionRound, split_results_by_round
from moecore.study.run_and_claims import Comparison, compared_quantity_key
from moecore.study.study import read_study

ITEMS_FILE = Path("reports/items.safetensors")  # in git, as are the numbers
COMPARE_JSON_FILE = Path("reports/compare.json")
MAX_ITEM_BYTES = 2_000_000  # per round
RESULT_DIGEST_TENSOR = "result"  # tensor: digest of the numbers that the items belong to
VALUES_SUFFIX = ":values"  # of a name: coded values of each seed, or mean and largest deviation
FP16_TOLERANCE = 1e-3  # allowed error of fp16, relative to an interval's half-width
VARIANCE_KEYS = ("variances", "freedoms")  # of a difference; not in items of moecore 0.2
REPLACED_JSON = papers.PIPELINES / "results/earlier.json"  # answers replaced by later results
ASKED_KEY = "asked"  # in a result: the commit and the file that asked
DEFAULTS = {name: field.default for name, field in Comparison.model_fields.items()}
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
HASH_LENGTH = 8  # of a hash in messages


def pack_item_values(
    evaluated: Sequence[evaluation.EvaluatedClaim], numbers: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return name → tensor of each claim's values per seed and test item, for items.safetensors.

    Claims above ``MAX_ITEM_BYTES`` are named on stderr, not stored. numbers: compare.json, hashed.
    """
    tensors = {RESULT_DIGEST_TENSOR: _result_digest(numbers)}
    for answer in evaluated:
        names = _value_names(answer.claim.model_dump())
        new: dict[str, Tensor] = {}
        for name, values in zip(names, answer.values, strict=True):
            if name not in tensors:
                new |= _pack_values(name, values)
        if sum(tensor.nbytes for tensor in (tensors | new).values()) > MAX_ITEM_BYTES:
            print(f"items are too large to be stored: {answer.claim.words}", file=sys.stderr)
        else:
            tensors |= new
    return tensors


def _read_items(question: QuestionFile) -> dict[str, Tensor]:
    """Return round/phase/metric/method → values of all rounds of a question."""
    path = question.results_path.with_suffix(ITEMS_FILE.suffix)
    tensors: dict[str, Tensor] = {}
    files = question.find_old_files(ITEMS_FILE.suffix) | {"1": path}
    for part, file in files.items():
        if file.is_file():
            stored, _ = read_tensors(file)
            if RESULT_DIGEST_TENSOR in stored:  # a round's file of moecore 0.3
                stored = {f"{part}/{name}": values for name, values in stored.items()}
            tensors |= stored
    return tensors


def copy_items_to_results(study: QuestionRound, items: Path) -> None:
    """Copy a round's items to pipelines/results/, where those of the other rounds stay."""
    question = study.question
    with question.lock_results():
        stored = _read_items(question)
        tensors = {k: v for k, v in stored.items() if not k.startswith(f"{study.results_key}/")}
        tensors |= {f"{study.results_key}/{name}": v for name, v in read_tensors(items)[0].items()}
        write_tensors(question.results_path.with_suffix(ITEMS_FILE.suffix), tensors)
        for path in question.find_old_files(ITEMS_FILE.suffix).values():
            path.unlink()


def _items_of_round(study: QuestionRound) -> dict[str, Tensor]:
    start = f"{study.results_key}/"
    tensors = _read_items(study.question)
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


def verify_stored_items(study: QuestionRound) -> int:
    """Return the number of differences that stored items reproduce; UserError for a mismatch."""
    tensors = _items_of_round(study)
    if not tensors:
        return 0
    results = study.question.results_path
    place = f"{results.with_suffix(ITEMS_FILE.suffix)}: round {study.number}"
    numbers = study.read_numbers()
    again = f"run the study again: {results} and these are one result"
    number = 0
    for section in evaluation.SECTIONS.values():
        for key, entry in numbers.get(section, {}).items():
            names = _value_names(entry["asked"])
            if not set(names) <= tensors.keys():
                continue
            stored = entry["difference"]
            ours, theirs = (_unpack_values(tensors, name, stored.get("items", 0)) for name in names)
            difference = crossed_or_paired_difference(ours, theirs)
            difference = evaluation.drop_zero_width_interval(difference)
            if not _matches_stored_difference(difference, entry):
                raise UserError(
                    f"{place}: {section}: {key}: found {difference.value:.6g} from these items, "
                    f"{stored['mean']:.6g} in {results.name}; {again}"
                )
            number += 1
    if number and not torch.equal(tensors[RESULT_DIGEST_TENSOR], _result_digest(numbers)):
        raise UserError(f"{place}: found the items of another result; {again}")
    return number


def compute_claim_from_items(
    study: QuestionRound, numbers: Mapping[str, Any], claim: Comparison
) -> dict[str, Any]:
    """Compute a claim added after the run from its numbers and items; {} if it stored no items."""
    sides = read_stored_side_values(study, numbers, claim)
    if sides is None:
        return {}
    difference = evaluation.drop_zero_width_interval(crossed_or_paired_difference(*sides))
    metrics = (claim.metric, claim.against_metric or claim.metric)
    ours, theirs = (
        numbers[method][claim.phase][metric]
        for method, metric in zip((claim.method, claim.against), metrics, strict=True)
    )
    cells = {"method": ours, "against": theirs, "form": ours["form"]}
    return cells | evaluation.verdict_to_json(difference, cells["form"], "open", None, None)


def read_stored_side_values(
    study: QuestionRound, numbers: Mapping[str, Any], claim: Comparison
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return both sides' values of a metric, (S seeds, N items) or (S,); None if one is absent."""
    ours, theirs = _value_names(claim.model_dump())
    tensors = _items_of_round(study)
    if not {ours, theirs} <= tensors.keys():
        return None
    items = {
        name: entry["difference"].get("items", 0)
        for section in evaluation.SECTIONS.values()
        for entry in numbers.get(section, {}).values()
        for name in _value_names(entry["asked"])
    }
    if not {ours, theirs} <= items.keys():
        return None
    first = _unpack_values(tensors, ours, items[ours])
    return first, _unpack_values(tensors, theirs, items[theirs])


def _value_names(comparison: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names ``phase/metric/method`` of the tensors of a comparison's two sides."""
    phase, metric = comparison["phase"], comparison["metric"]
    other = comparison.get("against_metric") or metric
    return f"{phase}/{metric}/{comparison['method']}", f"{phase}/{other}/{comparison['against']}"


def _pack_values(name: str, values: np.ndarray) -> dict[str, Tensor]:
    if values.ndim == 1:
        return {name: torch.from_numpy(values)}
    tables = [np.unique(row, return_inverse=True) for row in values]
    width = max(len(different) for different, _ in tables)
    if width <= 256:
        codes = np.stack([positions for _, positions in tables]).astype(np.uint8)
        packed = np.packbits(codes, axis=1) if width <= 2 else codes
        table = np.stack([np.pad(row, (0, width - len(row)), "edge") for row, _ in tables])
        return {name: torch.from_numpy(packed), name + VALUES_SUFFIX: torch.from_numpy(table)}
    mean = values.mean(axis=1)
    apart = values - mean[:, None]
    largest = np.abs(apart).max(axis=1).clip(min=np.finfo(apart.dtype).tiny)  # 0: all equal
    shares = (apart / largest[:, None]).astype(np.float16)
    ends = torch.from_numpy(np.stack([mean, largest], axis=1))
    return {name: torch.from_numpy(shares), name + VALUES_SUFFIX: ends}


def _unpack_values(tensors: Mapping[str, Tensor], name: str, items: int) -> np.ndarray:
    packed = tensors[name].numpy()
    if packed.ndim == 1:
        return packed
    values = tensors[name + VALUES_SUFFIX].numpy()
    if packed.dtype == np.uint8:
        is_bits = values.shape[1] <= 2
        codes = np.unpackbits(packed, axis=1, count=items) if is_bits else packed
        return np.take_along_axis(values, codes.astype(np.intp), axis=1)
    apart = packed.astype(np.float64)
    mean, largest = values.T[:, :, None]
    return mean + largest * (apart - apart.mean(axis=1, keepdims=True))


def _matches_stored_difference(difference: Difference, entry: Mapping[str, Any]) -> bool:
    """Return whether difference and limits equal those in ``entry``, within the error of fp16."""
    stored = entry["difference"]
    if (difference.seeds, difference.items) != (stored["seeds"], stored.get("items", 0)):
        return False
    ours = difference.interval()
    theirs = interval_from_json(stored)
    if theirs.limits is None:  # identical values, or bounds
        return math.isclose(ours.value, theirs.value, abs_tol=1e-12)
    half = (theirs.limits[1] - theirs.limits[0]) / 2
    for interval in (ours, evaluation.difference_from_json(entry).interval()):
        limits = interval.limits
        if limits is None:
            return False
        gaps = [abs(a - b) for a, b in zip(limits, theirs.limits, strict=True)]
        if max(gaps) > FP16_TOLERANCE * half:
            return False
    return True


def _result_digest(numbers: Mapping[str, Any]) -> Tensor:
    """Return the sha256, uint8 (32,), of the claims and questions in compare.json."""
    judged: dict[str, dict[str, Any]] = {section: {} for section in evaluation.SECTIONS.values()}
    for section, entries in judged.items():
        for name, entry in numbers.get(section, {}).items():
            stored = {k: v for k, v in entry["difference"].items() if k not in VARIANCE_KEYS}
            entries[name] = entry | {"difference": stored}
    text = json.dumps(judged, sort_keys=True).encode()
    return torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8)


class QuestionCommits(NamedTuple):
    """A claim or question, with the git commits that asked it and that answered it."""

    words: str
    asked: str  # "" for no commit
    answered: str
    is_late: bool  # asked in no commit before the answer
    is_refused: bool  # late, neither recorded nor printed as late, with the present settings

    @property
    def line(self) -> str:
        asked = self.asked[:HASH_LENGTH] or "no commit"
        answered = self.answered[:HASH_LENGTH] or "no commit"
        late = ", not asked before the answer" if self.is_late else ""
        return f"{self.words}: asked in {asked}, answered in {answered}{late}"


def has_full_git_history(folder: Path) -> bool:
    return run_git(folder, "rev-parse", "--is-shallow-repository") == "false"


def find_head_if_committed(root: Path, *paths: Path) -> str | None:
    """Return the hash of HEAD if it has ``paths`` with their present content, else None."""
    for path in paths:
        committed = run_git(root, "show", f"HEAD:./{path.as_posix()}")
        if not committed or committed != (root / path).read_text(encoding="utf-8").strip():
            return None
    return run_git(root, "rev-parse", "HEAD")


def find_question_commits(study: QuestionRound) -> list[QuestionCommits]:
    """Return each claim and question of a round's result with its two git commits."""
    # The project must be in a repository that ``has_full_git_history``. Other rounds, or another
    # form of the file, do not make an answer newer.
    root = study.question.root
    if not (numbers := study.read_numbers()):
        return []
    record = numbers.get(ASKED_KEY) or {}
    answered = record.get("answered") or _find_answering_commit(study, numbers)
    entries = {
        compared_quantity_key(DEFAULTS | entry["asked"]): (name, entry)
        for section in ("claims", "questions")
        for name, entry in numbers.get(section, {}).items()
        if "asked" in entry  # older versions wrote none
    }
    dated = []
    data = study.compose().document.data
    for question in _list_comparisons(data):
        if compared_quantity_key(question) not in entries:
            continue
        name, entry = entries[compared_quantity_key(question)]
        dates = record | {"answered": answered} | record.get("entries", {}).get(name, {})
        is_late = not _is_asked_before(root, dates, question)
        claim = Comparison.model_validate({key: question[key] for key in DEFAULTS})
        was = DEFAULTS | entry["asked"]  # of another form: said where it is printed
        is_new = is_late and dates.get("commit") and not dates.get("late")
        is_new = is_new and verdict_key(was) == verdict_key(question)
        stored = entry.get("settings")
        is_refused = bool(is_new) and not run_and_claims.have_settings_changed(stored, data, claim)
        text = f"{claim.phase}: {claim.words}"
        commits = (dates.get("commit") or "", dates["answered"] or "")
        dated.append(QuestionCommits(text, *commits, is_late, is_refused))
    return dated


def _list_numbers_by_commit(study: QuestionRound) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (commit, the round's compare.json) of HEAD, then of each commit that changed it."""
    root = study.question.root
    results = study.question.results_path.relative_to(root)
    paths = [results.as_posix(), results.with_stem(study.name.rpartition("/")[2]).as_posix()]
    if study.old_name:
        paths.append(f"{papers.PIPELINES}/{study.old_name}/reports/compare.json")
    changes = run_git(root, "log", "--format=%H", "--", *paths) or ""
    for commit in [run_git(root, "rev-parse", "HEAD") or "HEAD", *changes.split()]:
        for path in dict.fromkeys(paths):
            content = json.loads(run_git(root, "show", f"{commit}:./{path}") or "{}")
            if path == paths[0]:
                content = split_results_by_round(content).get(study.results_key, {})
            if content:
                yield commit, content


def _find_answering_commit(study: QuestionRound, numbers: Mapping[str, Any]) -> str:
    """Return the commit that first stored ``numbers``; "" if HEAD has other numbers."""
    same = takewhile(lambda stored: stored[1] == numbers, _list_numbers_by_commit(study))
    return next((commit for commit, _ in reversed([*same])), "")


def read_replaced_answers_file(root: Path) -> list[dict[str, Any]]:
    """Return the answers in ``REPLACED_JSON``, which later results replaced; [] without it."""
    path = root / REPLACED_JSON
    answers = read_json(path)["answers"] if path.is_file() else []
    for place, answer in enumerate(answers):
        if lack := {"claim", "question", "commit", "mean", "seeds", "design"} - answer.keys():
            keys = f"answers[{place}] without {', '.join(sorted(lack))}"
            raise UserError.at(path, found=keys, allowed="what tools/earlier_answers.py writes")
    return answers


def find_overwritten_answers(study: QuestionRound, known: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line per claim with an answer in git's history that HEAD and ``known`` lack."""
    root = study.question.root
    listed = {round(answer["mean"], 9) for answer in known}
    asked = {compared_quantity_key(DEFAULTS | c) for c in papers.load_named_claims(root).values()}
    head = run_git(root, "rev-parse", "HEAD")
    lines = {}
    for commit, numbers in _list_numbers_by_commit(study):
        for words, entry in numbers.get("claims", {}).items():
            mean = entry["difference"]["mean"]
            if commit == head:
                listed.add(round(mean, 9))
            elif "asked" in entry and round(mean, 9) not in listed:  # older ones are listed
                text = f"{mean:+.4g} of {entry['difference']['seeds']} seeds"
                text += f" in {commit[:HASH_LENGTH]} was overwritten and is not in {REPLACED_JSON}"
                lines[compared_quantity_key(DEFAULTS | entry["asked"])] = f"{words}: {text}"
    return [line for key, line in lines.items() if key in asked]


def find_reused_seeds(study: QuestionRound, earlier: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line per claim and ``earlier`` answer with equal settings and a seed in common."""
    named = papers.load_named_claims(study.question.root)
    data = study.compose().document.data
    lines = []
    for claim in data.get("claims") or ():
        comparison = Comparison.model_validate({k: (DEFAULTS | claim)[k] for k in DEFAULTS})
        for answer in earlier:
            former = named.get(answer["claim"], {})
            is_same = all(claim.get(key) == former.get(key) for key in ("source", "says"))
            seeds = set(answer["seeds"]) & set(data["run"]["seeds"])
            if is_same and seeds and answer["design"] == design_digest_of_round(study, comparison):
                shown = ", ".join(map(str, sorted(seeds)))
                where = f"{answer['question']} in {answer['commit'][:HASH_LENGTH]}"
                lines.append(f"{answer['claim']}: seeds {shown} answered it before, {where}")
    return lines


def design_digest_of_round(study: QuestionRound, claim: Comparison) -> str:
    """Return a digest of a claim's settings; the round's name if no stage gives its metric."""
    composed = study.compose()
    if "." in claim.method or claim.phase not in composed.document.data.get("data", {}):
        return study.name
    metrics = expected_metrics(read_study(composed.document), composed.all_stages, claim.phase)
    if claim.metric not in metrics:
        return study.name
    return run_and_claims.design_digest(composed.document.data, claim, metrics[claim.metric].stage)


def _is_asked_before(root: Path, record: Mapping[str, Any], question: Mapping[str, Any]) -> bool:
    """Return whether ``record["commit"]`` has the question and is before ``record["answered"]``."""
    commit = record.get("commit")
    answered = record["answered"]
    if not commit or commit == answered:
        return False
    if verdict_key(question) not in _question_keys_at_commit(root, commit, record["file"]):
        return False
    return run_git(root, "merge-base", "--is-ancestor", commit, answered or "HEAD") is not None


@lru_cache
def _question_keys_at_commit(root: Path, commit: str, file: str) -> frozenset[tuple[Any, ...]]:
    """Return the ``verdict_key`` of every claim and question in ``file`` as of ``commit``."""
    data = _read_committed_yaml(root, commit, file)
    parts = [data, *(data.get("rounds") or ())]
    references = [reference for part in parts for reference in part.get(papers.ASKS) or ()]
    named = [DEFAULTS | claim for claim in _find_named_claims(root, commit, references)]
    written = [comparison for part in parts for comparison in _list_comparisons(part)]
    return frozenset(map(verdict_key, named + written))


def _find_named_claims(root: Path, commit: str, asks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the settings of the claims that ``asks`` names, from the paper files of ``commit``."""
    for reference in asks:
        folder, name, changes = papers.parse_asked_claim(reference)
        file = papers.PIPELINES / folder / papers.PAPER_FILE
        paper = _read_committed_yaml(root, commit, file.as_posix())
        path = papers.find_paper_file(root, folder)
        if not paper and root not in path.parents and path.is_file():  # of the installed version
            paper = yaml.load(path.read_text(encoding="utf-8"), YAML_LOADER)
        if name in (claims := papers.named_claims(paper)):
            yield claims[name].values | changes


@lru_cache
def _read_committed_yaml(root: Path, commit: str, file: str) -> dict[str, Any]:
    return yaml.load(run_git(root, "show", f"{commit}:./{file}") or "", Loader=YAML_LOADER) or {}


def _list_comparisons(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for section in ("claims", "questions"):
        yield from (DEFAULTS | comparison for comparison in data.get(section) or ())


def keys_asked_before(
    entries: Mapping[str, Mapping[str, Any]], record: Mapping[str, Any]
) -> set[tuple[Any, ...]]:
    """Return the ``verdict_key`` of each entry that was asked before its answer was known."""
    # entries: name → numbers; record: what the result has under ``ASKED_KEY``.
    dates = record.get("entries", {})
    return {
        verdict_key(DEFAULTS | entry["asked"])
        for name, entry in entries.items()
        if not dates.get(name, record).get("late")
    }


def verdict_key(question: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*compared_quantity_key(question), question["better"], question["margin"])
