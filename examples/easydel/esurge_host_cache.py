"""eSurge, the serving engine of EasyDeL, with the KV pages that its GPU has no room for in host memory, by kvoffload.

    engine = eSurge(model=model, processor=..., async_scheduling=False, overlap_execution=False)
    with HostCache(engine, pool_bytes=64 << 30, identity="llama-3.1-8b@0e9e39f"):
        engine.initiate()

eSurge keeps an array for the keys and one for the values of each layer, all with the same pages, and finds the pages of
a known prefix by its own prefix cache, as long as no other request has taken them. It meets kvoffload in six places:

1. Allocation. The arrays that eSurge has allocated are adopted as an `OwnedCache`. From then on `kv_pages` of its
   execution manager is a property: each step reads arrays that follow all transfers, and what it returns is checked.
2. Look-up. `get_computed_pages` asks eSurge's prefix cache first, and host memory for the pages behind its hits.
3. Load. These pages are loaded into free pages and entered into eSurge's prefix cache, which is then asked once more.
   Nothing else changes for eSurge: an aborted, waiting or preempted request holds nothing of ours.
4. Store, after the step that has computed the last token of a page; or when eSurge gives the page to another request.
5. Reset. `reset_prefix_cache` and new weights clear the host memory, too.
6. Failure. Pages whose load fails are not entered, so eSurge computes them. Pages whose store fails are computed again
   when they are needed. If a step of the model raises, its pages may hold anything: no further step runs.

Pages are found by `cache.keys` of their tokens, never by eSurge's hashes: those are Python's `hash` of 64 bits, and
differ between processes.

All of it runs in the thread of eSurge's scheduler, and eSurge's own code is not changed: methods of this one engine are
wrapped until `close`.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax

import kvoffload
from kvoffload.jax import OwnedCache

EASYDEL = "0.3.0"  # methods are wrapped that other releases may not have, or call otherwise


@dataclass(frozen=True)
class Statistics:
    """Counts since the host cache was made.

    Attributes:
        requests: that were looked up, each once.
        host_tokens: tokens loaded from host memory, or a disk, instead of being computed.
        stored_pages: pages whose store was submitted; pages that host memory had already do not count.
        failed_loads, failed_stores: calls, whatever the number of their pages.
        load_seconds: the scheduler's thread spent in look-ups and loads, the copies included.
        store_seconds: the same for stores; the copies go on meanwhile and after.
    """

    requests: int = 0
    host_tokens: int = 0
    stored_pages: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0


class HostCache:
    """Host memory behind the prefix cache of an eSurge engine. Close it, or use it in `with`.

    Make it while no request is running; the engine may have been started. The pages that eSurge's prefix cache holds
    stay where they are.

    Args:
        engine: an `eSurge` with a prefix cache, on one GPU (or the CPU: then on a simulated device), with
            `unified_attention` in all layers, and with `async_scheduling=False, overlap_execution=False`.
        pool_bytes: of pinned host memory.
        identity: names the model and its revision. It is part of all keys, and the identity of a disk.
        store: "filled": pages are stored by the step that fills them. "evicted": when eSurge takes them for other
            tokens. The first copies each page once, behind a step. The second copies only what the GPU loses, but at
            the worst time: a new prompt waits for the pages of an old one to leave. With "filled", pages survive the
            process on a disk. With "evicted", a page is on the GPU or in host memory, seldom in both: better if host
            memory is not much larger than eSurge's cache.
        deadline: seconds for tiers such as a disk. The scheduler waits meanwhile; without tiers it does not matter.
        device: an open device; it stays yours. None: the engine's is opened.
        options: more for `kvoffload.open_cache`: disk, disk_bytes, policy, ...

    Attributes:
        cache: the `BlockCache`, whose `statistics()` say more.
        stores_evicted: whether `store` is "evicted".

    Raises:
        CapabilityError: another release of EasyDeL is installed; or the engine is none of those above.
        RuntimeError: requests are running.
        The errors of `OwnedCache` and `open_cache`. The engine is as it was then.
    """

    def __init__(
        self,
        engine: Any,
        *,
        pool_bytes: int,
        identity: str,
        store: Literal["filled", "evicted"] = "filled",
        deadline: float = 0.2,
        device: kvoffload.Device | None = None,
        **options: Any,
    ) -> None:
        if store not in ("filled", "evicted"):
            raise ValueError(f"store must be 'filled' or 'evicted', got {store!r}")
        arrays, self._tree = _arrays_of(engine)
        self._engine, self._identity, self._deadline = engine, identity, deadline
        self.stores_evicted = store == "evicted"
        self._page_tokens = int(arrays[0].shape[1])
        self._keys_of: dict[str, list[bytes]] = {}  # of each request, as far as they were needed
        self._key_of_page: dict[int, bytes] = {}  # with "evicted": what a page holds, since it was full
        self._failure: BaseException | None = None
        self._closed = False
        self._counts = Statistics()
        if "disk" in options:
            options["identity"] = identity
        with ExitStack() as undo:
            if device is None:
                device = undo.enter_context(_open_device(arrays[0]))
            self._owned = OwnedCache(
                device,
                arrays,
                adopt=True,
                block_axis=0,
                plane_axis=None,
                tokens_per_block=self._page_tokens,
                block_axes=("tokens", "heads", "dim"),
            )
            self.cache = undo.enter_context(kvoffload.open_cache(self._owned, pool_bytes=pool_bytes, **options))
            with engine._scheduler_lock:
                self._wraps = undo.enter_context(ExitStack())
                self._wrap_engine()
                self._wrap_scheduler()
            self._undo = undo.pop_all()

    @property
    def statistics(self) -> Statistics:
        return self._counts

    def close(self) -> None:
        """Give the engine new arrays and an empty prefix cache, and free the host memory. Idempotent.

        Raises:
            RuntimeError: requests are running.
        """
        if self._closed:
            return
        engine = self._engine
        with engine._scheduler_lock:
            _check_idle(engine)
            self._manager.page_pool.reset_prefix_cache()
            self._closed = True
            self._undo.close()
            engine.runner.destroy_kv_cache()
            engine.runner.initialize_kv_cache()

    def __enter__(self) -> HostCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wrap_engine(self) -> None:
        engine, executor = self._engine, self._engine.runner.executor_manager
        kind = type(executor)
        pages = property(lambda _: self._read_pages(), lambda _, pages: self._write_pages(pages))
        executor.__class__ = type(kind.__name__, (kind,), {"kv_pages": pages})
        self._wraps.callback(setattr, executor, "__class__", kind)
        self._wrap(engine.runner, "execute_model", self._execute_model)
        self._wrap(engine, "update_model_weights", self._update_model_weights)

    def _wrap_scheduler(self) -> None:
        self._manager = self._engine.scheduler.kv_cache_manager
        self._wrap(self._manager, "get_computed_pages", self._get_computed_pages)
        self._wrap(self._manager, "reset_prefix_cache", self._reset_prefix_cache)
        self._wrap(self._manager, "free_page_hashes", self._free_page_hashes)
        if self.stores_evicted:
            self._wrap(self._manager.page_pool, "get_new_pages", self._get_new_pages)

    def _wrap(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let `owner.name(...)` call `function(plain, ...)`, where `plain` is what it called before."""
        plain = getattr(owner, name)
        setattr(owner, name, partial(function, plain))
        self._wraps.callback(setattr, owner, name, plain)

    # 1. allocation ------------------------------------------------------------------------------------------------

    def _read_pages(self) -> Any:
        """The arrays for a step, which follows all transfers so far."""
        if self._failure is not None:
            raise RuntimeError(
                "a step of the model has failed, and eSurge counts its tokens as computed, so pages may hold anything: "
                "make a new engine"
            ) from self._failure
        return self._tree.unflatten(self._owned.arrays)

    def _write_pages(self, pages: Any) -> None:
        """What a step has returned. None: eSurge pauses, and would free the arrays, but goes on to use the pages of its
        prefix cache when it resumes. They stay.
        """
        if pages is not None:
            self._owned.arrays = jax.tree.leaves(pages)

    # 2. look-up, 3. load ------------------------------------------------------------------------------------------

    def _get_computed_pages(self, plain: Callable[..., Any], request: Any, **options: Any) -> Any:
        pages, tokens = plain(request, **options)
        wants_all = request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None
        if not wants_all and not request.has_vision and self._load(request, pages.pages[0]):
            pages, tokens = plain(request, **options)
        return pages, tokens

    def _load(self, request: Any, on_device: list[Any]) -> bool:
        """Load pages behind those that are on the device, and enter them into eSurge's prefix cache."""
        pool, hashes = self._manager.page_pool, self._manager.req_to_page_hashes[request.request_id]
        first = request.request_id not in self._keys_of  # else it is asked again: it did not fit
        full = min(len(hashes), (request.num_tokens - 1) // self._page_tokens)  # one token is always computed
        keys = self._keys(request, full)[len(on_device) :]
        begun, loaded = time.perf_counter(), list[Any]()
        pool.touch((on_device,))  # else `get_new_pages` might take them
        try:
            keys = keys[: max(0, pool.get_num_free_pages() - 1)]
            with self.cache.promote(keys, deadline=self._deadline, counted=first) as promotion:
                hits = promotion.wait()
                if hits:
                    loaded = pool.get_new_pages(hits)
                    self.cache.load(keys[:hits], [page.page_id for page in loaded], after=self._owned).wait()
                    end = len(on_device) + hits
                    pool.cache_full_pages(
                        request, on_device + loaded, hashes, len(on_device), end, self._page_tokens, kv_cache_group_id=0
                    )
                    self._note_keys(loaded, keys)
            self._count(requests=first, host_tokens=hits * self._page_tokens)
        except kvoffload.KVOffloadError:
            self._count(requests=first, failed_loads=1)
            return False
        finally:
            pool.free_pages(reversed(loaded))  # free, but found by their hashes until they are taken; the last go first
            pool.free_pages(reversed(on_device))
            self._count(load_seconds=time.perf_counter() - begun)
        return hits > 0

    def _keys(self, request: Any, count: int) -> list[bytes]:
        """The keys of its first `count` pages."""
        keys, size = self._keys_of.setdefault(request.request_id, []), self._page_tokens
        if len(keys) < count:
            tokens = list(request.all_token_ids[len(keys) * size : count * size])
            keys += self.cache.keys(tokens, salt=self._identity, parent=keys[-1] if keys else None)
        return keys[:count]

    # 4. store -----------------------------------------------------------------------------------------------------

    def _execute_model(self, plain: Callable[..., Any], output: Any) -> Any:
        try:
            result = plain(output)
        except BaseException as error:
            self._failure = error if output.num_scheduled_tokens else self._failure
            raise
        with self._engine._scheduler_lock:  # no request is aborted meanwhile
            for name, count in output.num_scheduled_tokens.items():
                request = self._engine.scheduler.requests.get(name)
                if request is not None and not request.has_vision:
                    self._computed(request, count)
        return result

    def _computed(self, request: Any, count: int) -> None:
        """A step has computed `count` more tokens of a request."""
        size, end = self._page_tokens, request.num_computed_tokens
        full, filled = end // size, (end - count) // size
        if full > filled:
            pages = self._manager.coordinator.get_pages(request.request_id)[0][:full]
            keys = self._keys(request, full)
            self._note_keys(pages, keys)
            if not self.stores_evicted:  # all pages so far: those that are there stay, and those declined may fit now
                self._store(keys, [page.page_id for page in pages])

    def _get_new_pages(self, plain: Callable[..., Any], count: int, **options: Any) -> Any:
        pages = plain(count, **options)
        taken = [page.page_id for page in pages if page.page_id in self._key_of_page]
        evicted = {self._key_of_page.pop(page): page for page in taken}
        if evicted:
            self._store(list(evicted), list(evicted.values()))
        return pages

    def _note_keys(self, pages: list[Any], keys: list[bytes]) -> None:
        if self.stores_evicted:
            self._key_of_page.update(zip((page.page_id for page in pages), keys, strict=False))

    def _store(self, keys: list[bytes], pages: list[int]) -> None:
        begun = time.perf_counter()
        try:
            self._count(stored_pages=len(self.cache.store(keys, pages, after=self._owned).keys))
        except kvoffload.KVOffloadError:
            self._count(failed_stores=1)
        self._count(store_seconds=time.perf_counter() - begun)

    def _free_page_hashes(self, plain: Callable[..., Any], request: Any) -> None:
        """A request has ended: its keys were used."""
        plain(request)
        self.cache.touch(self._keys_of.pop(request.request_id, []))

    # 5. reset -----------------------------------------------------------------------------------------------------

    def _reset_prefix_cache(self, plain: Callable[[], bool]) -> bool:
        """False: requests are running, and nothing is reset."""
        done = plain()
        if done:
            self._forget()
        return done

    def _update_model_weights(
        self, plain: Callable[..., Any], *args: Any, restart_scheduler: bool = True, **options: Any
    ) -> None:
        """Methods of the new scheduler are wrapped before it starts. eSurge makes an asynchronous one, whatever the
        engine was made with; so it is made once more.
        """
        engine, kind = self._engine, type(self._engine.scheduler)
        was_running = engine._scheduler_running
        plain(*args, restart_scheduler=False, **options)
        engine.scheduler = kind.from_runner(
            engine.runner,
            max_num_batched_tokens=engine._scheduler_max_num_batched_tokens,
            enable_prefix_caching=True,
            async_scheduling=False,
        )
        self._forget()
        self._wrap_scheduler()
        if restart_scheduler and was_running:
            engine.initiate()

    def _forget(self) -> None:
        self._key_of_page.clear()
        self.cache.clear()

    def _count(self, **more: float) -> None:
        self._counts = replace(
            self._counts, **{name: getattr(self._counts, name) + each for name, each in more.items()}
        )


def _arrays_of(engine: Any) -> tuple[list[Any], Any]:
    """The arrays of an engine's KV cache and the structure of their tree, if a HostCache can be made over it."""
    found = importlib.metadata.version("easydel")
    if found != EASYDEL:
        raise kvoffload.CapabilityError(
            f"this adapter wraps methods of EasyDeL {EASYDEL}, and {found} is installed: pip install easydel=={EASYDEL}"
        )
    _check_idle(engine)
    executor = engine.runner.executor_manager
    if isinstance(getattr(type(executor), "kv_pages", None), property):
        raise RuntimeError("the engine has a HostCache: close that one first")
    manager, pages = engine.scheduler.kv_cache_manager, executor.kv_pages
    arrays, tree = jax.tree.flatten(pages)
    kinds = [type(view).__name__ for view in getattr(pages, "views", ())]
    groups = [type(group.kv_cache_spec).__name__ for group in manager.kv_cache_groups]
    for wrong, said in (
        (engine._overlap_execution, "overlap_execution=True: make the engine with overlap_execution=False"),
        (
            engine.scheduler.scheduler_config.async_scheduling,
            "async_scheduling=True: make the engine with async_scheduling=False",
        ),
        (not manager.enable_caching, "no prefix cache: make the engine with enable_prefix_caching=True"),
        (groups != ["FullAttentionSpec"], f"other caches than one of full attention: {groups}"),
        ({*kinds} != {"UnifiedAttentionCacheView"}, f"other layers than unified_attention: {sorted({*kinds})}"),
        (len(arrays) != 2 * len(kinds), f"{len(arrays)} arrays for {len(kinds)} layers: no quantized cache"),
        (arrays and len(arrays[0].devices()) > 1, "several devices"),
    ):
        if wrong:
            raise kvoffload.CapabilityError(f"the engine has {said}")
    return arrays, tree


def _check_idle(engine: Any) -> None:
    if requests := engine.num_running_requests + engine.num_pending_requests:
        raise RuntimeError(f"{requests} requests are running: wait until they have ended")


def _open_device(array: Any) -> kvoffload.Device:
    """The device of an array of JAX; on the CPU a simulated one."""
    place = next(iter(array.devices()))
    if place.platform == "cpu":
        return kvoffload.open_device(backend="simulated")
    return kvoffload.open_device(place.local_hardware_id)
