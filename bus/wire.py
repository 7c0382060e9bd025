"""Arguments and answers of the engine as bytes, within a call of Ray.

Ray's pickler asks Python code about every object. For the thousands of records of a batch that costs more than what
the engine does with them; the standard pickler knows them already. Both ends are actors of one Ray, whose own messages
are pickled too: no other socket carries these bytes.
"""

from __future__ import annotations

import pickle
from typing import Any


def pack_call(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpack_call(data: bytes) -> Any:
    return pickle.loads(data)
