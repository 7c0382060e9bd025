"""Prompt sources: epochs, order and an exact cursor over rows of any kind.

The cursor names the next prompt as (epoch, position). It moves only in `next`, and a source that
loads it goes on with exactly that prompt, also over an epoch border.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from relax.config.data import FILE_KINDS, DataConfig
from relax.data.difficulty import BandRows
from relax.data.jsonl import JsonlRows
from relax.data.mix import MixSource
from relax.data.own import OwnRows
from relax.data.recorded import Recorded
from relax.data.records import RecordRows
from relax.data.rows import BadRow, RowCheck, Rows, SkipLog, digest_of, stable_seed
from relax.data.tables import TableRows
from relax.data.tokenizer import Tokenizer
from relax.data.toy import ToyRows
from relax.types import DataError, Prompt

STATE_SCHEMA = 1
"""Version of the layout of `state_dict`."""

EVAL_PREFIX = "eval-"
"""Starts the source name of every held-out prompt, so that its group ids differ from the training ones."""

_ORDER_STREAM = 0


class PromptSource(Protocol):
    """Where prompts come from, one after the other."""

    name: str

    def next(self) -> Prompt | None:
        """The next prompt; None when the epochs are used up. Raises `DataError` for a bad row
        (unless rows are skipped) and then stays before that row."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The cursor, as JSON: the next prompt, and which source it belongs to."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved cursor. Raises `DataError` when it belongs to another source."""
        ...

    @property
    def skipped(self) -> int:
        """Rows passed over so far: at the start for a file, along the way for a generated source."""
        ...

    def __len__(self) -> int:
        """Rows of one epoch."""
        ...


def epoch_order(length: int, seed: int, epoch: int) -> list[int]:
    """The permutation of one epoch: a stable argsort of `length` raw 64-bit words of PCG64 seeded with
    SeedSequence([seed mod 2^64, epoch, 0]). NumPy keeps raw bit streams equal over its versions,
    which it does not promise for `Generator.permutation`."""
    bits = np.random.PCG64(np.random.SeedSequence([stable_seed(seed), epoch, _ORDER_STREAM]))
    order: list[int] = np.argsort(bits.random_raw(length), kind="stable").tolist()
    return order


class EpochSource:
    """Walks over rows epoch by epoch, shuffled or in order."""

    def __init__(
        self,
        rows: Rows,
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        check: RowCheck,
        on_bad_row: Literal["fail", "skip"] = "fail",
        skips: SkipLog | None = None,
        rank: Sequence[float] | None = None,
        name: str | None = None,
    ) -> None:
        """rank: of each position; the order within an epoch is by it, ties as `shuffle` says."""
        self.name = name or rows.name
        self._rank = rank
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._check = None if rows.checked else check
        self._on_bad_row = on_bad_row
        self._at_start = skips or SkipLog()
        self._on_the_way = SkipLog()
        self._epoch = 0
        self._position = 0
        self._order: tuple[int, list[int]] | None = None
        self._barren = 0
        self._fingerprint = digest_of({"rows": rows.identity(), "shuffle": shuffle, "seed": stable_seed(seed)})

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def skipped(self) -> int:
        return self._at_start.total + self._on_the_way.total

    @property
    def skip_counts(self) -> dict[str, int]:
        """Skipped rows by kind of fault."""
        counts = dict(self._at_start.counts)
        for kind, count in self._on_the_way.counts.items():
            counts[kind] = counts.get(kind, 0) + count
        return counts

    @property
    def skip_reasons(self) -> list[str]:
        """Full reasons, with the place, of the first skipped rows."""
        return self._at_start.reasons + self._on_the_way.reasons

    def next(self) -> Prompt | None:
        while self._epochs is None or self._epoch < self._epochs:
            row = self._rows.row(self._row_position())
            epoch = self._epoch
            try:
                if self._check is not None:
                    self._check.check(row)
            except BadRow as bad:
                if self._on_bad_row == "fail":
                    raise
                self._skip(bad)
                continue
            self._advance()
            self._barren = 0
            return row.to_prompt(self.name, epoch)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "schema": STATE_SCHEMA,
            "source": self.name,
            "fingerprint": self._fingerprint,
            "epoch": self._epoch,
            "position": self._position,
            "skips": dict(self._on_the_way.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("schema") != STATE_SCHEMA:
            raise DataError(f"cursor of schema {state.get('schema')!r}; this version reads schema {STATE_SCHEMA}")
        if state.get("fingerprint") != self._fingerprint:
            raise DataError(
                f"the saved cursor belongs to source '{state.get('source')}' ({state.get('fingerprint')}), "
                f"not to this '{self.name}' ({self._fingerprint}): the seed, the shuffling, the file's content or "
                "another setting of `data` changed since; restore it, or start a new run"
            )
        epoch, position = state["epoch"], state["position"]
        if not 0 <= position < len(self._rows) or epoch < 0:
            raise DataError(f"the saved cursor is out of range: epoch {epoch}, position {position} of {len(self)}")
        self._epoch, self._position = int(epoch), int(position)
        self._on_the_way = SkipLog()
        self._on_the_way.counts.update(state["skips"])
        self._barren = 0

    def _row_position(self) -> int:
        if not self._shuffle and self._rank is None:
            return self._position
        if self._order is None or self._order[0] != self._epoch:
            self._order = (self._epoch, self._ordered())
        return self._order[1][self._position]

    def _ordered(self) -> list[int]:
        length = len(self._rows)
        order = epoch_order(length, self._seed, self._epoch) if self._shuffle else list(range(length))
        return order if self._rank is None else sorted(order, key=self._rank.__getitem__)

    def _advance(self) -> None:
        # The border is crossed at once, so that a cursor never rests behind the last row of an epoch.
        self._position += 1
        if self._position == len(self._rows):
            self._epoch, self._position = self._epoch + 1, 0

    def _skip(self, bad: BadRow) -> None:
        self._on_the_way.add(bad)
        self._barren += 1
        self._advance()
        # Skips in turn may span two epochs; only as many as a whole epoch, up to its border, prove it empty.
        if self._position == 0 and self._barren >= len(self._rows):
            raise DataError(f"source '{self.name}' has no usable row: {self._barren} skipped in turn; the last: {bad}")


def build_source(
    config: DataConfig, seed: int, tokenizer: Tokenizer, max_prompt_tokens: int, recorded: Recorded | None = None
) -> PromptSource:
    """The source that a `data` section describes. Raises `DataError` for bad settings and bad files.

    A file is read and checked here; generated rows are checked when their turn comes. A relative
    `path` counts from the current folder.
    """
    if config.kind == "mix":
        parts = [build_source(part.data, seed, tokenizer, max_prompt_tokens, recorded) for part in config.sources]
        return MixSource(config.name or "mix", parts, [part.weight for part in config.sources], seed)
    check = RowCheck(tokenizer, max_prompt_tokens, recorded)
    rows = _build_rows(config, seed, check, held_out=False)
    band = BandRows(rows, config.difficulty) if config.difficulty is not None else None
    return EpochSource(
        rows if band is None else band,
        seed=seed,
        shuffle=config.shuffle,
        epochs=config.epochs,
        check=check,
        on_bad_row=config.on_bad_row,
        skips=rows.skips if isinstance(rows, RecordRows) else None,
        rank=None if band is None else band.rank,
        name=config.name,
    )


def build_eval_set(config: DataConfig, seed: int, n: int, tokenizer: Tokenizer, max_prompt_tokens: int) -> list[Prompt]:
    """`n` different held-out prompts, equal for equal arguments. Their source name starts with "eval-".

    For a toy and for reasoning-gym they come from the held-out part of the domain, which training rows never
    ask (see `ToyRows` and `GymRows`, also for domains too small to be split). For a file they are its first
    `n` different usable rows, so `config.path` must name a file of its own. Raises `DataError` when there are
    fewer than `n` different usable prompts.
    """
    if n == 0:
        return []
    generated = config.kind not in FILE_KINDS
    # Room for rows that are skipped: nobody counts on the size of a generated evaluation set.
    sized = config.model_copy(update={"size": 4 * n}) if generated else config
    check = RowCheck(tokenizer, max_prompt_tokens)
    rows = _build_rows(sized, seed, check, held_out=True)
    source = EpochSource(rows, seed=seed, shuffle=False, epochs=1, check=check, on_bad_row=config.on_bad_row)
    source.name = EVAL_PREFIX + rows.name
    prompts: list[Prompt] = []
    seen: set[str] = set()
    while len(prompts) < n and (prompt := source.next()) is not None:
        question = json.dumps([prompt.messages, prompt.text])
        if question not in seen:
            seen.add(question)
            prompts.append(prompt)
    if len(prompts) < n:
        raise DataError(
            f"the evaluation set wants {n} prompts, '{config.path or config.task}' has {len(prompts)} different usable "
            "ones: ask for fewer (rollout.eval.prompts), or take a task with more questions"
        )
    return prompts


def _build_rows(config: DataConfig, seed: int, check: RowCheck, *, held_out: bool) -> Rows:
    common: Any = {"on_bad_row": config.on_bad_row, "system_prompt": config.system_prompt}
    if config.path is not None:
        if config.kind == "own":
            base = Path.cwd()
            return OwnRows(config.path, config.params, seed, check, held_out=held_out, base=base, **common)
        path = Path(config.path)
        if config.kind == "jsonl":
            return JsonlRows(path, check, columns=config.columns, **common)
        kind: Literal["parquet", "dataset"] = "parquet" if config.kind == "parquet" else "dataset"
        return TableRows(kind, path, check, columns=config.columns, split=config.split, **common)
    if config.task is None:
        raise DataError(f"data.kind '{config.kind}' needs data.task")
    if config.kind == "toy":
        return ToyRows(
            config.task, config.params, config.size, seed, system_prompt=config.system_prompt, held_out=held_out
        )
    # Imported here: the package costs a second and a half, which only its own users should pay.
    from relax.data.gym import GymRows

    return GymRows(
        config.task,
        config.params,
        config.size,
        seed,
        chat=check.tokenizer.has_chat_template,
        system_prompt=config.system_prompt,
        held_out=held_out,
    )
