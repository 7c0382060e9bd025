"""The rollout manager: prompt source, admission and ledger, judge, evaluation, and the instances."""

from __future__ import annotations

import asyncio
import logging

from ray import serve

from bus.client import BusClient
from bus.records import PROMPTS
from relax.config.file import RolloutArgs, eval_data
from relax.data.models import await_model
from relax.data.source import build_eval_set, build_source
from relax.data.tokenizer import Tokenizer
from relax.types import GroupId, Prompt
from services import names
from services.rollout.evaluation import Evaluation
from services.rollout.groups import GroupKeeper
from services.rollout.instances import InstancePool
from services.rollout.ledger import Ledger
from services.runtime import START_DEADLINE_S, RoleReporter, call, run_folder_path

logger = logging.getLogger("ray.serve")

EVAL_SEQ = 1 << 40
"""Evaluation groups are numbered from here, so that they never meet a training group's seq."""


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
        self.reporter = RoleReporter(names.ROLLOUT, names.ROLLOUT)
        info = await self.reporter.join(args.rollout.model_dump(mode="json"))
        run_dir = run_folder_path(args.run)
        model = await asyncio.to_thread(await_model, args.run.model, run_dir / "model", args.run.seed, START_DEADLINE_S)
        tokenizer = await asyncio.to_thread(Tokenizer.load, model)
        source = await asyncio.to_thread(
            build_source, args.rollout.data, args.run.seed, tokenizer, args.run.max_prompt_tokens
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
        self.groups = GroupKeeper(args, self.ledger, source, self.bus, self.reporter)
        self.instances = InstancePool(args, self.reporter)
        self.reporter.state = "running"
        self.reporter.spawn(self.instances.run)
        self.reporter.spawn(self.groups.event_loop)
        self.reporter.spawn(self.groups.drop_loop)
        self.reporter.spawn(self._main)

    async def check_health(self) -> None:
        self.reporter.check()

    async def _main(self) -> None:
        """Evaluate, train, evaluate, close."""
        await self._evaluate("before", 0)
        await self.groups.readmit_open()
        self.reporter.spawn(self.groups.admit_loop)
        await self.groups.finished.wait()
        await self._evaluate("after", 1)
        await self.bus.close_topic(PROMPTS)
        self.reporter.state, self.reporter.waiting_for = "done", ""

    async def _evaluate(self, when: str, epoch: int) -> None:
        if not self.eval_prompts:
            return
        evaluation = Evaluation(when, self.eval_prompts, epoch, EVAL_SEQ + epoch * len(self.eval_prompts))
        self.groups.on_eval = evaluation.on_event
        self.reporter.waiting_for = f"evaluation '{when}'"
        report = await evaluation.run(self.bus, self.groups.admission.version, self.args.rollout.eval.deadline_s)
        await call(names.CONTROLLER, "report_eval", report)
        self.reporter.count("evaluations")
        self.reporter.waiting_for = ""

    # ------------------------------------------------------------------ what other services call

    async def ledger_position(self) -> dict[str, object]:
        """What a checkpoint records of the ledger: its position, and the source's cursor."""
        position = await asyncio.to_thread(self.ledger.position)
        return {**position, "cursor": await asyncio.to_thread(self.ledger.last_cursor)}

    async def drop_groups(self, group_ids: list[str], reason: str) -> None:
        await self.groups.drop([GroupId(group_id) for group_id in group_ids], reason)

    async def remove_instances(self) -> None:
        """End of the run: every instance application is deleted."""
        await self.instances.remove_all()
        self.reporter.state = "stopped"
