"""One run is one Serve YAML: each application's `args` are the shared `run` and the role's own section."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from relax.config.base import StrictModel, nearest
from relax.config.cross import cross_problems
from relax.config.run import RunConfig
from relax.config.sections import ROLES, RunFile
from relax.config.serve import serve_problems
from relax.types import RelaxError


class ConfigError(RelaxError, ValueError):
    """The file cannot run; one message per line, each with the place and what to do."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def load_run_file(path: Path, overrides: Iterable[str] = ()) -> RunFile:
    """Read, override (`section.key=value`, value in YAML) and validate. Raises `ConfigError`."""
    document = load_document(path)
    for override in overrides:
        apply_override(document, override)
    return parse_run_file(document, str(path))


def load_document(path: Path) -> dict[str, Any]:
    """As it stands in the file. Raises `ConfigError`."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: not valid YAML: {error}"]) from error
    if not isinstance(document, dict):
        raise ConfigError([f"{path}: expected a mapping with the key 'applications'"])
    return copy.deepcopy(document)  # anchors make the applications share one `run` object


def apply_override(document: dict[str, Any], override: str) -> None:
    """`run.*` goes to every application, `<role>.*` to that role, `serve.*` to the top level."""
    path, separator, text = override.partition("=")
    keys = path.split(".")
    if not separator or len(keys) < 2 or not all(keys):
        raise ConfigError([f"--set {override}: expected section.key=value, e.g. run.steps=50"])
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"--set {override}: the value is not valid YAML: {error}"]) from error
    section = keys[0]
    if section == "serve":
        _set(document, keys[1:], value, override)
        return
    if section != "run" and section not in ROLES:
        raise ConfigError([f"--set {override}: unknown section '{section}'{nearest(section, ['run', *ROLES])}"])
    hit = False
    for application in document.get("applications") or []:
        args = application.get("args")
        if not isinstance(args, dict):
            continue
        if section == "run" or application.get("name") == section:
            application["args"] = args = copy.deepcopy(args)
            _set(args, keys, value, override)
            hit = True
    if not hit:
        raise ConfigError([f"--set {override}: the file has no application '{section}'"])


def _set(node: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError([f"--set {override}: '{key}' is not a mapping"])
        node = child
    node[keys[-1]] = value


def parse_run_file(document: dict[str, Any], where: str) -> RunFile:
    """Validate a loaded document. Raises `ConfigError` with every problem found."""
    problems = [f"{where}: {text}" for text in serve_problems(document)]
    sections: dict[str, StrictModel] = {}
    for application in document.get("applications") or []:
        role = ROLES.get(str(application.get("name"))) if isinstance(application, dict) else None
        if role is None:
            continue
        try:
            sections[role.name] = role.args.model_validate(application.get("args") or {})
        except ValidationError as error:
            problems += [f"{where}: {text}" for text in _describe(error, role.name)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))

    args: dict[str, Any] = dict(sections)
    run: RunConfig = args["actor"].run
    for name, section in args.items():
        if section.run != run:
            differing = [key for key in RunConfig.model_fields if getattr(section.run, key) != getattr(run, key)]
            problems.append(
                f"{where}: application '{name}' has another 'run' than 'actor' (differs in {', '.join(differing)}): "
                "share one mapping by a YAML anchor (run: *run)"
            )
    file = RunFile(
        serve=document,
        run=run,
        controller=args["controller"].controller,
        dcs=args["dcs"].dcs,
        rollout=args["rollout"].rollout,
        reward=args["reward"].reward if "reward" in args else None,
        ref=args["ref"].ref if "ref" in args else None,
        actor=args["actor"].actor,
    )
    problems += [f"{where}: {text}" for text in cross_problems(file)]
    if problems:
        raise ConfigError(problems)
    return file


def _describe(error: ValidationError, role: str) -> list[str]:
    lines = []
    for item in error.errors(include_url=False):
        # The shared `run` is reported once, not once for each application; a section has its role's name.
        place = ".".join(str(part) for part in item["loc"]) or f"args of application '{role}'"
        lines.append(f"{place}: {item['msg'].removeprefix('Value error, ')}")
    return lines
