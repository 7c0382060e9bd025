"""The frame that Serve reads: keys, names and import paths.

Strict where Serve is lenient (it accepts unknown deployment keys and wrong deployment names silently), so a file that
passes here deploys as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from relax.config.base import nearest
from relax.config.sections import ROLES, TEACHER_PREFIX

# Keys of Ray Serve 2.60's schema. Repeated here because the configuration package loads without Ray;
# a test compares them with the installed Serve.
TOP_KEYS = frozenset(
    """
    proxy_location http_options grpc_options controller_options logging_config tracing_config applications
    target_capacity
    """.split()
)
APPLICATION_KEYS = frozenset(
    """
    name route_prefix import_path runtime_env host port deployments autoscaling_policy args logging_config
    external_scaler_enabled
    """.split()
)
DEPLOYMENT_KEYS = frozenset(
    """
    name num_replicas max_ongoing_requests max_queued_requests backpressure_config user_config autoscaling_config
    graceful_shutdown_wait_loop_s graceful_shutdown_timeout_s health_check_period_s health_check_timeout_s
    ray_actor_options placement_group_bundles placement_group_strategy placement_group_bundle_label_selector
    max_replicas_per_node logging_config request_router_config gang_scheduling_config deployment_actors
    rolling_update_percentage max_surge_percent
    """.split()
)


def serve_problems(document: dict[str, Any]) -> list[str]:
    problems = _unknown(document, TOP_KEYS, "top level")
    applications = document.get("applications")
    if not isinstance(applications, list) or not applications:
        return [*problems, "'applications' must be a list with the roles"]
    names: list[str] = []
    for application in applications:
        if not isinstance(application, dict):
            problems.append("each entry of 'applications' must be a mapping")
            continue
        name = str(application.get("name"))
        names.append(name)
        problems += _unknown(application, APPLICATION_KEYS, f"application '{name}'")
        role = ROLES.get(name)
        if role is None:
            problems.append(f"unknown application '{name}'{nearest(name, ROLES)}")
            continue
        if application.get("import_path") != role.import_path:
            problems.append(f"application '{name}': import_path must be '{role.import_path}'")
        for deployment in application.get("deployments") or []:
            place = f"deployment of '{name}'"
            problems += _unknown(deployment, DEPLOYMENT_KEYS, place)
            is_teacher = name == "ref" and str(deployment.get("name")).startswith(TEACHER_PREFIX)
            if deployment.get("name") != role.deployment and not is_teacher:
                problems.append(f"{place}: unknown name '{deployment.get('name')}': did you mean '{role.deployment}'?")
            if name not in ("reward", "ref") and deployment.get("num_replicas", 1) != 1:
                problems.append(f"{place}: num_replicas must be 1 (scale rollout by rollout.instances)")
    problems += [f"application '{name}' appears twice" for name in sorted({n for n in names if names.count(n) > 1})]
    required = [name for name in ROLES if name not in ("ref", "reward")]  # the others: see cross_problems
    problems += [f"application '{name}' is missing" for name in required if name not in names]
    return problems


def _unknown(mapping: Any, known: Iterable[str], place: str) -> list[str]:
    if not isinstance(mapping, dict):
        return [f"{place}: expected a mapping"]
    names = set(known)
    return [f"{place}: unknown key '{key}'{nearest(str(key), names)}" for key in mapping if key not in names]
