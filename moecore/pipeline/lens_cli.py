"""``moecore lens``: thin functions over what does the work, imported when called."""

from pathlib import Path
from typing import Annotated

import typer

from moecore.core.files import UserError

TraceFolder = Annotated[Path, typer.Argument(help="the trace's folder")]
Items = Annotated[int | None, typer.Option(min=1, help="so many at most, evenly spread")]


def lens_record(
    model: Annotated[
        Path, typer.Argument(help="a model's folder, or a Python file that names one")
    ],
    out: Annotated[Path, typer.Option(help="the trace's folder")] = Path("trace"),
    data: Annotated[Path | None, typer.Option(help="prepared folder, of a model's folder")] = None,
    items: Items = None,
) -> None:
    """Write what a model's routers do with texts or images as a trace: docs/tutorials/lens.md."""
    from moecore.lens.recording import record_python_file, record_trained_model

    if (data is None) == model.is_dir():
        needs = "a model's folder takes --data, and a Python file brings its own"
        raise UserError(f"--data: {needs}")
    if data is None:
        number = record_python_file(model, out)
    else:
        number = record_trained_model(model, data, out, items)
    typer.echo(f"{out}: {number:,} items; next: moecore lens read {out}")


def lens_read(
    trace: TraceFolder = Path("trace"),
    page: Annotated[Path, typer.Option(help="what to write")] = Path("lens.html"),
    items: Items = None,
    against: Annotated[
        Path | None, typer.Option(help="a trace of the same items, to compare with")
    ] = None,
) -> None:
    """Print what the routing of a trace is like, and write a page of it, the explorer beside it."""
    from moecore.lens.page import write_lens_page

    write_lens_page(trace, page, items, against)
    typer.echo(f"{page}: written")
