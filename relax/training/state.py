"""What a trainer needs to go on, as named tensors and a few facts; and its form in a folder.

    state.safetensors    every tensor, in the safetensors format (https://github.com/huggingface/safetensors)
    state.json           the facts

The layout of the file follows from names, dtypes and shapes alone, so a file in memory can be overwritten in place
each step by copies of the tensors (`relax.checkpoint.snapshot`), and is then a file like any other.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from relax.checkpoint.manifest import FACTS, TENSORS
from relax.types import Json, ModelError

POLICY, CRITIC = "policy", "critic"
"""Parts of the state of an actor."""

_NAMES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGN = 8


@dataclass(frozen=True, slots=True)
class TrainerState:
    """`tensors` are the live ones, on their device: copy before the next step. Their names, dtypes and shapes stay the
    same over a trainer's life. `facts` are small and change each step."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Json]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def join_states(parts: Mapping[str, TrainerState]) -> TrainerState:
    """Several trainers' states as one, each under its name."""
    tensors = {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.tensors.items()}
    return TrainerState(tensors, {part: dict(state.facts) for part, state in parts.items()})


def part_of(state: TrainerState, part: str) -> TrainerState:
    """What `join_states` was given under this name. Raises `ModelError` if nothing was."""
    if part not in state.facts:
        raise ModelError(f"the state has no part {part!r}, but {', '.join(map(repr, state.facts)) or 'none'}")
    tensors = {name.split(".", 1)[1]: t for name, t in state.tensors.items() if name.split(".", 1)[0] == part}
    return TrainerState(tensors, state.facts[part])


class Place(NamedTuple):
    """Where a tensor lies in the file."""

    name: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The file that holds a state: its head, and a place for each tensor."""

    head: bytes
    places: tuple[Place, ...]
    n_bytes: int

    @classmethod
    def of(cls, state: TrainerState) -> StateLayout:
        entries: dict[str, Json] = {}
        places: list[tuple[str, int, torch.dtype, tuple[int, ...]]] = []
        end = 0
        # The format wants no gaps: tensors whose elements are larger come first, and so all are aligned.
        for name, tensor in sorted(state.tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
            shape = tuple(tensor.shape)
            begin, end = end, end + tensor.element_size() * math.prod(shape)
            entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
            places.append((name, begin, tensor.dtype, shape))
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGN)
        head = struct.pack("<Q", len(text)) + text
        return cls(
            head,
            tuple(Place(name, len(head) + begin, dtype, shape) for name, begin, dtype, shape in places),
            len(head) + end,
        )

    def views(self, file: Tensor) -> dict[str, Tensor]:
        """The tensors of a file in memory, uint8 [n_bytes], as views of it."""
        out = {}
        for place in self.places:
            size = place.dtype.itemsize * math.prod(place.shape)
            out[place.name] = file[place.begin : place.begin + size].view(place.dtype).view(place.shape)
        return out


def write_state(state: TrainerState, folder: Path) -> None:
    """Into an existing folder. Whatever the disk refuses passes through as `OSError`."""
    layout = StateLayout.of(state)
    with open(folder / TENSORS, "wb") as file:
        file.write(layout.head)
        for place in layout.places:
            tensor = state.tensors[place.name].detach().cpu().contiguous()
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
    write_facts(state.facts, folder)


def write_facts(facts: Mapping[str, Json], folder: Path) -> None:
    (folder / FACTS).write_text(json.dumps(dict(facts)))


def read_state(folder: Path) -> TrainerState:
    """Raises `ModelError` when the folder holds no state."""
    try:
        return TrainerState(load_file(folder / TENSORS), json.loads((folder / FACTS).read_text()))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{folder} holds no state of a trainer: {error}") from error


def check_tensors(saved: TrainerState, own: TrainerState, where: str) -> None:
    """Raises `ModelError` that names tensors which differ in name, dtype or shape."""
    kinds = [{name: (t.dtype, tuple(t.shape)) for name, t in state.tensors.items()} for state in (saved, own)]
    if kinds[0] != kinds[1]:
        differing = sorted(dict(kinds[0].items() ^ kinds[1].items()))
        raise ModelError(f"{where}: tensors differ from the model's: {', '.join(differing[:8])}")
