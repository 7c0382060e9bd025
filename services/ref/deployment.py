"""Ref: log-probs of accepted samples under the frozen reference policy, and under teachers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import torch
from ray import serve
from ray.serve.handle import DeploymentHandle

from bus.client import BusClient
from bus.records import TEACHER_TASK
from relax.config.sections import TEACHER_PREFIX, RefArgs
from relax.data.models import await_model, ensure_model
from relax.data.tokenizer import Tokenizer, check_same_vocabulary
from relax.telemetry.time_split import WAIT_WEIGHTS, WORK
from relax.training.reference import ReferenceModel
from relax.weights.store import ReadableVersion
from services import names
from services.dcs.api import PublishedVersion
from services.dcs.deployment import REFERENCE
from services.ref.scoring import Scoring
from services.runtime import START_DEADLINE_S, RoleReporter, call_when_up, limit_threads, run_folder_path


def _model(args: RefArgs, folder: Path, weights: Iterable[tuple[str, torch.Tensor]] | None) -> ReferenceModel:
    return ReferenceModel(
        folder,
        weights,
        trust_remote_code=args.run.model.trust_remote_code,
        share_prompts=args.ref.share_prompts,
    )


@serve.deployment(
    max_ongoing_requests=100,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=5,
    graceful_shutdown_wait_loop_s=0.2,
)
class Teacher:
    """One teacher: scores the rows that are routed to it."""

    async def __init__(self, args: RefArgs, name: str) -> None:  # type: ignore[misc]  # Serve awaits it
        limit_threads(args.run)
        self.args, self.name = args, name
        instance = f"{TEACHER_PREFIX}{name}"
        self.reporter = RoleReporter(names.TEACHER, instance, args.run)
        info = await self.reporter.join(args.ref.model_dump(mode="json"))
        self.bus = await BusClient.connect(
            info.bus, owner=self.reporter.owner, role=names.TEACHER, config=args.run.bus, deadline_s=60.0
        )
        self.reporter.spawn(self._loop)

    async def check_health(self) -> None:
        self.reporter.check()

    async def _loop(self) -> None:
        with self.reporter.time_split.book(WORK):
            model = await asyncio.to_thread(self._load)
        self.reporter.state = "running"
        scoring = Scoring(self.args, model, TEACHER_TASK + self.name, "teacher_logprobs", self.args.run.teacher_top_k)
        await scoring.run(self.bus, self.reporter)

    def _load(self) -> ReferenceModel:
        """Raises `ModelError` for a teacher whose tokens are not the policy's."""
        run = self.args.run
        policy = await_model(run.model, run_folder_path(run) / "model", run.seed, START_DEADLINE_S)
        folder = Path(self.args.ref.teachers[self.name].path)
        check_same_vocabulary(Tokenizer.load(policy), Tokenizer.load(folder))
        return _model(self.args, folder, None)


@serve.deployment(
    max_ongoing_requests=100,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=5,
    graceful_shutdown_wait_loop_s=0.2,
)
class Ref:
    """The reference policy. `teachers` are deployments of the same application, held so that Serve makes them."""

    async def __init__(self, args: RefArgs, *teachers: DeploymentHandle) -> None:  # type: ignore[misc]
        limit_threads(args.run)
        self.args, self.teachers = args, teachers
        self.reporter = RoleReporter(names.REF, names.REF, args.run)
        info = await self.reporter.join(args.ref.model_dump(mode="json"))
        self.bus = await BusClient.connect(
            info.bus, owner=self.reporter.owner, role=names.REF, config=args.run.bus, deadline_s=60.0
        )
        if not args.ref.reference:
            self.reporter.state = "done"
            return
        self.reporter.state = "waiting_weights"
        self.reporter.waiting_for = "policy version 0"
        self.reporter.spawn(self._loop)

    async def check_health(self) -> None:
        self.reporter.check()

    async def _loop(self) -> None:
        with self.reporter.time_split.book(WORK):
            model = await self._load()
        self.reporter.state, self.reporter.waiting_for = "running", ""
        await Scoring(self.args, model, "ref", "ref_logprobs").run(self.bus, self.reporter)

    async def _load(self) -> ReferenceModel:
        """The configured folder, or else policy version 0 as DCS keeps it in the run folder."""
        run = self.args.run
        run_dir = run_folder_path(run)
        if self.args.ref.path is not None:
            return await asyncio.to_thread(_model, self.args, Path(self.args.ref.path), None)
        folder = await asyncio.to_thread(ensure_model, run.model, run_dir / "model", run.seed)
        while not (run_dir / REFERENCE).exists():
            with self.reporter.time_split.book(WAIT_WEIGHTS):
                published: PublishedVersion | None = await call_when_up(names.DCS, "wait_newer", -1, 5.0)
            if published is not None and not (run_dir / REFERENCE).exists():
                raise RuntimeError(f"version {published.version} is published but {run_dir / REFERENCE} is missing")
        weights = ReadableVersion(run_dir / REFERENCE)
        await asyncio.to_thread(weights.verify)
        return await asyncio.to_thread(_model, self.args, folder, weights.tensors())
