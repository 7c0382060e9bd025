"""Rows and bytes in use, reserved and retained, against their bounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """used + reserved stay within the bounds: a put under a reservation only moves between them.

    Rows that were trained are `retained` until a checkpoint covers them, under a bound of their
    own, so that they cannot starve the producers.
    """

    max_rows: int
    max_bytes: int
    retained_max_bytes: int
    used_rows: int = 0
    used_bytes: int = 0
    reserved_rows: int = 0
    reserved_bytes: int = 0
    retained_rows: int = 0
    retained_bytes: int = 0

    def fits(self, rows: int, nbytes: int) -> bool:
        return (
            self.used_rows + self.reserved_rows + rows <= self.max_rows
            and self.used_bytes + self.reserved_bytes + nbytes <= self.max_bytes
        )

    def reserve(self, rows: int, nbytes: int) -> None:
        self.reserved_rows += rows
        self.reserved_bytes += nbytes

    def use(self, rows: int, nbytes: int) -> None:
        self.used_rows += rows
        self.used_bytes += nbytes

    def retain(self, rows: int, nbytes: int) -> None:
        """Move rows from used to retained (negative: back)."""
        self.use(-rows, -nbytes)
        self.retained_rows += rows
        self.retained_bytes += nbytes

    def free(self, rows: int, nbytes: int, *, retained: bool) -> None:
        """The storage gave up these rows."""
        if retained:
            self.retained_rows -= rows
            self.retained_bytes -= nbytes
        else:
            self.use(-rows, -nbytes)

    @property
    def retained_over(self) -> bool:
        return self.retained_bytes > self.retained_max_bytes
