"""The self-audit of an evaluation under attack: signs that the attacks are too weak to be believed (Carlini et al. 2019; Croce & Hein 2020).

Every line says what was found; ``holds`` is None where it could not be judged.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.attacked import Target, name_of
from moecore.attacks import Attack
from moecore.attacks.gradient import image_gradient
from moecore.attacks.pgd import Pgd
from moecore.config import Config
from moecore.evaluation.intervals import wilson
from moecore.evaluation.predict import batches, device_of, evaluating
from moecore.evaluation.robust import unpacked
from moecore.layers.soft import softened

Rows = Sequence[Mapping[str, Any]]


class Audit(Config):
    """The extra attacks of the audit, all PGD from the clean image on the task's loss."""

    images: int = Field(100, ge=1, description="The first of the attacked images; all where there are fewer.")
    steps: int = Field(20, ge=1, description="Steps of PGD; one line doubles them.")
    large_epsilon: float = Field(0.5, gt=0, le=1, description="Radius at which accuracy must be down to chance, the error of a real target up to a constant's.")


class Line(NamedTuple):
    """One question of the audit."""

    name: str
    holds: bool | None
    text: str


def audit(
    target: Target, settings: Audit, epsilon: float, curves: Mapping[str, Rows | None], attacks: Sequence[Attack], other: nn.Module | None
) -> list[Line]:
    """All lines.

    target: what the curves were measured on; epsilon: their largest; curves: attack's name → rows with accuracy, loss and hits;
    attacks: their settings; other: a second model of the same images and classes, for the transfer attack.
    """
    part = target._replace(images=target.images[: settings.images], labels=target.labels[: settings.images], only=None)
    direct, longer = Pgd(steps=settings.steps), Pgd(steps=2 * settings.steps)
    broken = robust(part, part.attacked(direct, epsilon))
    return [
        deterministic(part),
        zero_gradients(part),
        pgd_beats_fgsm(curves, attacks),
        apgd_beats_pgd(curves, attacks),
        chance(part, direct, settings.large_epsilon),
        more_steps(broken, robust(part, part.attacked(longer, epsilon)), settings.steps, epsilon),
        surrogate(part, direct, epsilon, broken),
        transfer(part, direct, epsilon, broken, other),
        square_only(curves, attacks, len(target.labels)),
    ]


def robust(target: Target, adversarial: Tensor) -> Tensor:
    """Which images are right when clean, which lies in every ball, and when attacked; (N,) bool."""
    return target.hits(target.images) & target.hits(adversarial)


def deterministic(target: Target) -> Line:
    """Two forward passes over the same images give the same bits.

    Both within one ``evaluating``: two would give them the same random numbers, which hides that the model draws any.
    """
    device = device_of(target.model)
    with evaluating(target.model), torch.no_grad():
        first, second = (torch.cat([target.model(part).prediction for part in batches(target.images, target.batch, device)]) for _ in range(2))
    same, apart = torch.equal(first, second), _most(first - second)
    return Line("deterministic", same, f"two forward passes over {len(first)} images {'are bit-equal' if same else f'differ by up to {apart}'}")


def zero_gradients(target: Target) -> Line:
    """No clean image has a gradient of nothing but zeros, as saturated or blocked losses give."""
    device, found = device_of(target.model), []
    with evaluating(target.model):
        for images, labels in zip(batches(target.images, target.batch, device), target.labels.split(target.batch), strict=True):
            found.append((image_gradient(target.model, images, labels.to(device)) == 0).flatten(1).double().mean(dim=1).cpu())
    shares = torch.cat(found)
    blind = int((shares == 1).sum())
    words = f"{blind} of {len(shares)} images have no gradient at all; {float(shares.mean()):.2%} of all pixels' gradients are 0"
    return Line("zero_gradients", blind == 0, words)


def pgd_beats_fgsm(curves: Mapping[str, Rows | None], attacks: Sequence[Attack]) -> Line:
    """Many steps break no fewer images than one."""
    many, one = _measured(curves, attacks, _is("pgd")), _measured(curves, attacks, _is("fgsm"))
    if many is None or one is None:
        return Line("pgd_beats_fgsm", None, "not judged: fgsm and pgd on the cross-entropy are not both among the attacks")
    words = f"accuracy {many['accuracy']:.1%} under pgd, {one['accuracy']:.1%} under fgsm{_at(many)}"
    return Line("pgd_beats_fgsm", many["accuracy"] <= one["accuracy"], words)


def apgd_beats_pgd(curves: Mapping[str, Rows | None], attacks: Sequence[Attack]) -> Line:
    """APGD reaches at least PGD's loss, on average."""
    best, plain = _measured(curves, attacks, _adaptive), _measured(curves, attacks, _is("pgd"))
    if best is None or plain is None:
        return Line("apgd_beats_pgd", None, "not judged: apgd and pgd on the cross-entropy are not both among the attacks")
    words = f"mean loss {best['loss']:.4g} under apgd, {plain['loss']:.4g} under pgd{_at(best)}"
    return Line("apgd_beats_pgd", best["loss"] >= plain["loss"], words)


def chance(target: Target, attack: Pgd, epsilon: float) -> Line:
    """In a ball that holds nearly every image, accuracy is no better than chance."""
    hits = robust(target, target.attacked(attack, epsilon))
    classes = target.scored(target.images[:1])[0].shape[1]
    found = wilson(int(hits.sum()), len(hits))
    guess = 1 / classes if target.labels.ndim == 1 else float(target.labels.double().mean())  # of labels, where an image has several
    words = f"accuracy {found.value:.1%} ({found.low:.1%} to {found.high:.1%}) at ε = {epsilon:g}; chance is {guess:.1%}"
    return Line("chance", found.low <= guess, words)


def more_steps(hits: Tensor, longer: Tensor, steps: int, epsilon: float) -> Line:
    """Twice the steps break no more images than the interval of the accuracy allows; both (N,) bool."""
    found, then = wilson(int(hits.sum()), len(hits)), float(longer.double().mean())
    between = f"{found.low:.1%} to {found.high:.1%}"
    words = f"accuracy {found.value:.1%} ({between}) under pgd of {steps} steps, {then:.1%} of {2 * steps}, at ε = {epsilon:g}"
    return Line("more_steps", then >= found.low, words)


def surrogate(target: Target, attack: Pgd, epsilon: float, direct: Tensor) -> Line:
    """Images made on a model of all experts at once break no more than the direct attack left unbroken, ``direct`` (N,) bool."""
    if getattr(target.model, "moe", None) is None:
        return Line("surrogate", None, "not judged: the model has no MoE layer")
    made = target._replace(model=softened(target.model)).attacked(attack, epsilon)
    return _compared("surrogate", "from the soft all-experts surrogate", robust(target, made), direct, epsilon)


def transfer(target: Target, attack: Pgd, epsilon: float, direct: Tensor, other: nn.Module | None) -> Line:
    """Images made on another model break no more than the direct attack, which left ``direct`` (N,) bool unbroken."""
    if other is None:
        return Line("transfer", None, "not judged: no second model is given, or it is this one")
    made = target._replace(model=other).attacked(attack, epsilon)
    return _compared("transfer", "from the second model", robust(target, made), direct, epsilon)


def square_only(curves: Mapping[str, Rows | None], attacks: Sequence[Attack], images: int) -> Line:
    """No image is broken by the search without gradients alone, at the largest epsilon."""
    search, gradient = (_all_hits(curves, attacks, images, square) for square in (True, False))
    if search is None or gradient is None:
        return Line("square_only", None, "not judged: square and an attack with gradients are not both among the attacks")
    alone = int((gradient & ~search).sum())
    return Line("square_only", alone == 0, f"{alone} of {images} images ({alone / images:.1%}) are broken by square alone")


def show(lines: Sequence[Line], title: str) -> None:
    """Print the lines as a table on standard error."""
    from rich.console import Console
    from rich.table import Table

    table = Table("line", "holds", "what was found", title=title)
    for line in lines:
        table.add_row(line.name, {True: "yes", False: "NO", None: "–"}[line.holds], line.text)
    Console(stderr=True).print(table)


def _compared(name: str, whence: str, hits: Tensor, direct: Tensor, epsilon: float) -> Line:
    ours, theirs = int(direct.sum()), int(hits.sum())
    words = f"{theirs} of {len(hits)} images stand the attack {whence}, {ours} the direct one, at ε = {epsilon:g}"
    return Line(name, ours <= theirs, words)


def _all_hits(curves: Mapping[str, Rows | None], attacks: Sequence[Attack], images: int, square: bool) -> Tensor | None:
    """Which images stand all attacks that are (or are not) the Square attack, at the largest epsilon; None without such attacks."""
    rows = [curves[name_of(attack)] for attack in attacks if (attack.kind == "square") == square]
    found = [unpacked(row[-1]["hits"], images) for row in rows if row is not None]
    return torch.stack(found).all(dim=0) if found else None


def _measured(curves: Mapping[str, Rows | None], attacks: Sequence[Attack], wanted: Callable[[Attack], bool]) -> Mapping[str, Any] | None:
    """The row of the largest epsilon of the first attack of that sort."""
    rows = next((curves[name_of(attack)] for attack in attacks if wanted(attack)), None)
    return None if rows is None else rows[-1]


def _is(kind: str) -> Callable[[Attack], bool]:
    return lambda attack: attack.kind == kind and attack.objective in ("task", "cross_entropy")


def _adaptive(attack: Attack) -> bool:
    return _is("apgd")(attack) or (attack.kind == "apgd_reference" and attack.loss == "ce")


def _at(row: Mapping[str, Any]) -> str:
    return f", at ε = {row['epsilon']:g}"


def _most(difference: Tensor) -> str:
    return f"{float(difference.abs().max()):.3g}"
