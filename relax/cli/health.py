"""`relax scale`, `relax incidents`, `relax operations`: what the controller does, and what it saw go wrong."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from relax.cli.cluster import ClusterError
from relax.cli.options import run_url

CALL_DEADLINE_S = 10.0
WAIT_S = 20.0
"""One long poll for an operation."""

RunOption = Annotated[str, typer.Option("--run", help="URL of the controller, or a run folder")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]
DEFAULT_RUN = "http://127.0.0.1:8000"


def ask(method: str, url: str, deadline_s: float = CALL_DEADLINE_S, **request: Any) -> Any:
    """The controller's answer. Raises `ClusterError` with its own words where it refuses, or does not answer."""
    try:
        response = httpx.request(method, url, timeout=deadline_s, trust_env=False, **request)
    except httpx.HTTPError as error:
        raise ClusterError(f"{method} {url}: {error or type(error).__name__}") from error
    if response.is_error:
        try:
            detail = response.json()["detail"]
        except (ValueError, KeyError, TypeError):
            detail = response.text[:200]
        raise ClusterError(f"{method} {url}: {response.status_code}: {detail}")
    return response.json()


def scale(
    replicas: Annotated[int, typer.Argument(min=1, help="Training instances that are wanted", show_default=False)],
    run: RunOption = DEFAULT_RUN,
    key: Annotated[str | None, typer.Option(help="Idempotency key: the same one asks only once")] = None,
    wait_s: Annotated[float, typer.Option(min=0.0, help="Wait for so many to serve; 0: only ask")] = 300.0,
) -> None:
    """Set the number of rollout instances while training goes on.

    Exit code 0: so many serve (or, with --wait-s 0, it was asked for); 1: refused, or not reached.
    """
    console = Console(soft_wrap=True)
    base = f"{run_url(run)}/api/v1"
    headers = {} if key is None else {"Idempotency-Key": key}
    try:
        operation = ask("POST", f"{base}/rollout/scale", json={"replicas": replicas}, headers=headers)
        end = time.monotonic() + wait_s
        while operation["ended_s"] is None and (left := end - time.monotonic()) > 0:
            poll_s = min(WAIT_S, left)
            place = f"{base}/operations/{operation['id']}"
            operation = ask("GET", place, CALL_DEADLINE_S + poll_s, params={"wait_s": poll_s})
    except ClusterError as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    console.print(f"{operation['id']}: {operation['state']} {operation['error']}".rstrip(), markup=False)
    reached = operation["state"] == "succeeded" or (wait_s == 0 and operation["ended_s"] is None)
    raise typer.Exit(0 if reached else 1)


def incidents(
    run: Annotated[str, typer.Argument(help="URL of the controller, or a run folder")] = DEFAULT_RUN,
    as_json: JsonOption = False,
) -> None:
    """Show what went wrong in a run: role, node, last progress, what was decided, and the tracebacks."""
    found = _list(run, "incidents")
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console(soft_wrap=True)
    table = Table(header_style="dim")
    for column in ("at", "fault", "whom", "node", "last progress", "for", "what", "decided"):
        table.add_column(column)
    for item in found:
        lasted = "still" if item["ended_s"] is None else f"{item['ended_s'] - item['at_s']:.1f} s"
        progress = "" if item["last_progress_s"] is None else f"{item['last_progress_s']:.1f} s before"
        table.add_row(
            _clock(item["at_s"]), item["fault"], item["instance"], item["node"][:8], progress, lasted, item["detail"],
            item["decision"],
        )  # fmt: skip
    console.print(table if found else "no incidents")
    for item in found:
        if item["traceback"]:
            console.print(f"\n{item['instance']} at {_clock(item['at_s'])}:\n{item['traceback']}", markup=False)


def operations(
    run: Annotated[str, typer.Argument(help="URL of the controller, or a run folder")] = DEFAULT_RUN,
    as_json: JsonOption = False,
) -> None:
    """Show what the controller did in a run, step by step."""
    found = _list(run, "operations")
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(header_style="dim")
    for column in ("at", "id", "kind", "target", "state", "took", "why", "steps"):
        table.add_column(column)
    for item in found:
        took = "" if item["ended_s"] is None else f"{item['ended_s'] - item['created_s']:.1f} s"
        steps = "; ".join(f"{step['name']} {step['detail']}".strip() for step in item["steps"])
        why = f"{item['cause']} {item['error']}".strip()
        table.add_row(
            _clock(item["created_s"]), item["id"], item["kind"], item["target"], item["state"], took, why, steps
        )
    Console(soft_wrap=True).print(table if found else "no operations")


def _list(run: str, what: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = ask("GET", f"{run_url(run)}/api/v1/{what}")
    except ClusterError as error:
        Console(soft_wrap=True).print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    return found


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))
