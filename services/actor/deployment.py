"""Actor: owns the training backend; its loop runs in a thread that `check_health` watches."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

from ray import serve
from ray.serve.exceptions import RayServeException

from bus.client import BusClient
from bus.errors import BusTimeout, BusUnavailable
from relax.config.sections import ActorArgs
from relax.data.models import ensure_model
from relax.data.source import build_source
from relax.data.tokenizer import Tokenizer
from relax.dump.recorder import RecordingBackend, RecordingCritic
from relax.telemetry.time_split import WORK
from relax.training.build import build_backend, build_critic
from relax.training.warm_start import Example, warm_started_model
from services import names
from services.actor.dumping import StepDumper
from services.actor.loop import TrainingLoop
from services.actor.probe import probe_tokens
from services.runtime import RoleReporter, ServiceUnavailable, call_when_up, limit_threads, run_folder_path

TRANSIENT = (ServiceUnavailable, RayServeException, BusTimeout, BusUnavailable)
"""Another service was away for too long: the next actor goes on from the newest state. Any other error would come
again, and ends the run."""

logger = logging.getLogger("ray.serve")


@serve.deployment(
    max_ongoing_requests=100,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=5,
    graceful_shutdown_wait_loop_s=0.2,
)
class Actor:
    async def __init__(self, args: ActorArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        limit_threads(args.run)
        self.args = args
        self.reporter = RoleReporter(names.ACTOR, names.ACTOR, args.run)
        info = await self.reporter.join(args.actor.model_dump(mode="json"))
        self.bus = await BusClient.connect(
            info.bus, owner=self.reporter.owner, role=names.ACTOR, config=args.run.bus, deadline_s=60.0
        )
        await call_when_up(names.DCS, "begin_publish")
        run_dir = run_folder_path(args.run)
        model = await asyncio.to_thread(ensure_model, args.run.model, run_dir / "model", args.run.seed)
        tokenizer = await asyncio.to_thread(Tokenizer.load, model)
        with self.reporter.time_split.book(WORK):
            start = await asyncio.to_thread(self._warm_start, model, run_dir / "warm_start", tokenizer)
            updates = args.run.steps * args.actor.algorithm.updates_per_step
            backend = await asyncio.to_thread(
                build_backend,
                args.actor,
                start,
                updates,
                args.run.seed,
                args.run.threads,
                trust_remote_code=args.run.model.trust_remote_code,
                run=args.run,
            )
            critic = await asyncio.to_thread(
                build_critic, args.actor, start, updates, trust_remote_code=args.run.model.trust_remote_code
            )
        recorded = RecordingBackend(backend)
        recorded_critic = None if critic is None else RecordingCritic(critic)
        self.training = TrainingLoop(
            args,
            recorded,
            recorded_critic,
            StepDumper(args, run_dir, recorded, recorded_critic, tokenizer, self.reporter),
            self.bus,
            self.reporter,
            asyncio.get_running_loop(),
            probe_tokens(tokenizer, args.run.max_tokens, args.run.seed),
            run_dir / "export",
        )
        self._thread = threading.Thread(target=self._train, name="trainer", daemon=True)
        self._thread.start()

    def _warm_start(self, model: Path, target: Path, tokenizer: Tokenizer) -> Path:
        """The folder to train from: the model's own, or the one after the supervised steps."""
        warm, run = self.args.actor.warm_start, self.args.run
        if warm.steps == 0 or warm.data is None:
            return model
        source = build_source(warm.data, run.seed, tokenizer, run.max_prompt_tokens)
        examples: list[Example] = []
        while len(examples) < min(len(source), warm.steps * warm.batch) and (prompt := source.next()) is not None:
            answer = [*tokenizer.encode(str(prompt.label)), tokenizer.eos_ids[0]]
            examples.append((tokenizer.render(prompt), answer))
        return warm_started_model(self.args.actor, model, target, examples, run.seed, run.threads)

    def _train(self) -> None:
        try:
            self.training.run()
        except BaseException as error:  # the supervisor border of the training thread
            if self.reporter.stopped.is_set():  # what it used is being taken down
                logger.warning("training ended by the stop: %r", error)
                self.reporter.state = "stopped"
                return
            self.reporter.fail(error)
            if not isinstance(error, TRANSIENT):
                self.reporter.end_run(f"training failed: {error}")

    async def check_health(self) -> None:
        self.reporter.check()
