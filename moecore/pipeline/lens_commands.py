"""The commands ``moecore lens record``, ``read`` and ``engine``."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from moecore.core.files import UserError, write_csv, write_json

Items = Annotated[int | None, Option(min=1, help="at most this many, evenly spread")]
OtherTrace = Annotated[Path | None, Option(help="a trace of the same items, to compare with")]
Numbers = Annotated[Path, Option(help="all layers' numbers, as JSON; as CSV if it ends so")]
Against = Annotated[list[Path] | None, Option(help="the same requests in another engine")]


def lens_record(
    model: Annotated[Path, Argument(help="a model's folder, or a Python file that names one")],
    out: Annotated[Path, Option(help="the trace's folder")] = Path("trace"),
    data: Annotated[Path | None, Option(help="prepared folder, of a model's folder")] = None,
    items: Items = None,
) -> None:
    """Write a trace of a model's routing of texts or images: docs/tutorials/lens.md."""
    from moecore.lens.recording import record_python_file, record_trained_model

    if (data is None) == model.is_dir():
        raise UserError("--data: a model's folder takes --data, and a Python file brings its own")
    if data is None:
        number = record_python_file(model, out)
    else:
        number = record_trained_model(model, data, out, items)
    typer.echo(f"{out}: {number:,} items; next: moecore lens read {out}")


def lens_read(
    trace: Annotated[Path, Argument(help="the trace's folder")] = Path("trace"),
    page: Annotated[Path, Option(help="what to write")] = Path("lens.html"),
    items: Items = None,
    against: OtherTrace = None,
) -> None:
    """Print a summary of a trace's routing, and write a page and an explorer of it."""
    from moecore.lens.page import write_lens_pages

    write_lens_pages(trace, page, items, against)
    typer.echo(f"{page}: written")


def lens_engine(
    files: Annotated[list[Path], Argument(help="of vLLM, SGLang (.json) or llama.cpp (.csv)")],
    against: Against = None,
    top_k: Annotated[int | None, Option(help="experts per token, of flat ids")] = None,
    layers: Annotated[int | None, Option(help="layers, of SGLang's flat ids")] = None,
    first_layer: Annotated[int, Option(help="leave out layers below, which are dense")] = 0,
    experts: Annotated[int | None, Option(help="experts; default: highest id + 1")] = None,
    out: Numbers = Path("engine.json"),
    page: Annotated[Path, Option(help="the numbers as a page")] = Path("engine.html"),
) -> None:
    """Print an engine's expert load, cache hits and agreement with another engine; write a page."""
    from moecore.lens.engine_traces import EngineFacts, analyse_engines, print_mean_rows
    from moecore.lens.page import write_engine_page

    rows = analyse_engines(files, against or [], EngineFacts(top_k, layers, first_layer, experts))
    print_mean_rows(rows)
    if out.suffix == ".csv":
        write_csv(out, [rows[0], *(row.values() for row in rows)])
    else:
        write_json(out, rows)
    write_engine_page(page, rows, ", ".join(path.name for path in files))
    typer.echo(f"{out}, {page}: written")
