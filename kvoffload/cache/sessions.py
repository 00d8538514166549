"""Sessions: which requests belong together, and what their programs have told the cache about what comes next.

A session's keys are in one of three pools, which give way in this order (see `Pools.beside`):

    released   the session has ended                 hint("release")
    ordinary   what the cache's policy orders
    retained   the session has promised to come back hint("retain"), until it comes, or its time is over

Promises are trusted as far as earlier ones of the session were kept: a session that breaks them retains nothing, and
nobody else's keys make room for it. The first promise of a session retains nothing either; it is only watched.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from hashlib import blake2b
from itertools import compress, islice, repeat
from math import inf
from operator import is_not
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from kvoffload.cache.entries import EntryTable
from kvoffload.cache.policies.promised import Promise, Promised, place_of
from kvoffload.cache.pools import OfSession, Pool, Pools, RequestRecord

Action: TypeAlias = Literal["retain", "release", "demote", "prefetch"]
Outcome: TypeAlias = Literal["accepted", "clipped", "declined"]
ACTIONS: tuple[Action, ...] = get_args(Action)

_UNTRUSTED = "the session has to keep a promise first: come back within ttl"
_SHARED = "others use the rest, too"

LONGEST_TTL = 86_400.0  # seconds
LONGEST_WITHOUT_DUE = 600.0  # seconds: who knows only that a session will come back some day, has promised little
TENANT_SHARE = 1 / 2  # of the entries, for the promises of one tenant, where there are several
_MOST_CHAINS = 8  # requests of a session that are remembered: those that no later one has continued
_FEWEST_SESSIONS = 1_024
_FADING = 0.75  # what a promise weighs after another one
_LATELY = 8  # times the entries: blocks asked for, of which the latest half weighs most
_OVERDUE = 2  # times `due`, after which a promise is over
_RENEWED = 0.25  # of a broken promise: what it weighs to promise again before coming back
_LOOKED_AT = 4  # open requests, each time: was one dropped?
_LONGEST_NAME = 128  # characters: of longer names a digest is remembered
_TRUST = 2  # blocks that may be retained for each that was promised before, and asked for in time


class HintAnswer(NamedTuple):
    """What became of a hint.

    Attributes:
        action: of the hint.
        outcome: "accepted"; "clipped": in part, see `reason`; "declined": nothing is done with any key. But a "retain"
            may be remembered as a promise all the same, and a "release" as the session's end.
        blocks: keys that are retained, released, to be written, or asked for. In an open request, of "retain" the most
            that it may retain, of "release" those that would be released now.
        reason: why it was clipped or declined; else "".
    """

    action: Action
    outcome: Outcome
    blocks: int
    reason: str = ""


def default_ttl(due: float | None) -> float:
    """Return the seconds that a hint without `ttl` holds: at least as long as a promise with this `due` may."""
    return max(300.0, _OVERDUE * (due or 0.0))


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


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else blake2b(name.encode("utf-8", "surrogatepass")).hexdigest()


class Chain:
    """The keys of a session's request that no later one has continued."""

    __slots__ = ("counted", "keys", "prefetch", "promise")

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys
        self.promise: Promise | None = None
        self.counted = False  # among the blocks of requests with a promise
        self.prefetch: Callable[[], RequestRecord | None] = lambda: None  # goes on, or None

    def continued_by(self, keys: list[bytes]) -> bool:
        """Return whether another request begins with nearly all of these keys: it goes on where this one ended. Others
        are branches: an agent asks for a title, or starts others, and comes back to this one.
        """
        most = len(self.keys) - max(1, len(self.keys) // 10)
        return keys[:most] == self.keys[:most]


class Session:
    """What the cache remembers about a session.

    Attributes:
        chains: the latest last.
        kept, broken: blocks promised before, which weigh less with every promise.
        watched: the keys of the latest promise while it is open, which it is until `until`; no repeats.
        requests: those that may be open, the latest last. Weak: they know keys, which would stay with the session.
        forgotten: whether there were too many sessions.
        demotion: returns what stands for one of all its keys that goes on, or None.
    """

    __slots__ = ("broken", "chains", "demotion", "forgotten", "kept", "requests", "tenant", "until", "watched")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.chains: list[Chain] = []
        self.kept = self.broken = 0.0
        self.watched: list[bytes] = []
        self.until = 0.0
        self.requests: list[weakref.ref[SessionRequest]] = []
        self.demotion: Callable[[], RequestRecord | None] = lambda: None
        self.forgotten = False

    @property
    def open_request(self) -> SessionRequest | None:
        """The latest."""
        requests = (reference() for reference in reversed(self.requests))
        return next((each for each in requests if each is not None and each.is_open), None)

    @property
    def allowance(self) -> int:
        """The blocks that it may retain."""
        return max(0, int(_TRUST * (self.kept - self.broken)))

    def settle(self, kept: float, broken: float) -> None:
        """End the latest promise, of which so many blocks were kept and broken."""
        self.kept, self.broken = _FADING * self.kept + kept, _FADING * self.broken + broken
        self.watched = []

    def asked(self, keys: list[bytes], most: int) -> None:
        """Settle the promise if a request has asked for most of it; else that may have been a branch, and the promise
        stands. Of the blocks found at most `most` count as kept.
        """
        watched = self.watched
        found = len(watched if keys[: len(watched)] == watched else set(watched).intersection(keys))
        if 2 * found >= len(watched) > 0:
            self.settle(min(found, most), 0)


class SessionRequest:
    """A session's part of an open request's record."""

    __slots__ = ("__weakref__", "hinted", "promised", "record", "releases", "retained", "session", "stored")

    def __init__(self, session: Session, record: weakref.ref[RequestRecord]) -> None:
        self.session = session
        self.record = record
        self.stored: set[bytes] = set()  # the keys that it has stored
        self.hinted: tuple[float, float | None] | None = None  # ttl and due of its hint, seconds
        self.promised: Promise | None = None
        self.retained: tuple[Pool, int] | None = None  # where its new keys are retained, and at most how many
        self.releases = False  # the session ends with it

    @property
    def is_open(self) -> bool:
        record = self.record()
        return record is not None and not record.ended

    def pool_for(self, known: Set[bytes], keys: Collection[bytes], ordinary: Pool) -> Pool:
        """Return the pool in which the request stores these keys. `known`: its keys so far, which are counted only if
        trust needs it: a request may store one key after the other.
        """
        if self.retained is None or self.retained[0].gone:
            return ordinary
        retained, most = self.retained
        session, wanted, trust = self.session, len(known) + len(keys), self.session.allowance
        if wanted > min(trust, most):
            wanted -= sum(map(known.__contains__, keys))
        if trust < wanted <= min(most, trust + _TRUST * len(session.watched)):
            trust += _TRUST * len(set(known).union(keys).intersection(session.watched))
        return retained if wanted <= min(trust, most) else ordinary


class Sessions:
    """All sessions of a cache. Every call is made under the cache's lock, between `state.consistent = False` and True.

    Memory: at most as many sessions, and twice as many keys in chains, as the cache has entries (at least 1,024
    sessions); the session that was not heard of longest is forgotten first.

    Args:
        clock: returns seconds.

    Attributes:
        hits: blocks that were asked for while a promise retained them.
        answers: how many hints got which answer: (action, outcome).
    """

    def __init__(self, table: EntryTable, pools: Pools, clock: Callable[[], float]) -> None:
        self._table = table
        self._pools = pools
        self._clock = clock
        self._most = max(_FEWEST_SESSIONS, table.most)
        self._most_keys = 2 * table.most + _FEWEST_SESSIONS
        self._all: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._known = 0  # keys in chains
        self._owner: dict[bytes, Session | None] = {}  # who stored a key, if nobody else has used it; None: others have
        self._promising = self._asked = 0.0  # blocks that requests with a promise have asked for, and all; lately
        self.hits = 0
        self._open: dict[SessionRequest, None] = {}  # that have promised to come back
        self.answers = Counter[tuple[Action, Outcome]]()

    def __len__(self) -> int:
        return len(self._all)

    def recount(self) -> None:
        """Count the keys in chains again, after an interrupt: no other call looks at every session."""
        self._known = sum(len(chain.keys) for session in self._all.values() for chain in session.chains)

    def counts(self) -> dict[str, Any]:
        """Return the fields of `CacheStatistics` that are about hints."""
        answers = sorted((" ".join(answer), count) for answer, count in self.answers.items())
        return {"hints": tuple(answers), "retained_hits": self.hits}

    # requests -----------------------------------------------------------------------------------------------------

    def open(self, name: str, tenant: str, record: weakref.ref[RequestRecord]) -> SessionRequest:
        """Begin a request of a session."""
        self.advance()
        session = self._of(name, tenant)
        if session is None:
            session = self._all[tenant, _short(name)] = Session(tenant)
            self._forget_some()
        request = SessionRequest(session, record)
        session.requests = [each for each in session.requests if each() is not None] + [weakref.ref(request)]
        return request

    def ended(self, request: SessionRequest, keys: list[bytes]) -> None:
        """End a request of a session: its keys take the place of those of the request that it continues."""
        session, owner, stored = request.session, self._owner, request.stored
        if not keys or session.forgotten:
            self._close(request)
            if request.releases and not session.forgotten:
                self._let_go(session)
            return
        session.asked(keys, self._table.capacity)
        session.demotion = lambda: None
        for key in list(compress(keys, map(is_not, map(owner.get, keys), repeat(session)))):
            owner[key] = session if key not in owner and key in stored else None
        if len(owner) > self._most_keys:
            self._owner = {key: mine for key, mine in owner.items() if key in self._table.of}
        before = next((chain for chain in reversed(session.chains) if chain.continued_by(keys)), None)
        chain = Chain(keys)
        if before is not None:
            session.chains.remove(before)
        session.chains.append(chain)
        self._known += len(keys) - (0 if before is None else len(before.keys))
        self._asked += min(len(keys), self._table.capacity)
        if request.hinted is not None:
            self._promise(session, chain, *request.hinted)
        self._close(request)
        if before is not None:
            self._end_promise(session.tenant, before.promise)
        while len(session.chains) > _MOST_CHAINS:
            self._known -= len(session.chains[0].keys)
            self._end_promise(session.tenant, session.chains.pop(0).promise)
        if request.releases:
            self._let_go(session)
        self._forget_some()

    def asked(self, pool: Pool, keys: list[bytes]) -> None:
        """Note that a request asks for resident keys that are retained or released; released ones become ordinary."""
        if not pool.released:
            self.hits += len(keys)
        elif pool.beside is not None:
            self._move(keys, pool.beside)

    def used_by_others(self, keys: Sequence[bytes]) -> None:
        """Note that a request without a session has used these keys: no session may release them."""
        self.advance()
        self._asked += len(keys)
        self.shared(keys, None)

    def shared(self, keys: Iterable[bytes], request: OfSession | None) -> None:
        """Note that a request uses these keys: from now on no other session may release them."""
        owner, mine = self._owner, request.session if isinstance(request, SessionRequest) else None
        owner.update(dict.fromkeys(key for key in keys if owner.get(key, mine) is not mine))

    def advance(self) -> None:
        """End the promises whose time is over, or whose request was dropped, and tell the policies the time."""
        for request in list(islice(self._open, _LOOKED_AT)):
            self._open.pop(request)
            if request.is_open:
                self._open[request] = None  # after the others
            else:
                self._close(request)
        now = self._clock()
        for pool in self._pools.all:
            pool.policy.at(now, self._promised_share())
            if pool.beside is not None and isinstance(pool.policy, Promised):
                self._move(pool.policy.ended(now), pool.beside)
        if self._asked > _LATELY * self._table.capacity:
            self._asked, self._promising = self._asked / 2, self._promising / 2

    # hints --------------------------------------------------------------------------------------------------------

    def execute(self, hint: Hint, has_tiers: bool) -> tuple[HintAnswer, list[bytes]]:
        """Carry out a hint. Returns the answer, and the keys that the tiers are to write ("demote") or to bring
        ("prefetch"); see `promised`.
        """
        self.advance()
        answer, keys = self._execute(hint, has_tiers)
        self.answers[answer.action, answer.outcome] += 1
        return answer, keys

    def _execute(self, hint: Hint, has_tiers: bool) -> tuple[HintAnswer, list[bytes]]:
        session = self._of(hint.session, hint.tenant)
        if session is None:
            return hint.declined("no request has named this session, or it was forgotten"), []
        if self._pools.of(hint.tenant).max_blocks is not None and hint.action != "prefetch":
            return hint.declined("the tenant has a quota, within which its policy alone orders"), []
        if hint.action == "retain":
            return self._retain(session, hint), []
        if hint.action == "release":
            return self._release(session, hint), []
        if not has_tiers:
            return hint.declined("the cache has no tiers"), []
        if hint.action == "demote":
            if session.demotion() is not None:
                return hint.declined("a demotion of all its keys goes on"), []
            for chain in session.chains:
                self._end_promise(session.tenant, chain.promise)
            mine, resident = self._own(session)
            return hint.done(len(mine), "" if len(mine) == len(resident) else _SHARED), mine
        chain = session.chains[-1] if session.chains else Chain([])
        absent = sum(key not in self._table.of for key in chain.keys)
        if not absent:
            return hint.declined("all keys of its latest request are in entries"), []
        if chain.prefetch() is not None:
            return hint.declined("a prefetch of its latest request goes on"), []
        if session.watched and hint.due is not None:  # it has promised to come back, and now says more exactly when
            ttl = min(hint.ttl, LONGEST_TTL)
            self._promise(session, chain, ttl, hint.due)
            if session.allowance:
                chain.promise = chain.promise or self._new_promise(session.tenant, ttl, hint.due)
        return hint.done(absent), chain.keys

    def promised(self, hint: Hint, record: RequestRecord) -> None:
        """Note that tiers work for a hint, as long as `record` lives. Keys that they bring for "prefetch" are retained
        like the keys of an open request, which is `record`.
        """
        session = self._all[hint.tenant, _short(hint.session)]
        if hint.action == "demote":
            session.demotion = weakref.ref(record)
            return
        chain, retained = session.chains[-1], self._pools.beside(self._pools.of(session.tenant), retained=True)
        chain.prefetch = weakref.ref(record)
        record.keys.update(dict.fromkeys(chain.keys))
        record.of_session = of_session = SessionRequest(session, weakref.ref(record))
        of_session.promised = chain.promise
        if chain.promise is not None:
            share = self._tenant_share(session.tenant, retained, chain.keys)
            of_session.retained = retained, min(share, session.allowance)

    def _retain(self, session: Session, hint: Hint) -> HintAnswer:
        longest, request = LONGEST_WITHOUT_DUE if hint.due is None else LONGEST_TTL, session.open_request
        limit = "" if hint.ttl <= longest else f"ttl is at most {LONGEST_WITHOUT_DUE:g} s, with due {LONGEST_TTL:g} s"
        ttl = min(hint.ttl, longest)
        if request is not None:
            self._close(request)
            request.hinted, request.releases = (ttl, hint.due), False
            request.promised = self._new_promise(session.tenant, ttl, hint.due)
            request.promised.until = self._clock() + LONGEST_TTL  # its time counts from the end of the request
            self._open[request] = None
            retained = self._pools.beside(self._pools.of(session.tenant), retained=True)
            request.retained = retained, self._tenant_share(session.tenant, retained, ())
            blocks, most = session.allowance + _TRUST * len(session.watched), request.retained[1]
            if blocks > most:
                limit = f"{most} more keys may be retained"
            return hint.done(min(blocks, most), limit) if blocks else hint.declined(_UNTRUSTED)
        if not session.chains:
            return hint.declined("none of its requests has ended")
        chain = session.chains[-1]
        granted = self._promise(session, chain, ttl, hint.due)
        if granted < len(chain.keys):
            limit = f"{granted} of {len(chain.keys)} keys are in entries, and within its share"
        return hint.done(granted, limit) if granted or session.allowance else hint.declined(_UNTRUSTED)

    def _release(self, session: Session, hint: Hint) -> HintAnswer:
        mine, resident = self._own(session)
        request = session.open_request
        if request is not None:
            self._close(request)
            request.hinted, request.releases = None, True
        else:
            self._let_go(session)
        return hint.done(len(mine), "" if len(mine) == len(resident) else _SHARED)

    def _let_go(self, session: Session) -> None:
        """Set the keys of an ended session free. Promises that it has not come back for were in vain."""
        mine, _ = self._own(session)
        for chain in session.chains:
            self._end_promise(session.tenant, chain.promise)
        self._known -= sum(len(chain.keys) for chain in session.chains)
        session.chains.clear()
        if session.watched:
            session.settle(0, len(session.watched))
        self.set_free(mine, session.tenant)

    def set_free(self, keys: list[bytes], tenant: str) -> None:
        """Let these resident keys go before all others, if they are the tenant's, ordinary, and of one session alone,
        which has no open request.
        """
        ordinary, free = self._pools.of(tenant), list[bytes]()
        for key, number in zip(keys, self._table.pool_numbers(keys), strict=True):
            session = self._owner.get(key)
            if number == ordinary.number and session and session.open_request is None:
                free.append(key)
        self._move(free, self._pools.beside(ordinary, retained=False))

    # inner workings -----------------------------------------------------------------------------------------------

    def _promised_share(self) -> float:
        return min(1.0, self._promising / max(1.0, self._asked))

    def _of(self, name: str, tenant: str) -> Session | None:
        """Return the session, if it is known, and break its promise if its time is over."""
        session = self._all.get((tenant, _short(name)))
        if session is not None:
            self._all.move_to_end((tenant, _short(name)))
            if session.watched and session.until < self._clock():
                session.settle(0, len(session.watched))
        return session

    def _own(self, session: Session) -> tuple[list[bytes], list[bytes]]:
        """Return the resident keys of a session that nobody else has used, and all of them."""
        resident = dict.fromkeys(key for chain in session.chains for key in chain.keys if key in self._table.of)
        return [key for key in resident if self._owner.get(key) is session], list(resident)

    def _new_promise(self, tenant: str, ttl: float, due: float | None) -> Promise:
        now = self._clock()
        return Promise(place_of(now, ttl, due), now + (ttl if due is None else min(ttl, _OVERDUE * due)), tenant)

    def _tenant_share(self, tenant: str, retained: Pool, but: Sequence[bytes]) -> int:
        """Return how many more keys may be retained for a tenant, besides some."""
        share = self._table.capacity
        if len(self._pools.tenants) > 1 and isinstance(retained.policy, Promised):
            share = int(TENANT_SHARE * share) - retained.policy.promised_by(tenant, but)
        return max(0, share)

    def _promise(self, session: Session, chain: Chain, ttl: float, due: float | None) -> int:
        """Retain as much of a chain as the session may. Returns how many keys."""
        pools = self._pools
        if session.watched and chain.promise is not None:
            session.settle(0, _RENEWED * len(session.watched))
        self._end_promise(session.tenant, chain.promise)
        chain.promise, promise = None, self._new_promise(session.tenant, ttl, due)
        session.watched, session.until = chain.keys, promise.until
        self._promising += 0 if chain.counted else min(len(chain.keys), self._table.capacity)
        chain.counted = True
        ordinary = pools.of(session.tenant)
        retained = pools.beside(ordinary, retained=True)
        mine = {ordinary.number, retained.number, pools.beside(ordinary, retained=False).number}
        keys = list(compress(chain.keys, map(mine.__contains__, self._table.pool_numbers(chain.keys))))
        policy = retained.policy
        if not isinstance(policy, Promised):
            return 0
        others = sum(policy.live(each.promise) for each in session.chains if each.promise is not None)
        keys = keys[: max(0, session.allowance - others)]
        keys = keys[: self._tenant_share(session.tenant, retained, keys)]
        if not keys:
            return 0
        chain.promise = promise
        self._move(keys, retained, promise)
        excess = len(policy) - int(self._table.capacity * self._promised_share())
        self._move(policy.victims(max(0, excess), lambda _: False) or [], ordinary)
        return policy.live(promise)

    def _close(self, request: SessionRequest) -> None:
        """End what a request has promised while it was open; its chain may have a promise of its own by now."""
        self._open.pop(request, None)
        self._end_promise(request.session.tenant, request.promised)
        request.promised = request.retained = None

    def _end_promise(self, tenant: str, promise: Promise | None) -> None:
        """End a promise: what it retains becomes ordinary."""
        if promise is None:
            return
        ordinary = self._pools.of(tenant)
        if isinstance(policy := self._pools.beside(ordinary, retained=True).policy, Promised):
            self._move(policy.held(promise), ordinary)
        promise.until = -inf  # also for keys that a tier brings for it later

    def _forget_some(self) -> None:
        """Forget the sessions not heard of longest, beyond the bounds. Their promises end when their time is over."""
        while len(self._all) > self._most or (self._known > self._most_keys and self._all):
            session = self._all.popitem(last=False)[1]
            session.forgotten = True  # keys that it owns refer to it
            self._known -= sum(len(chain.keys) for chain in session.chains)
            session.chains, session.watched = [], []

    def _move(self, keys: list[bytes], target: Pool, promise: Promise | None = None) -> None:
        """Put resident keys into another pool, as if a request had just stored them. Keys that are retained already
        only get the new promise.
        """
        if not keys:
            return
        table = self._table
        entries = list(map(table.of.__getitem__, keys))
        originals: list[bytes] = list(map(table.keys.__getitem__, entries))  # type: ignore[arg-type]  # they have keys
        numbers = list(map(table.pool_of.__getitem__, entries))
        for pool, mine in self._pools.split(originals, numbers):
            if pool is not target:
                pool.stale = True
                pool.policy.remove(mine, evicted=False)
                pool.stale = False
        if numbers.count(target.number) < len(numbers):
            for index in entries:
                table.pool_of[index] = target.number
        target.stale = True
        if promise is not None and isinstance(target.policy, Promised):
            target.policy.put(promise, originals)
        else:
            target.policy.insert(originals)
        target.stale = False
