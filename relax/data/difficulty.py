"""Rows by a measured share of right answers: which are asked, and in which order."""

from __future__ import annotations

from relax.config.data import DifficultyConfig
from relax.data.rows import Row, Rows
from relax.types import DataError, Json


class BandRows:
    """The rows of `rows` whose difficulty lies in the band. `rank`: a row's place in the curriculum, low first.

    Raises `DataError` for a row without the number, and when the band leaves nothing.
    """

    checked = True

    def __init__(self, rows: Rows, config: DifficultyConfig) -> None:
        self.name = rows.name
        self._inner = rows
        self._config = config
        shares = [_share(rows.row(position), config.key) for position in range(len(rows))]
        self._kept = [position for position, share in enumerate(shares) if config.low <= share <= config.high]
        if not self._kept:
            raise DataError(
                f"source '{rows.name}': no row has a {config.key} in [{config.low:g}, {config.high:g}]; "
                f"they lie in [{min(shares):g}, {max(shares):g}]"
            )
        self.left_out = len(rows) - len(self._kept)
        sign = {"none": 0.0, "easy_first": -1.0, "hard_first": 1.0}[config.order]
        self.rank = [sign * shares[position] for position in self._kept]

    def __len__(self) -> int:
        return len(self._kept)

    def row(self, position: int) -> Row:
        return self._inner.row(self._kept[position])

    def identity(self) -> dict[str, Json]:
        return {**self._inner.identity(), "difficulty": self._config.model_dump()}


def _share(row: Row, key: str) -> float:
    value = row.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DataError(f"{row.where}: metadata has no share of right answers in '{key}': it is {value!r}")
    return float(value)
