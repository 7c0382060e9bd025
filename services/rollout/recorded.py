"""In place of engines: samples that the data holds, put as if they had been drawn."""

from __future__ import annotations

from bus.client import BusClient
from bus.records import Lease, LeaseRequest, RowPut
from relax.data.recorded import Recorded, recorded_trajectory
from relax.data.tokenizer import Tokenizer
from relax.types import PolicyVersion, Prompt, Purpose
from services.consume import consume
from services.rollout.rows import row_put
from services.runtime import RoleReporter

GROUPS_PER_LEASE = 64
PUT_DEADLINE_S = 60.0


class RecordedFeeder:
    """Leases admitted prompts and puts their responses, in the manager's own process."""

    def __init__(self, recorded: Recorded, tokenizer: Tokenizer, bus: BusClient, reporter: RoleReporter):
        self.recorded, self.tokenizer, self.bus, self.reporter = recorded, tokenizer, bus, reporter

    async def run(self) -> None:
        request = LeaseRequest("rollout", ("prompt",), max_items=GROUPS_PER_LEASE, purposes=(Purpose.TRAIN,))
        await consume(self.bus, request, self.reporter, self._handle)

    async def _handle(self, lease: Lease) -> None:
        prompts = {row.group_id: Prompt.from_json(row.json("prompt")) for row in lease.rows}
        rows: list[RowPut] = []
        for group in lease.groups:
            prompt = prompts[group.group_id]
            rendered, responses = self.tokenizer.render(prompt), self.recorded.tokens(prompt, self.tokenizer)
            version = PolicyVersion(group.min_version)
            rows += [row_put(group, k, recorded_trajectory(rendered, responses[k], version)) for k in group.missing]
        await self.bus.put(rows, lease_id=lease.lease_id, deadline_s=PUT_DEADLINE_S)
        self.reporter.count("samples", len(rows))
