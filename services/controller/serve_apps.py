"""Serve's applications as the controller handles them: what Serve says of them, and making it try one anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from relax.types import RelaxError

NONCE = "RELAX_REDEPLOYED"
"""Environment variable that a redeployment changes: Serve does nothing for a configuration that it knows."""
DEPLOY_FAILED = "DEPLOY_FAILED"


@dataclass(frozen=True, slots=True)
class AppState:
    """`status`: Serve's word. `message`: what it says of a failure."""

    status: str
    message: str


class NotDeclared(RelaxError):
    """Serve has no such application, or it was not made from a file."""


def app_states(deadline_s: float) -> dict[str, AppState]:
    """Of all applications. Blocks. Raises `ray.exceptions.RayError`."""
    found = {}
    for name, app in _details(deadline_s)["applications"].items():
        messages = [str(app.get("message") or "")]
        messages += [str(item.get("message") or "") for item in app.get("deployments", {}).values()]
        found[name] = AppState(str(getattr(app["status"], "value", app["status"])), "; ".join(filter(None, messages)))
    return found


def redeploy(app: str, nonce: str, deadline_s: float) -> None:
    """Have Serve make this declared application anew, with the settings that it has; all others stay as they are.

    Blocks until Serve has taken it. Raises `NotDeclared`, and `ray.exceptions.RayError`.
    """
    controller = _get_global_client()._controller
    configs: dict[str, ServeApplicationSchema] = ray.get(controller.get_app_configs.remote(), timeout=deadline_s)
    if app not in configs:
        raise NotDeclared(f"Serve has no declared application '{app}'")
    environment = dict(configs[app].runtime_env)
    environment["env_vars"] = {**environment.get("env_vars", {}), NONCE: nonce}
    configs[app].runtime_env = environment
    schema = ServeDeploySchema(applications=list(configs.values()))
    ray.get(controller.apply_config.remote(schema), timeout=deadline_s)


def _details(deadline_s: float) -> dict[str, Any]:
    details: dict[str, Any] = ray.get(
        _get_global_client()._controller.get_serve_instance_details.remote(), timeout=deadline_s
    )
    return details


def deployed_at(app: str) -> float:
    """When Serve last took a configuration of this application, Unix seconds; 0 where it has none."""
    found = serve.status().applications.get(app)
    return float(found.last_deployed_time_s) if found is not None else 0.0


def cluster_id() -> str:
    """Of this Ray: another one after each `ray start`."""
    return str(ray._private.worker.global_worker.current_cluster_and_job[0].hex())
