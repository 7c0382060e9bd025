"""Evaluations of a run: before, after, and during training on instances that hold one version meanwhile.

    DCS pins the newest version ─▶ every evaluator takes it ─▶ prompts of that version ─▶ report ─▶ unpin

Training neither waits for an evaluation nor shares its instances with one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from ray.serve.exceptions import RayServeException

from bus.client import BusClient
from relax.config.roles import EvalConfig
from relax.engines.base import EngineError
from relax.types import PolicyVersion, Prompt
from services import names
from services.controller.api import EvalReport
from services.dcs.api import PublishedVersion
from services.rollout.evaluation import EvalIncomplete, Evaluation
from services.rollout.groups import GroupKeeper
from services.runtime import RoleReporter, ServiceUnavailable, call, call_when_up

logger = logging.getLogger("ray.serve")

EVAL_SEQ = 1 << 40
"""Evaluation groups are numbered from here, so that they never meet a training group's seq."""
HOLD_DEADLINE_S = 120.0


class Validation:
    """`evaluators`: applications that only evaluate; without any the training instances answer."""

    def __init__(
        self,
        config: EvalConfig,
        prompts: Sequence[Prompt],
        evaluators: Sequence[str],
        groups: GroupKeeper,
        bus: BusClient,
        reporter: RoleReporter,
    ):
        self.config, self.prompts, self.evaluators = config, prompts, evaluators
        self.groups, self.bus, self.reporter = groups, bus, reporter
        self._rounds = 0
        self._one = asyncio.Lock()

    async def during(self) -> None:
        """After every `config.every` steps; a round that is due while another runs is left out and counted."""
        done = self.groups.step // self.config.every
        while not self.groups.finished.is_set():
            await self.groups.next_step()
            due = self.groups.step // self.config.every
            if due <= done or self.groups.finished.is_set():
                continue
            self.reporter.count("evaluations_missed", due - done - 1)
            done = due
            try:
                await self.evaluate(f"step {self.groups.step}")
            except (EvalIncomplete, EngineError, ServiceUnavailable, RayServeException) as error:
                self.reporter.count("evaluations_failed")
                self.reporter.facts["evaluation_error"] = str(error)
                logger.error("evaluation failed: %s", error)

    async def evaluate(self, when: str) -> None:
        """One round, reported to the controller. Raises `EvalIncomplete`, and what holding a version raises."""
        if not self.prompts:
            return
        async with self._one:
            held = await self._hold() if self.evaluators else None
            try:
                version = self.groups.admission.version if held is None else PolicyVersion(held.version)
                begin_s = time.time()
                report = await self.groups.link.until_done(lambda: self._answer(when, version))
                self.reporter.trace.add("evaluate", begin_s, time.time(), when=when, version=int(version))
            finally:
                if held is not None:
                    await call(names.DCS, "unpin", held.version)
            self.reporter.tell("report_eval", report)
            await self.reporter.told()
            self.reporter.count("evaluations")

    async def _answer(self, when: str, version: PolicyVersion) -> EvalReport:
        """Each attempt asks under new group ids: what is left of an earlier one is not mixed with it."""
        seq = EVAL_SEQ + self._rounds * len(self.prompts)
        evaluation = Evaluation(when, self.prompts, self._rounds, seq, self.config.samples)
        self._rounds += 1
        self.groups.on_eval, self.groups.on_loss = evaluation.on_event, evaluation.on_loss
        return await evaluation.run(self.bus, version, self.config.deadline_s)

    async def _hold(self) -> PublishedVersion | None:
        pinned: PublishedVersion | None = await call_when_up(names.DCS, "pin_newest")
        while pinned is None:  # the policy's first version is not published yet
            await call_when_up(names.DCS, "wait_newer", -1, 5.0)
            pinned = await call(names.DCS, "pin_newest")
        try:
            await asyncio.gather(
                *(call_when_up(app, "hold", pinned, deadline_s=HOLD_DEADLINE_S) for app in self.evaluators)
            )
        except BaseException:
            await call(names.DCS, "unpin", pinned.version)
            raise
        return pinned
