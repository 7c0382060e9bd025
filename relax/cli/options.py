"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FileArgument = Annotated[Path, typer.Argument(help="Serve YAML of the run", show_default=False)]
SetOption = Annotated[
    list[str], typer.Option("--set", help="Override, e.g. run.steps=50 or actor.optim.lr=0", show_default=False)
]
RunDirArgument = Annotated[Path, typer.Argument(help="Run folder", show_default=False)]
