"""Saving and restoring: blocks on their way from slots into a session file, and back."""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from kvoffload.cache.entries import Status
from kvoffload.cache.keys import as_tokens
from kvoffload.cache.statistics import Restored
from kvoffload.errors import LayoutError, MissingKeyError, SessionFileError, TransferError
from kvoffload.internal.checks import shown, to_wait
from kvoffload.internal.nesting import refuse_waiting
from kvoffload.internal.types import Int64Array
from kvoffload.session.session_file import Contents, Plan, SessionFile, SessionWriter
from kvoffload.session.whole_blocks import BlockForm, Blocks, WholeBlocks

if TYPE_CHECKING:
    from kvoffload.cache.block_cache import BlockCache
    from kvoffload.cache.reservations import CacheRequest
    from kvoffload.cache.tiering.promotion import Promotion

Progress = Callable[[int, int], None]  # tokens done, tokens in all

_THREADS = 4  # that move blocks at a time
_SHARE = 4  # one part of so many of the entries is held at a time
_MOST_IDENTITY = 4096  # characters
_NOT_BELOW = ("host", "pending", "missing", "unknown")  # what `locate` says of a key that no tier is known to have
_R = TypeVar("_R")


class Terms(NamedTuple):
    """What blocks depend on besides their form and tokens, as a call of `save` or `restore` gives it."""

    salt: str
    extra: bytes
    identity: dict[str, str]

    @classmethod
    def checked(cls, salt: str, extra: bytes, identity: Mapping[str, str]) -> Terms:
        """ValueError: `identity` is wrong. `salt` and `extra` are checked by `keys`."""
        texts = [*identity, *identity.values()] if isinstance(identity, Mapping) else [identity]
        fits = all(isinstance(each, str) for each in texts) and sum(map(len, texts)) <= _MOST_IDENTITY
        if not fits or not isinstance(identity, Mapping) or not identity.get("model"):
            raise ValueError(
                'identity must be a mapping of strings to strings with a "model", such as {"model": "llama-3.1-8b", '
                f'"revision": "0e9e39f"}}, at most {_MOST_IDENTITY} characters, got {shown(identity)}'
            )
        return cls(salt, extra, dict(identity))

    def digest(self, tokens: Int64Array) -> str:
        """Return what a file says of salt and extra: a digest whose key is the first block's tokens; "" for none."""
        if not self.salt and not self.extra:
            return ""
        key = hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=32).digest()
        salt = self.salt.encode("utf-8", "surrogatepass")
        message = len(salt).to_bytes(8, "little") + salt + self.extra
        return hashlib.blake2b(message, digest_size=16, key=key, person=b"kvoffload salt").hexdigest()

    def check(self, file: SessionFile, form: BlockForm, weights: str) -> None:
        """Raise LayoutError or SessionFileError unless a file has blocks that a cache can hold, on these terms."""
        contents, where = file.contents, f"{shown(file.path)} was saved with"
        for name, theirs, ours in zip(BlockForm._fields, contents.form, form, strict=True):
            if theirs != ours:
                raise LayoutError(f"{where} {name}={shown(theirs)}, here it is {shown(ours)}: nothing was loaded")
        said, given = (
            {"weights": name, **{f"identity[{each!r}]": value for each, value in identity.items()}}
            for name, identity in ((contents.weights, contents.identity), (weights, self.identity))
        )
        for name in sorted({*said, *given}):
            if said.get(name) != given.get(name):
                theirs, ours = (shown(each[name]) if name in each else "not there" for each in (said, given))
                raise SessionFileError(f"{where} {name}={theirs}, here it is {ours}: nothing was loaded")
        if file.whole and contents.salt != self.digest(file.tokens[: form.tokens_per_block]):
            raise SessionFileError(f"{where} another salt or extra (or other first tokens): nothing was loaded")


def save(
    cache: BlockCache[Any],
    path: str | os.PathLike[str],
    token_ids: Any,
    given: tuple[str, bytes, Mapping[str, str]],
    deadline: float | None,
    progress: Progress | None,
    *,
    producer: str,
) -> int:
    """Do `BlockCache.save`."""
    _refuse_nested(cache, "save")
    if deadline is not None:
        to_wait("deadline", deadline)
    terms, whole, tokens = Terms.checked(*given), whole_blocks(cache), as_tokens(token_ids)
    factor, weights = cache.engine.layout.blocks_per_slot, cache._weights.now
    per_key = factor * whole.form.tokens_per_block
    keys = cache.keys(tokens, salt=terms.salt, extra=terms.extra)

    def move(begin: int, stop: int) -> int:
        """Write the blocks of keys into the file. Returns how many leading keys had some."""
        wanted = keys[begin:stop]
        with _brought(cache, wanted, deadline) as promotion:
            try:
                with cache.acquire(wanted, pending=True) as lease:
                    lease.wait(deadline)  # for stores that have not ended
                    if cache._weights.now is not weights:
                        return 0
                    blocks = [whole.gather(group, lease.slots(group)) for group in range(len(whole.form.groups))]
            except (MissingKeyError, TransferError, TimeoutError):
                return min(promotion.wait(), len(wanted) - 1)
        file.put(begin * factor, blocks)
        return len(wanted)

    places = cache.locate(keys) if cache._pool is None else []  # a pool's member does not know which are missing
    count = places.index("missing") if "missing" in places else len(keys)
    while count:
        tokens = tokens[: count * per_key]
        said = terms.identity, weights.name, terms.digest(tokens[: whole.form.tokens_per_block]), producer
        with SessionWriter(path, Plan(Contents(whole.form, count * factor, *said)), tokens) as file:
            with closing(_in_order(cache, count, file.plan, move)) as found:
                had = _leading(found, progress, per_key, len(tokens))
            if had == count:
                file.finish()
                return len(tokens)
            count = had  # some have gone meanwhile: a file of those before them
    raise MissingKeyError(
        f"none of the {len(keys)} keys of these tokens can be read from the cache, so nothing was written to "
        f"{shown(os.fspath(path))}: keep their blocks first, and save with the same salt"
    )


def _brought(cache: BlockCache[Any], keys: list[bytes], deadline: float | None) -> Promotion:
    """Return a promotion that has ended, which holds those of the keys that have come. Where others have the room that
    promotions may take, it waits for it.
    """
    until = time.monotonic() + (inf if deadline is None else deadline)
    promotion = cache.promote(keys, deadline=deadline, counted=False)
    while (hits := promotion.wait()) < len(keys) and time.monotonic() < until:
        if cache.locate(keys[hits : hits + 1])[0] in _NOT_BELOW:
            break
        promotion.release()
        time.sleep(0.01)
        promotion = cache.promote(keys, deadline=deadline, counted=False)
    return promotion


def restore(
    cache: BlockCache[Any],
    path: str | os.PathLike[str],
    given: tuple[str, bytes, Mapping[str, str]],
    tenant: str,
    progress: Progress | None,
) -> Restored:
    """Do `BlockCache.restore`."""
    _refuse_nested(cache, "restore")
    terms, whole, factor = Terms.checked(*given), whole_blocks(cache), cache.engine.layout.blocks_per_slot
    per_key, reason = factor * whole.form.tokens_per_block, ""
    cache.keys((), salt=terms.salt, extra=terms.extra)  # refuses wrong ones
    with SessionFile(path) as file, cache.open_request(tenant=tenant) as request:
        terms.check(file, whole.form, request._record.weights.name)  # it stores no keys of others
        keys = cache.keys(file.tokens, salt=terms.salt, extra=terms.extra)
        of = file.plan.blocks * whole.form.tokens_per_block

        def read(begin: int, stop: int) -> tuple[list[Blocks], int]:
            return file.read(begin * factor, (stop - begin) * factor)

        def filled(found: Iterator[tuple[int, int, tuple[list[Blocks], int]]]) -> Iterator[tuple[int, int, int]]:
            nonlocal reason
            for begin, stop, (blocks, good) in found:
                more, reason = _fill(cache, whole, keys[begin : begin + good // factor], blocks, request)
                reason = reason or (
                    f"block {begin * factor + good} is damaged" if good < (stop - begin) * factor else ""
                )
                yield begin, stop, more

        with closing(_in_order(cache, len(keys), file.plan, read)) as found:
            done = _leading(filled(found), progress, per_key, of)
    if not reason and file.whole < file.plan.blocks:
        reason = f"the file ends in block {file.whole}"
    elif not reason and done * factor < file.whole:
        reason = "the last blocks do not fill a slot of this cache"
    return Restored(done * per_key, of, reason)


def _fill(
    cache: BlockCache[Any], whole: WholeBlocks, keys: list[bytes], blocks: list[Blocks], request: CacheRequest
) -> tuple[int, str]:
    """Make keys hits that are none yet. Returns how many leading ones are, and why no more."""
    if not keys:
        return 0, ""
    factor, unfit = cache.engine.layout.blocks_per_slot, len(keys)
    with cache.reserve(keys, request=request) as reservation:
        places = np.array(reservation.positions, dtype=np.int64)
        picked = (places[:, np.newaxis] * factor + np.arange(factor)).reshape(-1)
        for group, each in enumerate(blocks):
            chosen = each[: len(picked)] if len(places) == len(keys) else each[picked]
            fits = whole.scatter(group, reservation.slots(group), chosen)
            unfit = min(unfit, *places[~fits].tolist(), unfit)
        if unfit < len(keys):
            reservation.abort()
    if unfit < len(keys):
        return _fill(cache, whole, keys[:unfit], blocks, request)[0], "the cache's codec cannot hold the next block"
    ready = sum(1 for _ in takewhile(lambda status: status is Status.HIT, cache.status(keys)))
    missing = "the cache has no room for the next block, does not want it, or another call is storing it"
    return ready, missing if ready < len(keys) else ""


def _refuse_nested(cache: BlockCache[Any], call: str) -> None:
    """Raise RuntimeError where this thread would wait for itself: the threads that move blocks ask the cache."""
    (refuse_waiting if cache._tiers is None else cache._tiers.refuse_nested)(call)


def whole_blocks(cache: BlockCache[Any]) -> WholeBlocks:
    slots = cache.engine.slots
    return WholeBlocks(cache.engine.layout, slots if isinstance(slots, tuple) else (slots,))


def _leading(found: Iterator[tuple[int, int, int]], progress: Progress | None, per_key: int, of: int) -> int:
    """Return how many leading keys were moved, of results for one run of keys after the other: begin, end, how many."""
    done = 0
    for begin, stop, moved in found:
        done = begin + moved
        if done < stop:
            break
        if progress is not None:
            progress(done * per_key, of)
    return done


def _in_order(
    cache: BlockCache[Any], num_keys: int, plan: Plan, work: Callable[[int, int], _R]
) -> Generator[tuple[int, int, _R], None, None]:
    """Do work for a few keys at a time in threads, and yield begin, end and result in order. No thread is at work once
    it is closed: do that before the file is closed.

    All of it together holds a share of the entries, or one entry.
    """
    share = max(1, cache.statistics().capacity // _SHARE)
    step = max(1, min(plan.step // cache.engine.layout.blocks_per_slot, share // _THREADS))
    begins, at_once = range(0, num_keys, step), min(_THREADS, share // step)
    threads, futures = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvoffload-session"), deque[Future[_R]]()
    try:
        for at, begin in enumerate(begins):
            for each in begins[at + len(futures) : at + at_once]:
                futures.append(threads.submit(work, each, min(num_keys, each + step)))
            yield begin, min(num_keys, begin + step), futures.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)
