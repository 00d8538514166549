"""Saving and restoring: blocks on their way from slots into a session file, and back."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from kvoffload.cache.keys import as_tokens
from kvoffload.cache.statistics import Restored
from kvoffload.cache.weights import UsedWeights
from kvoffload.errors import LayoutError, MissingKeyError, SessionFileError, TransferError
from kvoffload.internal.checks import shown
from kvoffload.internal.nesting import refuse_waiting
from kvoffload.internal.types import Int64Array
from kvoffload.session.session_file import Contents, Plan, SessionFile, SessionWriter
from kvoffload.session.whole_blocks import BlockForm, Blocks, WholeBlocks

if TYPE_CHECKING:
    from kvoffload.cache.block_cache import BlockCache
    from kvoffload.cache.reservations import CacheRequest

Progress = Callable[[int, int], None]  # tokens done, tokens in all

_THREADS = 4  # that move blocks at a time
_SHARE = 4  # one part of so many of the entries is held at a time
_MOST_IDENTITY = 4096  # characters
_R = TypeVar("_R")


class Terms(NamedTuple):
    """What blocks depend on besides their form and tokens, as a call of `save` or `restore` gives it."""

    salt: str
    extra: bytes
    identity: dict[str, str]

    @classmethod
    def checked(cls, salt: str, extra: bytes, identity: Mapping[str, str]) -> Terms:
        """TypeError, ValueError: `identity` is wrong. `salt` and `extra` are checked by `keys`."""
        if not isinstance(identity, Mapping) or not all(
            isinstance(each, str) for pair in identity.items() for each in pair
        ):
            raise TypeError(
                'identity must be a mapping of texts to texts, the "model" and whatever else the bytes depend on, such '
                f'as {{"model": "llama-3.1-8b", "revision": "0e9e39f"}}, got {shown(identity)}'
            )
        size = sum(len(name) + len(value) for name, value in identity.items())
        if not identity.get("model") or size > _MOST_IDENTITY:
            raise ValueError(
                f'identity must name the "model", in at most {_MOST_IDENTITY} characters altogether (give digests of '
                f"long texts), got {size}: {shown(dict(identity))}"
            )
        return cls(salt, extra, dict(identity))

    def digest(self, tokens: Int64Array) -> str:
        """Return what a file says of salt and extra: a digest whose key is the tokens; "" for none."""
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
                raise LayoutError(f"{where} {name}={theirs}, and this cache has {name}={ours}: nothing was loaded")
        for name in sorted({*contents.identity, *self.identity}):
            theirs, ours = (each.get(name, "(none)") for each in (contents.identity, self.identity))
            if theirs != ours:
                raise SessionFileError(
                    f"{where} identity[{name!r}]={theirs!r:.99}, given was {ours!r:.99}: nothing was loaded"
                )
        if contents.weights != weights:
            raise SessionFileError(
                f"{where} the weights {contents.weights!r:.99}, in use are {weights!r:.99}: nothing was loaded"
            )
        if file.whole and contents.salt != self.digest(file.all_tokens):
            raise SessionFileError(f"{where} another salt, or another extra: nothing was loaded")


def save(
    cache: BlockCache[Any],
    path: str | os.PathLike[str],
    token_ids: Any,
    given: tuple[str, bytes, Mapping[str, str]],
    *,
    deadline: float | None,
    progress: Progress | None,
    used: UsedWeights,
    local: bool,
    producer: str,
) -> int:
    """Do `BlockCache.save`. `local`: the cache knows of all keys whether they are missing."""
    _refuse_nested(cache, "save")
    terms, whole, tokens, weights = Terms.checked(*given), whole_blocks(cache), as_tokens(token_ids), used.now
    keys = cache.keys(tokens, salt=terms.salt, extra=terms.extra)
    places = cache.locate(keys) if local else []
    count = places.index("missing") if "missing" in places else len(keys)
    factor = cache.engine.layout.blocks_per_slot
    while count:
        tokens = tokens[: count * factor * whole.form.tokens_per_block]
        said = terms.identity, weights.name, terms.digest(tokens), producer
        with SessionWriter(path, Plan(Contents(whole.form, count * factor, *said)), tokens) as file:
            got = _write(cache, file, whole, keys[:count], deadline, progress, lambda: used.now is weights)
            if got == count:
                file.finish()
                return len(tokens)
        count = got  # some have gone meanwhile: a file of those before them
    raise MissingKeyError(
        f"none of the {len(keys)} keys of these {len(as_tokens(token_ids))} tokens can be read from the cache, so "
        f"nothing was written to {shown(os.fspath(path))}: keep their blocks first, and save with the same salt"
    )


def _write(
    cache: BlockCache[Any],
    file: SessionWriter,
    whole: WholeBlocks,
    keys: list[bytes],
    deadline: float | None,
    progress: Progress | None,
    same_weights: Callable[[], bool],
) -> int:
    """Write the blocks of keys into a file. Returns how many leading keys had some."""
    factor, groups = cache.engine.layout.blocks_per_slot, range(len(whole.form.groups))

    def move(begin: int, stop: int) -> int:
        wanted = keys[begin:stop]
        with cache.promote(wanted, deadline=deadline, counted=False) as promotion:
            hits = promotion.wait()
            try:
                with cache.acquire(wanted, pending=True) as lease:
                    lease.wait(deadline)  # for stores that have not ended
                    if not same_weights():
                        return 0
                    blocks = [whole.gather(group, lease.slots(group)) for group in groups]
            except (MissingKeyError, TransferError, TimeoutError):
                return min(hits, len(wanted) - 1)
        file.put(begin * factor, blocks)
        return len(wanted)

    for begin, stop, hits in _in_order(cache, len(keys), file.plan, move):
        if hits < stop - begin:
            return begin + hits
        if progress is not None:
            progress(stop * factor * whole.form.tokens_per_block, len(file.tokens))
    return len(keys)


def restore(
    cache: BlockCache[Any],
    path: str | os.PathLike[str],
    given: tuple[str, bytes, Mapping[str, str]],
    *,
    tenant: str,
    progress: Progress | None,
) -> Restored:
    """Do `BlockCache.restore`."""
    _refuse_nested(cache, "restore")
    terms, whole, factor = Terms.checked(*given), whole_blocks(cache), cache.engine.layout.blocks_per_slot
    cache.keys((), salt=terms.salt, extra=terms.extra)  # refuses wrong ones
    with SessionFile(path) as file, cache.open_request(tenant=tenant) as request:
        terms.check(file, whole.form, request._record.weights.name)  # it stores no keys of others
        keys = cache.keys(file.tokens, salt=terms.salt, extra=terms.extra)
        done, reason = _fill_all(cache, whole, file, keys, request, progress)
    of = file.plan.blocks * whole.form.tokens_per_block
    return Restored(done * factor * whole.form.tokens_per_block, of, reason)


def _fill_all(
    cache: BlockCache[Any],
    whole: WholeBlocks,
    file: SessionFile,
    keys: list[bytes],
    request: CacheRequest,
    progress: Progress | None,
) -> tuple[int, str]:
    """Make the keys of a file hits. Returns how many leading ones are, and why no more."""
    factor, per_block, done = cache.engine.layout.blocks_per_slot, whole.form.tokens_per_block, 0

    def read(begin: int, stop: int) -> tuple[list[Blocks], int]:
        return file.read(begin * factor, (stop - begin) * factor)

    for begin, stop, (blocks, good) in _in_order(cache, len(keys), file.plan, read):
        more, reason = _fill(cache, whole, keys[begin : begin + good // factor], blocks, request)
        done += more
        if good < (stop - begin) * factor:
            reason = reason or f"block {begin * factor + good} is damaged"
        if reason:
            return done, reason
        if progress is not None:
            progress(done * factor * per_block, file.plan.blocks * per_block)
    if file.whole < file.plan.blocks:
        return done, f"the file ends in block {file.whole}"
    return done, "the last blocks do not fill a slot of this cache" if done * factor < file.whole else ""


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
    if reservation.declined:
        return keys.index(reservation.declined[0]), "the cache has no room for the next block, or does not want it"
    return len(keys), ""


def _refuse_nested(cache: BlockCache[Any], call: str) -> None:
    """Raise RuntimeError where this thread would wait for itself: the threads that move blocks ask the cache."""
    (refuse_waiting if cache._tiers is None else cache._tiers.refuse_nested)(call)


def whole_blocks(cache: BlockCache[Any]) -> WholeBlocks:
    slots = cache.engine.slots
    return WholeBlocks(cache.engine.layout, slots if isinstance(slots, tuple) else (slots,))


def _in_order(
    cache: BlockCache[Any], num_keys: int, plan: Plan, work: Callable[[int, int], _R]
) -> Iterator[tuple[int, int, _R]]:
    """Do work for a few keys at a time in threads, and yield begin, end and result in order.

    All of it together holds a share of the entries, or one entry.
    """
    share = max(1, cache.statistics().capacity // _SHARE)
    step = max(1, min(plan.step // cache.engine.layout.blocks_per_slot, share // _THREADS))
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvoffload-session")
    try:
        yield from _results(threads, min(_THREADS, share // step), num_keys, step, work)
    finally:
        threads.shutdown(cancel_futures=True)


def _results(
    threads: ThreadPoolExecutor, at_once: int, num_keys: int, step: int, work: Callable[[int, int], _R]
) -> Iterator[tuple[int, int, _R]]:
    waiting: deque[tuple[int, int, Future[_R]]] = deque()
    for begin in range(0, num_keys, step):
        stop = min(num_keys, begin + step)
        waiting.append((begin, stop, threads.submit(work, begin, stop)))
        if len(waiting) >= at_once:
            first, last, future = waiting.popleft()
            yield first, last, future.result()
    for first, last, future in waiting:
        yield first, last, future.result()
