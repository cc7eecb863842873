"""Predict pictures of any size and mode, and show them with their experts on a page.

A two-tower model compares pictures with texts: T texts, M tokens per text, d numbers per embedding.
"""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple
from unicodedata import category

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from moecore.core.files import UserError, join_below_root
from moecore.data.files.decode import MODES, UnreadableImage, decode_image
from moecore.data.text.tokenizers import EncodedCaption, Tokenizer, load_tokenizer
from moecore.measure.calibrators import base, temperature
from moecore.measure.routing_metrics.expert_profiles import words_with_experts
from moecore.nn.backbones import base_model, two_towers
from moecore.nn.predict import predict_in_batches
from moecore.predict.model_quality import calibrator_folder
from moecore.report.figures.drawing import expert_colours
from moecore.report.page.report_page import template_environment
from moecore.run.run_record import printing_progress
from moecore.tasks.image_text import cosine_matrix, similarity_logits
from moecore.training.artifacts import load_model_card

MAX_SHOWN = 500  # files of the page, at most: more would make it tens of megabytes
MAX_PNG_SIDE = 96  # pixels; larger pictures become JPEG
MAX_TEXTS = 10_000  # each is a column of the table
MAX_LETTERS = 80  # of a text below a picture
NEAREST = 5  # shown matches per picture, and per text


class Tile(NamedTuple):
    picture: str  # a data: URL
    experts: list[list[list[list[int]]]]  # layer → row → column → experts, most weight first
    label: str = ""


class ShownFile(NamedTuple):
    name: str
    answer: str
    tiles: list[Tile]  # one of a picture, three of a volume
    more: Sequence[str] = ()  # lines below the answer


class RoutedText(NamedTuple):
    text: str
    layers: list[list[tuple[str, list[int]]]]
    nearest: list[str]
    remark: str = ""


class PredictionsPage(NamedTuple):
    model: str
    data: str
    remarks: Sequence[str]
    shown: Sequence[ShownFile]
    total: int  # files
    failures: Sequence[tuple[str, str]]  # file, and why it has no prediction
    experts: int = 0  # per layer; 0 for a dense model
    texts: Sequence[RoutedText] = ()
    text_experts: int = 0  # per layer of the text tower


def render_predictions(content: PredictionsPage) -> str:
    items = [[tile.experts for tile in file.tiles] for file in content.shown]
    template = template_environment().get_template("predicted.html.jinja")
    return template.render(
        page=content,
        routing={"colours": expert_colours(content.experts), "items": items},
        layers=len(items[0][0]) if items else 0,
        colours=expert_colours(content.text_experts),
    )


def encode_picture_as_tile(
    pixels: np.ndarray, experts: Sequence[np.ndarray], label: str = ""
) -> Tile:
    """Encode pixels, uint8 (1 or 3, H, W), and experts per layer (rows, columns, k) for a page."""
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    kind = "png" if max(image.size) <= MAX_PNG_SIDE else "jpeg"
    buffer = io.BytesIO()
    image.save(buffer, kind)
    address = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return Tile(address, [layer.tolist() for layer in experts], label)


def middle_slice_tiles(volume: np.ndarray, experts: Sequence[np.ndarray]) -> list[Tile]:
    """Build a tile per axis of volume (1, D, H, W): the middle slice; experts: (d, h, w, k)."""
    tiles = []
    for axis, label in enumerate(("first axis", "second axis", "third axis")):
        cut = np.take(volume[0], volume.shape[axis + 1] // 2, axis=axis)
        pixels = np.rint(np.clip(cut.astype(np.float32), 0, 1) * 255).astype(np.uint8)
        layers = [np.take(layer, layer.shape[axis] // 2, axis=axis) for layer in experts]
        tiles.append(encode_picture_as_tile(pixels[None], layers, label))
    return tiles


class FileRow(NamedTuple):
    file: str = ""
    prediction: str = ""
    probability: float | None = None  # of the answer; None without classes
    numbers: tuple[float, ...] = ()  # the probability of every class, or the single output
    error: str = ""
    more: Sequence[str] = ()  # lines of the page below the answer

    @property
    def answer(self) -> str:
        if self.probability is None:
            return self.prediction
        return f"{self.prediction}, {100 * self.probability:.1f} %"


class OutputReader(NamedTuple):
    columns: tuple[str, ...]  # of FileRow.numbers
    row: Callable[[Tensor], FileRow]  # from an output (K,)
    remark: str


def build_output_reader(model_folder: Path, calibrator: Path | None) -> OutputReader:
    """Return a reader that turns an output (K,) into a row: class probabilities, or a number."""
    # The output of G × G cells is (G² · K,), and its row has each cell's best class. calibrator:
    # the folder of calibrator.json; None: the model's, if it exists.
    task = load_model_card(model_folder).image.task
    if not task.classes:
        remark = "raw predictions: a number has no probability"
        read = lambda output: FileRow(prediction=f"{output[0]:.4f}", numbers=(float(output[0]),))
        return OutputReader(task.answers, read, remark)
    path = (calibrator or calibrator_folder(model_folder)) / "calibrator.json"
    fitted: base.FittedCalibrator = temperature.FittedTemperature(temperature=1.0)
    remark = f"probabilities are not calibrated: there is no {path}"
    cells = [""]
    if task.cells > 1:
        cells = [f" of cell {cell}" for cell in range(1, task.cells + 1)]
        remark = "probabilities are not calibrated: each cell has its own"
    elif path.is_file():
        fitted = base.read_calibrator(path, "classes")
        remark = f"probabilities are calibrated: {fitted.summary} of {path}"
    elif calibrator is not None:
        raise UserError(f"{path}: no such file; --calibrator is a folder that `calibrate` wrote")

    def row(output: Tensor) -> FileRow:
        scaled = fitted.apply(output[None]).unflatten(1, (task.cells, -1))[0]
        is_exclusive = task.cells > 1 or task.needs_classes("one_class") is None
        probs = scaled.softmax(dim=-1) if is_exclusive else scaled.sigmoid()
        best = ", ".join(task.classes[place] for place in probs.argmax(dim=-1).tolist())
        highest = None if task.cells > 1 else float(probs.max())
        return FileRow("", best, highest, tuple(probs.flatten().tolist()))

    columns = tuple(f"p({name}){cell}" for cell in cells for name in task.classes)
    return OutputReader(columns, row, remark)


def predict_picture_files(
    folder: Path, files: Sequence[Path], model: base_model.Model, reader: OutputReader, batch: int
) -> tuple[list[FileRow], list[ShownFile]]:
    """Predict picture files; return a row per file, and entries of the first MAX_SHOWN files."""
    spec = model.image
    if spec.channels not in MODES:
        raise UserError(f"model: takes images of {spec.channels} channels; pictures have 1 or 3")

    if model.moe is not None and "truth" in model.moe.router.wants:
        raise UserError("model: is routed by the truth, which pictures do not say")

    def decode_file(path: Path) -> np.ndarray | str:
        try:
            return decode_image(join_below_root(folder, path), spec.shape[0], spec.channels)
        except (UnreadableImage, UserError) as error:
            return str(error)

    rows: list[FileRow] = []
    shown: list[ShownFile] = []
    with printing_progress("predict", len(files)) as bar, ThreadPoolExecutor() as pool:
        for start in range(0, len(files), batch):
            part = files[start : start + batch]
            decoded = list(pool.map(decode_file, part))
            pictures = [pixels for pixels in decoded if not isinstance(pixels, str)]
            outputs = _outputs_with_experts(model, pictures, batch)
            for path, picture in zip(part, decoded, strict=True):
                name = "".join(  # on one line, with control characters and surrogates escaped
                    repr(letter)[1:-1] if category(letter) in ("Cc", "Cs") else letter
                    for letter in path.relative_to(folder).as_posix()
                )
                if isinstance(picture, str):
                    rows.append(FileRow(name, error=picture))
                    continue
                output, experts = next(outputs)
                row = reader.row(output)._replace(file=name)
                rows.append(row)
                if len(shown) < MAX_SHOWN:
                    tile = encode_picture_as_tile(picture, experts)
                    shown.append(ShownFile(name, row.answer, [tile], row.more))
            bar.update(len(rows))
    return rows, shown


def _outputs_with_experts(
    model: base_model.Model, pictures: Sequence[np.ndarray], batch: int
) -> Iterator[tuple[Tensor, list[np.ndarray]]]:
    """Yield each picture's output (K,) and, per layer, its ``top_experts``."""
    if not pictures:
        return
    outputs, records = predict_in_batches(model, np.stack(pictures), batch)
    pairs = zip(records, model.layouts, strict=True)
    layers = [top_experts(record.combine, layout.special, layout.grid) for record, layout in pairs]
    for number, output in enumerate(outputs):
        yield output, [layer[number] for layer in layers]


def tabulate_files(columns: Sequence[str], rows: Sequence[FileRow]) -> Iterator[Sequence[str]]:
    """Yield the table's header, and a line per row; columns: names of ``FileRow.numbers``."""
    yield "file", "prediction", "probability", *columns, "error"
    for row in rows:
        numbers = [f"{value:.6g}" for value in row.numbers] or [""] * len(columns)
        probability = "" if row.probability is None else f"{row.probability:.6g}"
        yield row.file, row.prediction, probability, *numbers, row.error


def top_experts(combine: Tensor, special: int, grid: tuple[int, ...]) -> np.ndarray:
    """Return each patch's one or two experts by weight, int16 (B, *grid, 1 or 2), -1: none."""
    weights, experts = combine[:, special:].topk(min(2, combine.shape[-1]))
    chosen = torch.where(weights > 0, experts, -1)
    return chosen.view(len(combine), *grid, -1).numpy().astype(np.int16)


class EmbeddedTexts(NamedTuple):
    texts: list[str]
    tokenizer: Tokenizer
    encoded: list[EncodedCaption]
    tokens: Tensor  # (T, M) int32
    sides: Tensor  # (T, d + 3), the text tower's outputs


def embed_text_file(path: Path, model: two_towers.TwoTowerModel, folder: Path) -> EmbeddedTexts:
    """Read a file with one text per line, and return its distinct texts with embeddings."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8: {error}"
        raise UserError(f"{path}: {reason}; --texts is a file with one text per line") from None
    texts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not 1 <= len(texts) <= MAX_TEXTS:
        allowed = f"1 to {MAX_TEXTS:,}, one per line"
        raise UserError.at(path, found=f"{len(texts):,} texts", allowed=allowed)
    task = model.text.task
    tokenizer = load_tokenizer(folder, task)
    encoded = [tokenizer.encode(text, task.context) for text in texts]
    tokens = torch.tensor([text.tokens for text in encoded], dtype=torch.int32)
    return EmbeddedTexts(texts, tokenizer, encoded, tokens, model.targets(tokens)[:, 0])


def build_nearest_text_reader(texts: EmbeddedTexts, pairs: str) -> OutputReader:
    """Return a reader: image embedding → nearest text, its probability by ``pairs``, cosines."""
    # pairs: the loss of the model's training, sigmoid or softmax.

    def row(side: Tensor) -> FileRow:
        cosines = cosine_matrix(side[None], texts.sides)[0]
        logits = similarity_logits(side[None].double(), texts.sides.double())[0]
        shares = logits.sigmoid() if pairs == "sigmoid" else logits.softmax(dim=0)
        order = cosines.argsort(descending=True, stable=True)[:NEAREST].tolist()
        words = texts.texts
        more = [f"{cosines[place]:.3f} {shorten(words[place], MAX_LETTERS)}" for place in order]
        best = int(cosines.argmax())
        return FileRow("", words[best], float(shares[best]), tuple(cosines.tolist()), "", more)

    share = "that the pair fits" if pairs == "sigmoid" else "its share among the texts"
    remark = f"numbers of texts are cosines; the probability of an answer: {share}, not calibrated"
    cut = sum(text.cut for text in texts.encoded)
    if cut:
        remark += f"; {cut} of {len(texts.texts)} texts are longer than the context and were cut"
    return OutputReader(tuple(texts.texts), row, remark)


def rank_pictures(
    model: two_towers.TwoTowerModel, texts: EmbeddedTexts, rows: Sequence[FileRow]
) -> tuple[list[Sequence[str]], list[RoutedText]]:
    """Rank pictures per text; return table lines (text, rank, file, cosine) and page entries."""
    readable = [row for row in rows if not row.error]
    lines: list[Sequence[str]] = [("text", "place", "file", "cosine")]
    shown = []
    routed = words_with_experts(model, texts.tokens, texts.tokenizer)
    described = zip(texts.texts, routed, texts.encoded, strict=True)
    for number, (text, layers, encoded) in enumerate(described):
        cosines = np.array([row.numbers[number] for row in readable])
        nearest = []
        for place, best in enumerate(np.argsort(-cosines, kind="stable")[:NEAREST], 1):
            lines.append((text, str(place), readable[best].file, f"{cosines[best]:.6g}"))
            nearest.append(f"{cosines[best]:.3f} {readable[best].file}")
        remarks = []
        if encoded.unknown:
            remarks.append(f"{encoded.unknown} words that the vocabulary does not have")
        if encoded.cut:
            remarks.append("longer than the context: cut")
        shown.append(RoutedText(text, layers, nearest, "; ".join(remarks)))
    return lines, shown
