"""Log-probs of leased rows under one frozen model: what the reference and each teacher do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bus.client import BusClient
from bus.records import Lease, LeaseRequest, Row, RowPut
from relax.config.sections import RefArgs
from relax.training.batching import TrainRow, make_batches
from relax.training.reference import ReferenceModel
from relax.types import Purpose, SamplingParams
from services.consume import consume
from services.runtime import RoleReporter

PUT_DEADLINE_S = 60.0
FIELDS = ("tokens", "loss_mask", "sampling")
RowFields = Mapping[str, "np.ndarray[Any, np.dtype[Any]]"]


@dataclass(frozen=True, slots=True)
class Scoring:
    """`task`: whose rows; `column`: where their log-probs go; `top_k` > 0: the likeliest tokens too
    (`teacher_topk_ids`, `teacher_topk_logprobs`)."""

    args: RefArgs
    model: ReferenceModel
    task: str
    column: str
    top_k: int = 0

    async def run(self, bus: BusClient, reporter: RoleReporter) -> None:
        """Until the bus closes the task or the run stops."""
        request = LeaseRequest(
            task=self.task,
            fields=FIELDS,
            max_items=self.args.ref.rows_per_lease,
            produces=(self.column,),
            purposes=(Purpose.TRAIN,),
        )

        async def handle(lease: Lease) -> None:
            begin_s = time.time()
            fields = await asyncio.to_thread(self.score, lease.rows)
            reporter.trace.add(self.task, begin_s, time.time(), ((row.group_id, row.k) for row in lease.rows))
            puts = [RowPut(row.row_id, row.group_id, dict(fields[row.row_id])) for row in lease.rows]
            await bus.put(puts, lease_id=lease.lease_id, deadline_s=PUT_DEADLINE_S, ack=True)

        async def on_closed(closed: bool) -> None:
            reporter.state = "done" if closed else "running"

        await consume(bus, request, reporter, handle, on_closed)

    def score(self, leased: Sequence[Row]) -> dict[str, RowFields]:
        """Row id -> its fields, [T] or [T, K]: 0 where not sampled, at the temperature that drew the row."""
        torch.set_num_threads(self.args.run.threads)
        rows = [
            TrainRow(
                row_id=row.row_id,
                tokens=row.array("tokens"),
                loss_mask=row.array("loss_mask"),
                rollout_logprobs=np.zeros(len(row.array("tokens")), np.float32),
                versions=np.full(len(row.array("tokens")), -1, np.int32),
                temperature=SamplingParams.from_json(row.json("sampling")).temperature,
            )
            for row in leased
        ]
        result: dict[str, RowFields] = {}
        # Which rows come together is chance, and the sums of a padded batch are not those of a row alone.
        together = [[row] for row in rows] if self.args.run.deterministic else [rows]
        budget, share = self.args.ref.micro_batch_tokens, self.args.ref.share_prompts
        for batch in (batch for some in together for batch in make_batches(some, budget, share_prompts=share)):
            columns = self._columns(batch.tokens, batch.loss_mask, batch.temperature)
            for index, length in enumerate(batch.attention_mask.sum(1).tolist()):
                result[batch.row_ids[index]] = {
                    name: np.ascontiguousarray(column[index, :length]) for name, column in columns.items()
                }
        return result

    def _columns(self, tokens: torch.Tensor, wanted: torch.Tensor, temperature: torch.Tensor) -> RowFields:
        if not self.top_k:
            return {self.column: self.model.logprobs(tokens, wanted, temperature).numpy()}
        logprobs, ids, tops = self.model.top(tokens, wanted, temperature, self.top_k)
        return {
            self.column: logprobs.numpy(),
            "teacher_topk_ids": ids.to(torch.int32).numpy(),
            "teacher_topk_logprobs": tops.numpy(),
        }
