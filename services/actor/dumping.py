"""Records the steps that `actor.dump` names: the models before the step, then its rows once it has committed."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bus.records import Lease, Row
from relax.config.sections import ActorArgs
from relax.data.tokenizer import Tokenizer
from relax.dump.compare import WEIGHTS_AFTER, WEIGHTS_BEFORE
from relax.dump.files import CRITIC, DUMPS, MODEL, STATE, publish, staging_folder
from relax.dump.provenance import provenance
from relax.dump.record import BY_NAME, RowDump, StepDump
from relax.dump.recorder import Recorder, RecordingBackend, RecordingCritic, result_numbers, with_computed
from relax.rollout.conversation import RESPONSE
from relax.telemetry.run_folder import RunFolder
from relax.training.step import StepOutcome
from relax.types import PolicyVersion, RelaxError
from relax.weights.digest import tensors_digest
from services.runtime import RoleReporter

logger = logging.getLogger("ray.serve")

EXTRA_FIELDS = ("prompt", "finish_reason", "metadata")
REWARD_FIELDS = ("reward_parts", "reward_state")
"""What a dump holds of a row beside what training reads."""


class StepDumper:
    """Called by the training thread: `begin`, `add` for each lease, then `finish` or `discard`.

    A dump that cannot be written is counted and told, and training goes on (B47).
    """

    def __init__(
        self,
        args: ActorArgs,
        run_dir: Path,
        backend: RecordingBackend,
        critic: RecordingCritic | None,
        tokenizer: Tokenizer,
        reporter: RoleReporter,
    ) -> None:
        self._args, self._run_dir, self._dumps = args, run_dir, run_dir / DUMPS
        self._backend, self._critic, self._tokenizer, self._reporter = backend, critic, tokenizer, reporter
        self._borders = frozenset(args.actor.dump.at)
        self._open: _OpenDump | None = None

    def begin(self, step: int) -> tuple[str, ...]:
        """Save the models before committed step number `step`, if it is to be recorded. Returns the fields that its
        leases must bring beside those that training reads."""
        self.discard()
        config = self._args.actor.dump
        if not config.wants(step):
            return ()
        try:
            staging = staging_folder(self._dumps, step)
            self._open = _OpenDump(step, staging, Recorder())
            if "weights" in self._borders:
                self._save_models(staging)
                self._open.digests[WEIGHTS_BEFORE] = tensors_digest(self._backend.state_tensors())
        except (OSError, RelaxError) as error:
            self._failed(step, error)
            return ()
        self._watch(self._open.recorder)
        return (*EXTRA_FIELDS, *(REWARD_FIELDS if self._args.run.generates else ()))

    def add(self, lease: Lease) -> None:
        if self._open is not None:
            for row in lease.rows:
                self._open.rows[row.row_id] = RowDump(row.row_id, self._open.portions, self._values(row))
            self._open.portions += 1

    def finish(self, outcome: StepOutcome, version: PolicyVersion) -> None:
        """Write the committed step; `version`: of the policy that was trained."""
        if self._open is None:
            return
        self._watch(None)
        opened = self._open
        try:
            if "weights" in self._borders:
                opened.digests[WEIGHTS_AFTER] = tensors_digest(self._backend.state_tensors())
            rows = with_computed(opened.rows, opened.recorder)
            dump = StepDump(
                step=opened.step,
                version=int(version),
                rows={row_id: self._wanted(row) for row_id, row in rows.items()},
                updates=tuple(opened.recorder.updates),
                result=result_numbers(outcome.result),
                digests=opened.digests,
                config=RunFolder(self._run_dir).read_config(),
                code=dict(provenance()),
            )
            publish(dump, opened.staging, self._dumps)
            self._open = None
            self._reporter.count("steps_dumped")
        except (OSError, RelaxError) as error:
            self._failed(opened.step, error)

    def discard(self) -> None:
        """Of a step that did not commit nothing stays."""
        self._watch(None)
        if self._open is not None:
            shutil.rmtree(self._open.staging, ignore_errors=True)
            self._open = None

    def _save_models(self, staging: Path) -> None:
        self._backend.export(staging / MODEL)
        (staging / STATE).mkdir()
        self._backend.save(staging / STATE)
        if self._critic is not None:
            (staging / CRITIC).mkdir()
            self._critic.save(staging / CRITIC)

    def _values(self, row: Row) -> dict[str, Any]:
        mask = row.array("loss_mask")
        tokens = row.array("tokens")
        start = int(mask.argmax())
        values = {name: row.fields[name] for name in row.fields if name in BY_NAME}
        said = row.json("metadata").get(RESPONSE)
        return {
            **{name: float(value) if BY_NAME[name].kind == "number" else value for name, value in values.items()},
            "prompt_text": self._tokenizer.decode(tokens[:start], skip_special=False),
            "response_text": str(said) if said is not None else self._tokenizer.decode(tokens[mask]),
        }

    def _wanted(self, row: RowDump) -> RowDump:
        kept: Mapping[str, Any] = {
            name: value for name, value in row.values.items() if BY_NAME[name].border in self._borders
        }
        return RowDump(row.row_id, row.portion, kept)

    def _watch(self, recorder: Recorder | None) -> None:
        self._backend.recorder = recorder
        if self._critic is not None:
            self._critic.recorder = recorder

    def _failed(self, step: int, error: Exception) -> None:
        self.discard()
        self._reporter.count("dumps_failed")
        self._reporter.facts["dump_error"] = f"step {step} in {self._dumps}: {error}"
        logger.error("dump of step %d in %s failed: %s", step, self._dumps, error)


class _OpenDump:
    """What is known of a step that has not committed."""

    def __init__(self, step: int, staging: Path, recorder: Recorder) -> None:
        self.step, self.staging, self.recorder = step, staging, recorder
        self.rows: dict[str, RowDump] = {}
        self.portions = 0
        self.digests: dict[str, str] = {}
