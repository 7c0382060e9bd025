"""Ref: log-probs of the frozen reference policy for accepted samples."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from ray import serve

from bus.client import BusClient
from bus.records import Lease, LeaseRequest, RowPut
from relax.config.file import RefArgs
from relax.data.models import ensure_model
from relax.training.batching import TrainRow, make_batches
from relax.training.reference import ReferenceModel
from relax.types import FloatArray, Purpose, SamplingParams
from relax.weights.store import ReadableVersion
from services import names
from services.consume import consume
from services.dcs.api import PublishedVersion
from services.dcs.deployment import REFERENCE
from services.runtime import RoleReporter, call_when_up, limit_threads, run_folder_path

PUT_DEADLINE_S = 60.0
FIELDS = ("tokens", "loss_mask", "sampling")


@serve.deployment(
    max_ongoing_requests=100,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=5,
    graceful_shutdown_wait_loop_s=0.2,
)
class Ref:
    async def __init__(self, args: RefArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        limit_threads(args.run)
        self.args = args
        self.reporter = RoleReporter(names.REF, names.REF)
        info = await self.reporter.join(args.ref.model_dump(mode="json"))
        self.model: ReferenceModel | None = None
        self.bus = await BusClient.connect(
            info.bus, owner=self.reporter.owner, role=names.REF, config=args.run.bus, deadline_s=60.0
        )
        self.reporter.state = "waiting_weights"
        self.reporter.waiting_for = "policy version 0"
        self.reporter.spawn(self._loop)

    async def check_health(self) -> None:
        self.reporter.check()

    async def _loop(self) -> None:
        with self.reporter.time_split.book("wait_weights_s"):
            self.model = await self._load()
        self.reporter.state, self.reporter.waiting_for = "running", ""
        request = LeaseRequest(
            task="ref",
            fields=FIELDS,
            max_items=self.args.ref.rows_per_lease,
            produces=("ref_logprobs",),
            purposes=(Purpose.TRAIN,),
        )
        await consume(self.bus, request, self.reporter, self._score)
        self.reporter.state, self.reporter.waiting_for = "done", ""

    async def _load(self) -> ReferenceModel:
        """The configured folder, or else policy version 0 as DCS keeps it in the run folder."""
        run = self.args.run
        run_dir = run_folder_path(run)
        if self.args.ref.path is not None:
            return await asyncio.to_thread(self._model_from, Path(self.args.ref.path), None)
        folder = await asyncio.to_thread(ensure_model, run.model, run_dir / "model", run.seed)
        while not (run_dir / REFERENCE).exists():
            published: PublishedVersion | None = await call_when_up(names.DCS, "wait_newer", -1, 5.0)
            if published is not None and not (run_dir / REFERENCE).exists():
                raise RuntimeError(f"version {published.version} is published but {run_dir / REFERENCE} is missing")
        weights = ReadableVersion(run_dir / REFERENCE)
        await asyncio.to_thread(weights.verify)
        return await asyncio.to_thread(self._model_from, folder, weights.tensors())

    def _model_from(self, folder: Path, weights: Iterable[tuple[str, torch.Tensor]] | None) -> ReferenceModel:
        return ReferenceModel(
            folder,
            weights,
            trust_remote_code=self.args.run.model.trust_remote_code,
            share_prompts=self.args.ref.share_prompts,
        )

    async def _score(self, lease: Lease) -> None:
        logprobs = await asyncio.to_thread(self._logprobs, lease)
        puts = [RowPut(row.row_id, row.group_id, {"ref_logprobs": logprobs[row.row_id]}) for row in lease.rows]
        await self.bus.put(puts, lease_id=lease.lease_id, deadline_s=PUT_DEADLINE_S, ack=True)

    def _logprobs(self, lease: Lease) -> dict[str, FloatArray]:
        """Row id -> float32 [T], 0 where not sampled, at the temperature that drew the row."""
        torch.set_num_threads(self.args.run.threads)
        assert self.model is not None
        rows = [
            TrainRow(
                row_id=row.row_id,
                tokens=row.array("tokens"),
                loss_mask=row.array("loss_mask"),
                rollout_logprobs=np.zeros(len(row.array("tokens")), np.float32),
                versions=np.full(len(row.array("tokens")), -1, np.int32),
                temperature=SamplingParams.from_json(row.json("sampling")).temperature,
                advantage=0.0,
            )
            for row in lease.rows
        ]
        result: dict[str, FloatArray] = {}
        for batch in make_batches(rows, self.args.ref.micro_batch_tokens, share_prompts=self.args.ref.share_prompts):
            scores = self.model.logprobs(batch.tokens, batch.loss_mask, batch.temperature).numpy()
            for row_id, line, length in zip(batch.row_ids, scores, batch.attention_mask.sum(1).tolist(), strict=True):
                result[row_id] = np.ascontiguousarray(line[:length])
        return result
