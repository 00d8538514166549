"""CacheRequest: an inference request whose keys become known in pieces, as its prefill and its decode advance.

The index keeps no list of open requests. It reads a request's record only in calls that name the request, so a request
that is dropped leaves nothing behind. `RequestRecord.keys` is changed under the index's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from kvoffload.errors import ClosedError


class RequestOwner(Protocol):
    """What a `CacheRequest` needs of an index."""

    lock: threading.RLock

    def end_request(self, record: RequestRecord, /) -> bool: ...


class RequestRecord:
    """The index's record of an open request.

    Attributes:
        owner: whose it is, the state of an index.
        tenant: as given.
        keys: all keys given with it so far, in the order in which they came first.
        notes: by number of pool, what that pool's policy remembers of the request; see `Policy.for_request`.
        ended: whether no call may name it any more.
        on_end: is called with its keys when it has ended well, outside the lock.
    """

    __slots__ = ("ended", "keys", "notes", "on_end", "owner", "tenant")

    def __init__(self, owner: object, tenant: str, on_end: Callable[[tuple[bytes, ...]], None]) -> None:
        self.owner = owner
        self.tenant = tenant
        self.on_end = on_end
        self.keys: dict[bytes, None] = {}
        self.notes: dict[int, dict[Any, Any]] = {}
        self.ended = False

    def tenant_of_call(self, tenant: str) -> str:
        """The tenant of a call that names this request and `tenant`.

        Raises:
            ValueError: the call names another tenant than the request's.
        """
        if tenant not in ("", self.tenant):
            raise ValueError(f"tenant must be {self.tenant!r}, that of the request, or left out, got {tenant!r:.80}")
        return self.tenant


class CacheRequest:
    """An open request: a handle for calls that store and load its keys in pieces. Made by `open_request`.

    All keys that calls with `request=` are given belong to the request, in the order in which they come first: what is
    stored, present, declined or loaded. While it is open, no call that names it evicts any of them; if nothing else can
    be evicted, new keys are declined. Calls that do not name it may evict them, unless they are leased or pending.

    As a context manager it ends with the block; after an exception it is closed, and its use is not recorded. A request
    that is dropped without `end` leaves nothing behind. Usable from any thread.

    Attributes:
        tenant: whose quota and priority its keys have.
    """

    def __init__(self, index: RequestOwner, record: RequestRecord) -> None:
        self._index = index
        self._record = record
        self.tenant = record.tenant

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Its keys so far, in their order; a copy."""
        with self._index.lock:
            return tuple(self._record.keys)

    @property
    def ended(self) -> bool:
        """Whether no call may name it any more."""
        return self._record.ended

    def end(self) -> None:
        """Record the use of its keys, as `touch` of all of them does. Idempotent; afterwards no call may name it."""
        if self._index.end_request(self._record):
            self._record.on_end(tuple(self._record.keys))

    def __enter__(self) -> CacheRequest:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.end()
        else:
            self._record.ended = True

    def __repr__(self) -> str:
        return f"CacheRequest({len(self._record.keys)} keys, {'ended' if self.ended else 'open'})"


def record_of(request: CacheRequest, owner: object) -> RequestRecord:
    """The record behind a `request=` argument. Under the lock.

    Raises:
        TypeError: it is no CacheRequest.
        ValueError: it is of another cache.
        ClosedError: it has ended.
    """
    if not isinstance(request, CacheRequest):
        raise TypeError(f"request must be what open_request() returned, got {request!r:.80}")
    record = request._record
    if record.owner is not owner:
        raise ValueError(f"request must be one of this cache, got {request!r:.80} of another one")
    if record.ended:
        raise ClosedError(f"the request of {len(record.keys)} keys has ended: open another one by open_request()")
    return record
