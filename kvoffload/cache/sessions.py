"""Sessions: which requests belong together, and what their programs have told the cache about what comes next.

A session's keys are in one of three pools, which give way in this order (see `Pools.beside`):

    released   the session has ended                 hint("release")
    ordinary   what the cache's policy orders
    retained   the session has promised to come back hint("retain"), until it comes, or its time is over

Promises are trusted as far as earlier ones of the session were kept: a session that breaks them retains nothing, and
nobody else's keys make room for it. The first promise of a session retains nothing either; it is only watched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from kvoffload.cache.policies.promised import Promise, Promised, place_of
from kvoffload.cache.pools import Pool, RequestRecord

if TYPE_CHECKING:
    from kvoffload.cache.state import CacheState

Action: TypeAlias = Literal["retain", "release", "demote", "prefetch"]
Outcome: TypeAlias = Literal["accepted", "clipped", "declined"]
ACTIONS: tuple[Action, ...] = get_args(Action)

_UNTRUSTED = "the session has to keep a promise first: come back within ttl"
_SHARED = "others use the rest, too"

LONGEST_TTL = 86_400.0  # seconds
TENANT_SHARE = 1 / 2  # of the entries, for the promises of one tenant, where there are several
_MOST_CHAINS = 8  # requests of a session that are remembered: those that no later one has continued
_FEWEST_SESSIONS = 1_024
_FADING = 0.75  # what a promise weighs after another one
_TRUST = 2  # blocks that may be retained for each that was promised before, and asked for in time


class HintAnswer(NamedTuple):
    """What became of a hint.

    Attributes:
        action: of the hint.
        outcome: "accepted"; "clipped": in part, see `reason`; "declined": nothing was done.
        blocks: keys concerned: retained, released, to be written, or asked for.
        reason: why it was clipped or declined; else "".
    """

    action: Action
    outcome: Outcome
    blocks: int
    reason: str = ""


class Hint(NamedTuple):
    """See `KeyCache.hint`."""

    action: Action
    session: str
    tenant: str
    ttl: float
    due: float | None

    def done(self, blocks: int, limit: str = "") -> HintAnswer:
        if not blocks and limit:
            return self.declined(limit)
        return HintAnswer(self.action, "clipped" if limit else "accepted", blocks, limit)

    def declined(self, reason: str) -> HintAnswer:
        return HintAnswer(self.action, "declined", 0, reason)


class Chain:
    """The keys of a session's request that no later one has continued."""

    __slots__ = ("keys", "promise", "until")

    def __init__(self, keys: list[bytes], promise: Promise | None = None) -> None:
        self.keys = keys
        self.promise = promise
        self.until = 0.0  # when the promise ends

    def continued_by(self, keys: list[bytes]) -> bool:
        """Whether another request begins with nearly all of these keys: it goes on where this one ended. Others are
        branches: an agent asks for a title, or starts others, and comes back to this one.
        """
        most = len(self.keys) - max(1, len(self.keys) // 10)
        return keys[:most] == self.keys[:most]


class Session:
    """What is known of a session.

    Attributes:
        chains: the latest last.
        kept, broken: blocks promised before, which weigh less with every promise.
        watched: blocks of the latest promise while it is open, else 0; it ends at `until`.
        request: the latest open request.
    """

    __slots__ = ("broken", "chains", "kept", "request", "tenant", "until", "watched")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.chains: list[Chain] = []
        self.kept = self.broken = 0.0
        self.watched = 0
        self.until = 0.0
        self.request: RequestRecord | None = None

    @property
    def allowance(self) -> int:
        """The blocks that it may retain."""
        return max(0, int(_TRUST * (self.kept - self.broken)))

    def settle(self, kept: bool) -> None:
        """Its latest promise was kept, or broken."""
        if not self.watched:
            return
        self.kept, self.broken = _FADING * self.kept, _FADING * self.broken
        if kept:
            self.kept += self.watched
        else:
            self.broken += self.watched
        self.watched = 0


class Sessions:
    """All sessions of a cache. Every call is made under the cache's lock, with the cache's state.

    Memory: at most as many sessions, and twice as many keys in chains, as the cache has entries (at least 1,024
    sessions); the session that was not heard of longest is forgotten first.

    Args:
        clock: returns seconds.
    """

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._most = max(_FEWEST_SESSIONS, capacity)
        self.clock = clock
        self._all: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._known = 0  # keys in chains
        self._owner: dict[bytes, Session | None] = {}  # who stored a key, if nobody else has used it; None: others have
        self._ends: list[tuple[float, int, Session, Chain]] = []  # when promises end
        self._number = 0

    def __len__(self) -> int:
        return len(self._all)

    # requests -----------------------------------------------------------------------------------------------------

    def open(self, state: CacheState, name: str, tenant: str, record: RequestRecord) -> None:
        """A request of a session begins: it has come back."""
        session = self._of(name, tenant)
        if session is None:
            session = self._all[tenant, name] = Session(tenant)
            while len(self._all) > self._most:
                self._forget(self._all.popitem(last=False)[1])
        self.advance(state)
        session.settle(kept=True)
        session.request = record
        record.session = session

    def _of(self, name: str, tenant: str) -> Session | None:
        session = self._all.get((tenant, name))
        if session is not None:
            self._all.move_to_end((tenant, name))
        return session

    def ended(self, state: CacheState, record: RequestRecord) -> None:
        """A request of a session has ended: its keys take the place of those of the request that it continues."""
        session = record.session
        assert session is not None
        keys, owner = list(record.keys), self._owner
        for key in keys:
            if key not in owner and key in record.stored:
                owner[key] = session
            elif owner.get(key) is not session:
                owner[key] = None
        if len(owner) > 2 * self._capacity + _FEWEST_SESSIONS:
            self._owner = {key: mine for key, mine in owner.items() if key in state.table.of}
        if session.request is record:
            session.request = None
        before = next((chain for chain in reversed(session.chains) if chain.continued_by(keys)), None)
        chain = Chain(keys)
        if before is not None:
            session.chains.remove(before)
        session.chains.append(chain)
        self._known += len(keys) - (0 if before is None else len(before.keys))
        if record.promise is not None:
            self._promise(state, session, chain, *record.promise)
        for each in (before, record.promised):
            if each is not None:
                self._end_promise(state, session, each)
        while len(session.chains) > _MOST_CHAINS:
            self._known -= len(session.chains[0].keys)
            self._end_promise(state, session, session.chains.pop(0))
        while self._known > 2 * self._capacity + _FEWEST_SESSIONS and len(self._all) > 1:
            self._forget(self._all.popitem(last=False)[1])

    def asked(self, state: CacheState, pool: Pool, keys: list[bytes]) -> None:
        """A request asks for resident keys that are retained or released; these are not released any more."""
        if pool.released and pool.beside is not None:
            self._move(state, keys, pool.beside)
        elif not pool.released:
            state.recorder.retained_hits += len(keys)

    def used_by_others(self, keys: Sequence[bytes]) -> None:
        """A request without a session has used these keys: no session may release them."""
        for key in keys:
            if key in self._owner:
                self._owner[key] = None

    def advance(self, state: CacheState) -> None:
        """End the promises whose time is over, and tell the policies the time."""
        now = self.clock()
        while self._ends and self._ends[0][0] <= now:
            until, _, session, chain = heappop(self._ends)
            if until == session.until:
                session.settle(kept=False)
            if chain.until == until:
                self._end_promise(state, session, chain)
        for pool in state.pools.all:
            pool.policy.at(now)

    # hints --------------------------------------------------------------------------------------------------------

    def execute(self, state: CacheState, hint: Hint, has_tiers: bool) -> tuple[HintAnswer, list[bytes]]:
        """Returns the answer, and the keys that the tiers are to write ("demote") or to bring ("prefetch")."""
        self.advance(state)
        session = self._of(hint.session, hint.tenant)
        if session is None:
            return hint.declined("no request has named this session, or it was forgotten"), []
        if state.pools.of(hint.tenant).max_blocks is not None and hint.action != "prefetch":
            return hint.declined("the tenant has a quota, within which its policy alone orders"), []
        if hint.action == "retain":
            return self._retain(state, session, hint), []
        if hint.action == "release":
            return self._release(state, session, hint), []
        if not has_tiers:
            return hint.declined("the cache has no tiers"), []
        if hint.action == "demote":
            mine, resident = self._own(state, session)
            return hint.done(len(mine), "" if len(mine) == len(resident) else _SHARED), mine
        keys = session.chains[-1].keys if session.chains else []
        absent = sum(key not in state.table.of for key in keys)
        if not absent:
            return hint.declined("all keys of its latest request are in entries"), []
        return hint.done(absent), keys

    def _retain(self, state: CacheState, session: Session, hint: Hint) -> HintAnswer:
        limit = "" if hint.ttl <= LONGEST_TTL else f"ttl is at most {LONGEST_TTL:g} seconds"
        ttl, record = min(hint.ttl, LONGEST_TTL), session.request
        if record is not None and not record.ended:
            record.promise = ttl, hint.due
            if not session.allowance:
                return hint.declined(_UNTRUSTED)
            if record.promised is not None:
                self._end_promise(state, session, record.promised)
            record.promised = Chain([], Promise(place_of(self.clock(), ttl, hint.due), session.tenant))
            record.retained_in = state.pools.beside(state.pools.of(session.tenant), retained=True)
            record.notes.setdefault(record.retained_in.number, {})["promise"] = record.promised.promise
            self._end_later(session, record.promised, self.clock() + ttl)  # if the request is dropped
            return hint.done(len(record.keys), limit)
        if not session.chains:
            return hint.declined("none of its requests has ended")
        chain = session.chains[-1]
        granted = self._promise(state, session, chain, ttl, hint.due)
        if granted < len(chain.keys):
            limit = f"{granted} of {len(chain.keys)} keys are in entries, and within its share"
        return hint.done(granted, limit) if granted else hint.declined(_UNTRUSTED)

    def _release(self, state: CacheState, session: Session, hint: Hint) -> HintAnswer:
        mine, resident = self._own(state, session)
        for chain in session.chains:
            self._end_promise(state, session, chain)
        self._forget(session)
        session.watched = 0
        self.set_free(state, mine, session.tenant)
        return hint.done(len(mine), "" if len(mine) == len(resident) else _SHARED)

    def set_free(self, state: CacheState, keys: list[bytes], tenant: str) -> None:
        """These resident keys of a tenant go first, those needed by others last."""
        self._move(state, keys[::-1], state.pools.beside(state.pools.of(tenant), retained=False))

    def _own(self, state: CacheState, session: Session) -> tuple[list[bytes], list[bytes]]:
        """The resident keys of a session that nobody else has used, and all of them."""
        resident = dict.fromkeys(key for chain in session.chains for key in chain.keys if key in state.table.of)
        return [key for key in resident if self._owner.get(key) is session], list(resident)

    # inner workings -----------------------------------------------------------------------------------------------

    def _promise(self, state: CacheState, session: Session, chain: Chain, ttl: float, due: float | None) -> int:
        """Retain what the session's share allows of a chain. Returns how many keys."""
        now, pools, table = self.clock(), state.pools, state.table
        self._end_promise(state, session, chain)
        session.watched, session.until = len(chain.keys), now + ttl
        place = place_of(now, ttl, due)
        ordinary = pools.of(session.tenant)
        retained = pools.beside(ordinary, retained=True)
        movable = {ordinary.number, retained.number, pools.beside(ordinary, retained=False).number}
        keys = [key for key in chain.keys if key in table.of and table.pool_of[table.of[key]] in movable]
        keys = keys[: session.allowance]
        if len(pools.by_tenant) > 1 and isinstance(retained.policy, Promised):
            others = retained.policy.promised_by(session.tenant, frozenset(keys))
            keys = keys[: max(0, int(TENANT_SHARE * self._capacity) - others)]
        if keys:
            chain.promise = Promise(place, session.tenant)
            self._move(state, keys, retained, chain.promise)
        self._end_later(session, chain, session.until)
        return len(keys)

    def _end_later(self, session: Session, chain: Chain, until: float) -> None:
        chain.until = until
        self._number += 1
        heappush(self._ends, (until, self._number, session, chain))
        if len(self._ends) > 4 * self._most:
            self._ends = [each for each in self._ends if each[2].until == each[0] or each[3].promise is not None]
            self._ends.sort()

    def _end_promise(self, state: CacheState, session: Session, chain: Chain) -> None:
        """What it retains becomes ordinary."""
        promise, chain.promise = chain.promise, None
        if promise is None:
            return
        ordinary = state.pools.of(session.tenant)
        policy = state.pools.beside(ordinary, retained=True).policy
        if isinstance(policy, Promised):
            self._move(state, policy.held(promise), ordinary)

    def _forget(self, session: Session) -> None:
        """Its promises end when their time is over."""
        self._known -= sum(len(chain.keys) for chain in session.chains)
        session.chains.clear()

    def _move(self, state: CacheState, keys: list[bytes], target: Pool, promise: Promise | None = None) -> None:
        """Put resident keys into another pool, as if a request had just stored them."""
        if not keys:
            return
        table, pools = state.table, state.pools
        state.consistent = False
        originals = table.originals(keys)
        for pool, mine in pools.split(originals, state.pool_number):
            if pool is not target or promise is not None:
                pool.stale = True
                pool.policy.remove(mine, evicted=False)
                pool.stale = False
        for key in originals:
            table.pool_of[table.of[key]] = target.number
        target.stale = True
        if promise is not None and isinstance(target.policy, Promised):
            target.policy.put(promise, originals)
        else:
            target.policy.insert(originals)
        target.stale = False
        state.consistent = True
