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


def run_url(target: str) -> str:
    """Where the controller of a run answers: the URL itself, or that of the run in a folder."""
    if target.startswith("http"):
        return target.rstrip("/")
    from relax.telemetry.run_folder import RunFolder

    place = RunFolder(Path(target)).read_place() if Path(target).is_dir() else {}
    if "url" not in place:
        raise typer.BadParameter(f"{target} is neither a URL nor a run folder with run.json")
    return str(place["url"])
