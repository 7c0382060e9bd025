"""Errors of the bus. Each carries one message, so that it survives the wire."""

from __future__ import annotations


class BusError(Exception):
    """Base of every error of the bus."""


class BusTimeout(BusError):
    """No answer within the deadline. Every operation is idempotent: it may be called again."""


class BusUnavailable(BusError):
    """The bus, or one of its processes, is gone. Connect again once it was created anew."""


class StaleEpoch(BusUnavailable):
    """The bus restarted, empty: leases and writes of the epoch before are void."""


class BusFull(BusError):
    """The row or byte budget stayed exhausted until the deadline."""


class GroupTooLarge(BusError):
    """One group, in the worst case, exceeds the whole budget: it could never be leased."""


class LeaseLost(BusError):
    """The lease expired, was revoked, or belongs to somebody else."""


class IncompleteGroup(BusError):
    """A rollout lease was acknowledged while members have neither a row nor a tombstone."""


class IncompleteRow(BusError):
    """A row is acknowledged without what its holder had said to produce."""


class Fenced(BusError):
    """The caller is an old incarnation of its owner."""


class SchemaError(BusError, ValueError):
    """A row breaks the schema: says the row, the field and how."""


class CorruptRow(BusError):
    """A row read back differs from what was written: wrong row id or wrong digest."""


class PutLost(BusError):
    """The plan of a put is gone (expired or committed already): plan the put anew."""


def error_named(name: str, message: str) -> BusError:
    """The error that the engine reported in an answer."""
    kind = globals().get(name)
    return kind(message) if isinstance(kind, type) and issubclass(kind, BusError) else BusError(message)
