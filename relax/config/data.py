"""Where prompts come from: the section `rollout.data`, and its likes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relax.config.base import StrictModel


class DifficultyConfig(StrictModel):
    """Which rows of a file are asked, and in which order, by a measured share of right answers."""

    key: str = "pass_rate"
    """Number in the row's metadata: the share of right answers, in [0, 1]."""
    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Rows below are left out (too hard)."""
    high: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Rows above are left out (too easy)."""
    order: Literal["none", "easy_first", "hard_first"] = "none"
    """Curriculum: the order within each epoch; rows of one difficulty are shuffled as data.shuffle says."""

    @model_validator(mode="after")
    def _band(self) -> DifficultyConfig:
        if self.low > self.high:
            raise ValueError("data.difficulty.low must not be above data.difficulty.high")
        return self


FILE_KINDS = ("jsonl", "parquet", "dataset")


class DataConfig(StrictModel):
    """Where prompts come from."""

    kind: Literal["toy", "jsonl", "parquet", "dataset", "reasoning_gym", "own", "mix"] = "toy"
    """`toy`: built-in task; `jsonl`, `parquet`: a file; `dataset`: a folder that Hugging Face `datasets` saved;
    `reasoning_gym`: a task of that package by name; `own`: a class by path; `mix`: several of these."""
    name: str | None = None
    """Name of the source, in group ids and for routing; default that of the task or file."""
    task: str | None = None
    """Toy task (reverse, copy, sort) or reasoning-gym task name."""
    path: str | None = None
    """File or folder of records with `prompt` (text) or `messages`, optional `label`, `metadata`, `response`, `chosen`
    and `rejected`; for `own` the class, as `package.module:Class` or `path/to/file.py:Class`."""
    split: str | None = None
    """Split of a `dataset` folder that holds several."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Key of a record -> column or key of the file that holds it, e.g. {prompt: question, label: answer}."""
    size: Annotated[int, Field(ge=1)] = 4096
    """Prompts in one epoch of a generated source."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the task or own class, e.g. {length: 3} for toys, the dataset's settings for reasoning-gym."""
    sources: tuple[MixPart, ...] = ()
    """Parts of a `mix`."""
    difficulty: DifficultyConfig | None = None
    """Filter and curriculum by difficulty, of files and own classes."""
    system_prompt: str | None = None
    """Put before the user's message in chat prompts."""
    shuffle: bool = True
    """Shuffle each epoch by (seed, epoch)."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the data; the run ends when they are used up. None: as many as the steps need."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """A broken or over-long row stops the start with file and line, or is skipped and counted."""

    @model_validator(mode="after")
    def _fields_go_with_kind(self) -> DataConfig:
        for field, kinds in (
            ("path", (*FILE_KINDS, "own")),
            ("task", ("toy", "reasoning_gym")),
            ("sources", ("mix",)),
        ):
            given = bool(getattr(self, field))
            if given != (self.kind in kinds):
                allowed = " and ".join(f"'{kind}'" for kind in kinds)
                raise ValueError(f"data.{field} is required with data.kind {allowed} and illegal with the others")
        if self.split is not None and self.kind != "dataset":
            raise ValueError("data.split goes with data.kind 'dataset'")
        if self.columns and self.kind not in FILE_KINDS:
            raise ValueError("data.columns goes with data.kind 'jsonl', 'parquet' and 'dataset'")
        if self.difficulty is not None and self.kind not in (*FILE_KINDS, "own"):
            raise ValueError("data.difficulty goes with files and own classes: give it to the part of a mix it means")
        return self


class MixPart(StrictModel):
    """One source of a mix."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts, over the sum of all weights."""
    data: DataConfig
    """The source."""


DataConfig.model_rebuild()
