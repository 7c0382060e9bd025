"""The engine's own parameters: staged, checked, exchanged, digested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from relax.engines.base import EngineError

TensorsDigest = Callable[[Iterable[tuple[str, Tensor]]], str]
"""Digest over (name, tensor) pairs, independent of their order."""


class LiveWeights:
    """Two sets of tensors of equal layout: the live one that forwards read, and a spare one to load into.

    `stage` runs in the caller's thread and touches the spare only. `exchange` swaps the storages of the two
    (no copy, so it takes microseconds and cannot stop half-way) and must run where no forward runs.
    `exchange` again takes it back. A tied parameter has several names and one storage; any one of its names will do.
    """

    def __init__(self, model: nn.Module, digest: TensorsDigest) -> None:
        self._digest = digest
        self._live: list[Tensor] = []
        self._slot_of: dict[str, int] = {}
        self._names: list[list[str]] = []
        seen: dict[int, int] = {}
        persistent = model.state_dict(keep_vars=True)
        for name, tensor in persistent.items():
            slot = seen.setdefault(id(tensor), len(self._live))
            if slot == len(self._live):
                self._live.append(tensor)
                self._names.append([])
            self._slot_of[name] = slot
            self._names[slot].append(name)
        self._spare: list[Tensor] | None = None
        self._published_names = [names[0] for names in self._names]
        self._staged_names: list[str] = []

    def stage(self, tensors: Iterable[tuple[str, Tensor]], expected_digest: str) -> None:
        """Copy every tensor into the spare set and check names, shapes, dtypes and digest.

        Raises `EngineError` naming what is wrong; the live set is untouched then."""
        if self._spare is None:
            self._spare = [torch.empty_like(tensor, requires_grad=False) for tensor in self._live]
        filled: dict[int, str] = {}
        names: list[str] = []
        for name, tensor in tensors:
            slot = self._slot_of.get(name)
            if slot is None:
                raise EngineError(f"weights hold an unknown tensor {name!r}")
            target = self._spare[slot]
            if tensor.shape != target.shape or tensor.dtype != target.dtype:
                raise EngineError(
                    f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"the engine holds {target.dtype} {tuple(target.shape)}"
                )
            if slot not in filled:
                target.copy_(tensor)
            elif not torch.equal(target, tensor.to(target.device)):
                raise EngineError(f"tensors {filled[slot]!r} and {name!r} are tied in the engine but differ")
            filled.setdefault(slot, name)
            names.append(name)
        missing = [self._names[slot][0] for slot in range(len(self._live)) if slot not in filled]
        if missing:
            raise EngineError(f"weights lack {len(missing)} tensor(s): {', '.join(missing[:5])}")
        got = self._digest((name, self._spare[self._slot_of[name]]) for name in names)
        if got != expected_digest:
            raise EngineError(f"weights have digest {got}, not {expected_digest} as published")
        self._staged_names = names

    def exchange(self) -> None:
        """Make the staged set live and the live set the spare."""
        assert self._spare is not None
        for index, live in enumerate(self._live):
            self._spare[index], live.data = live.data, self._spare[index]
        self._published_names, self._staged_names = self._staged_names, self._published_names

    def digest(self) -> str:
        """Of the live set, under the names of the last adoption (before one: each storage once)."""
        return self._digest(self._pairs())

    def checksums(self) -> dict[str, str]:
        return {name: self._digest([(name, tensor)]) for name, tensor in self._pairs()}

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._live[self._slot_of[name]].detach()) for name in self._published_names)
