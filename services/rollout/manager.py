"""The rollout manager: prompt source, admission and ledger, judge, evaluation, and the instances."""

from __future__ import annotations

import asyncio
import logging

from ray import serve

from bus.client import BusClient
from bus.records import PROMPTS
from relax.config.cross import eval_data
from relax.config.sections import RolloutArgs
from relax.data.models import await_model
from relax.data.recorded import recorded_of
from relax.data.source import build_eval_set, build_source
from relax.data.tokenizer import Tokenizer
from relax.types import GroupId, PolicyVersion, Prompt
from services import names
from services.rollout.api import ActorState
from services.rollout.groups import GroupKeeper
from services.rollout.instances import InstancePool
from services.rollout.ledger import Ledger
from services.rollout.recorded import RecordedFeeder
from services.rollout.validation import Validation
from services.runtime import START_DEADLINE_S, RoleReporter, call, run_folder_path

logger = logging.getLogger("ray.serve")


async def renew_bus(epoch: str, reason: str) -> None:
    await call(names.CONTROLLER, "renew_bus", epoch, reason)


@serve.deployment(
    max_ongoing_requests=100,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=5,
    graceful_shutdown_wait_loop_s=0.2,
)
class RolloutManager:
    async def __init__(self, args: RolloutArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        self.args = args
        self.reporter = RoleReporter(names.ROLLOUT, names.ROLLOUT, args.run)
        info = await self.reporter.join(args.rollout.model_dump(mode="json"))
        run_dir = run_folder_path(args.run)
        model = await asyncio.to_thread(await_model, args.run.model, run_dir / "model", args.run.seed, START_DEADLINE_S)
        tokenizer = await asyncio.to_thread(Tokenizer.load, model)
        recorded = recorded_of(args.run)
        source = await asyncio.to_thread(
            build_source, args.rollout.data, args.run.seed, tokenizer, args.run.max_prompt_tokens, recorded
        )
        self.eval_prompts: list[Prompt] = []
        if args.rollout.eval.prompts:
            self.eval_prompts = await asyncio.to_thread(
                build_eval_set,
                eval_data(args.rollout),
                args.rollout.eval.seed,
                args.rollout.eval.prompts,
                tokenizer,
                args.run.max_prompt_tokens,
            )
        self.ledger = await asyncio.to_thread(Ledger, run_dir / "ledger.sqlite")
        self.bus = await BusClient.connect(
            info.bus, owner=self.reporter.owner, role=names.ROLLOUT, config=args.run.bus, deadline_s=60.0
        )
        self.groups = GroupKeeper(args, self.ledger, source, self.bus, self.reporter, renew_bus)
        self.instances = InstancePool(args, self.reporter)
        self.validation = Validation(
            args.rollout.eval, self.eval_prompts, self.instances.evaluators, self.groups, self.bus, self.reporter
        )
        self._evaluated = info.evaluated
        self.reporter.state = "running"
        if recorded is None:
            self.reporter.spawn(self.instances.run)
        else:
            self.reporter.spawn(RecordedFeeder(recorded, tokenizer, self.bus, self.reporter).run)
        self.reporter.spawn(self.groups.event_loop)
        self.reporter.spawn(self.groups.drop_loop)
        self.reporter.spawn(self._main)

    async def check_health(self) -> None:
        self.reporter.check()

    async def _main(self) -> None:
        """Evaluate, train, evaluate, close."""
        await self.groups.take_up()
        if "before" not in self._evaluated:  # an earlier part of the run has made it
            await self._evaluate("before")
        self.reporter.spawn(self.groups.admit_loop)
        if self.args.rollout.eval.every:
            self.reporter.spawn(self.validation.during)
        evaluated: PolicyVersion | None = None
        while True:
            await self.groups.finished.wait()
            if evaluated != self.groups.admission.version:
                evaluated = self.groups.admission.version
                await self._evaluate("after")
            if self.groups.finished.is_set():
                await self.groups.close(PROMPTS)
                self.reporter.state, self.reporter.waiting_for = "done", ""
            await self.groups.reopened.wait()  # an actor that died with its last steps trains them again
            self.reporter.state = "running"

    async def _evaluate(self, when: str) -> None:
        self.reporter.waiting_for = f"evaluation '{when}'"
        await self.validation.evaluate(when)
        self.reporter.waiting_for = ""

    # ------------------------------------------------------------------ what other services call

    async def ledger_position(self) -> dict[str, object]:
        """What a checkpoint records of the ledger: its position, and the source's cursor."""
        position = await asyncio.to_thread(self.ledger.position)
        return {**position, "cursor": await asyncio.to_thread(self.ledger.last_cursor)}

    async def go_on_from(self, actor: ActorState) -> int:
        """See `GroupKeeper.go_on_from`."""
        return int(await self.groups.go_on_from(actor))

    async def trained_through(self) -> int:
        """The newest step whose groups the ledger has as trained."""
        return await asyncio.to_thread(lambda: self.ledger.trained_through)

    async def drop_groups(self, group_ids: list[str], reason: str) -> None:
        await self.groups.drop([GroupId(group_id) for group_id in group_ids], reason)

    async def remove_instances(self) -> None:
        """End of the run: every instance application is deleted."""
        await self.instances.remove_all()
        self.reporter.state = "stopped"
