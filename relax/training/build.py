"""From a backend's name to a backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from relax.config.actor import ActorConfig
from relax.config.run import RunConfig
from relax.plugins import load_class
from relax.training.base import Critic, TrainingBackend
from relax.types import RelaxError

PROTOCOL = ("logprobs", "step", "state_tensors", "save", "load", "export", "describe", "close")


class BackendError(RelaxError, ValueError):
    """The configured training backend lacks part of the protocol."""


def build_backend(
    config: ActorConfig,
    model_folder: Path,
    total_steps: int,
    seed: int,
    threads: int,
    *,
    trust_remote_code: bool = False,
    base: Path | None = None,
    run: RunConfig | None = None,
) -> TrainingBackend:
    """Build `config.backend`: `torch`, `simulated` (of the cluster in `run`), or a class named as in `relax.plugins`.

    The class is called with these arguments, `base` (the folder that relative files count from) and `run` apart.
    `total_steps` counts the optimizer updates of the whole run, for the schedule. Sets torch's thread count.
    Raises `PluginError` for a class that is not there, `BackendError` for an incomplete one, `ModelError`
    for a broken model folder.
    """
    if config.backend == "simulated" and run is not None:
        from relax.training.simulated import SimulatedBackend

        return SimulatedBackend(run)
    build = _backend_class(config.backend, base)
    return build(config, model_folder, total_steps, seed, threads, trust_remote_code=trust_remote_code)


def build_critic(
    config: ActorConfig,
    model_folder: Path,
    total_steps: int,
    *,
    trust_remote_code: bool = False,
    base: Path | None = None,
) -> Critic | None:
    """The critic that `config.critic` asks for, from its own model folder or the policy's; None without one."""
    if config.critic is None:
        return None
    from relax.training.critic import TorchCritic

    path = config.critic.path
    folder = model_folder if path is None else (base or Path()) / Path(path).expanduser()
    return TorchCritic(config.critic, config, folder, total_steps, trust_remote_code=trust_remote_code)


def _backend_class(name: str, base: Path | None) -> Callable[..., TrainingBackend]:
    if name == "torch":
        from relax.training.torch_backend import TorchBackend

        return TorchBackend
    found = load_class(name, base)
    missing = [method for method in PROTOCOL if not callable(getattr(found, method, None))]
    if missing:
        raise BackendError(f"training backend '{name}' lacks {', '.join(missing)} (see relax.training.base)")
    return cast("Callable[..., TrainingBackend]", found)
