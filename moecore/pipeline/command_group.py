"""Base class of the commands: the order of the help, and how errors are printed."""

import gc
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from moecore.core import files, source_layout

PANELS = {  # of the help
    "Start": ("quick", "pull", "new", "check", "schema", "upgrade"),
    "Run": ("plan", "run", "pilot", "tune"),
    "Look": ("ui", "sync"),
    "Use a model": ("predict", "export", "lens", "conform", "robustbench"),
    "Studies": ("study", "claims"),
}


class CommandGroup(TyperGroup):
    """A group of commands that prints a UserError as one message and exits with 1."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels = PANELS if "quick" in self.commands else {"Commands": self.list_commands(ctx)}
        for title, names in panels.items():
            with formatter.section(title):
                helps = [self.commands[name].get_short_help_str(100) for name in names]
                formatter.write_dl(list(zip(names, helps, strict=True)))

    def invoke(self, ctx: Any) -> Any:
        gc.set_threshold(50_000)  # with 700, a sixth of `moecore check` would look for garbage
        try:
            source_layout.refuse_other_checkout()
            if Path(source_layout.PROJECT_ANSWERS_FILE).is_file():
                from moecore.pipeline.project_record import read_answers

                read_answers(Path())  # refuses a newer project
            with files.explain_file_errors():
                return super().invoke(ctx)
        except files.UserError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
