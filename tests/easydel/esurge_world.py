"""Random conversations on an eSurge engine with a host cache: every byte that a step reads is compared.

The oracle knows what each token's keys and values are: they depend on the tokens up to it alone, so what a step has
computed for a token is right for all requests that begin alike. In float32, with steps of one size, two computations of
it give the same bytes, whichever request, batch or place in a step; so do the tokens that follow.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from esurge_host_cache import HostCache
from small_esurge import Sizes, new_request, run_step

import kvoffload

SMALL = Sizes(pages=18, longest=96)  # for the CPU: 17 pages of 8 tokens can be used
ON_A_GPU = Sizes(  # the same, in shapes that the kernels there take
    hidden=512,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=512,
    page_tokens=16,
    pages=18,
    longest=192,
    token_steps=(64,),
    dtype=os.environ.get("KVOFFLOAD_ESURGE_DTYPE", "float32"),
)
_DRIVER_CALLS = ("cuMemcpy3DBatchAsync", "cuMemcpyBatchAsync", "cuEventRecord", "cuStreamWaitEvent")


@dataclass(frozen=True)
class Setting:
    """What a run does.

    Attributes:
        pages: of the host.
        requests: of a run, three quarters of which go on where others have ended.
        abort, reset: how often, a step, and when no request is running.
        fail: how often a load or store does.
    """

    store: Literal["filled", "evicted"] = "filled"
    pages: int = 200
    requests: int = 20
    abort: float = 0.01
    reset: float = 0.0
    fail: float = 0.0


class Oracle:
    """What the keys and values of a token are, and which token follows.

    Attributes:
        exact: whether all computations of a token must agree. (On a GPU kernels may sum in another order by the batch;
            then what is read must be one of the results.)
    """

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact
        self.rows: dict[bytes, set[bytes]] = defaultdict(set)
        self.following: dict[bytes, set[int]] = defaultdict(set)

    @staticmethod
    def prefixes(tokens: Sequence[int]) -> list[bytes]:
        """A digest of the tokens up to each, itself included."""
        digests, last = [], b""
        for token in tokens:
            last = blake2b(last + int(token).to_bytes(4, "little"), digest_size=16).digest()
            digests.append(last)
        return digests


class World:
    """A run; close `host` after it. Its requests and faults follow from the seed.

    Attributes:
        wrong: tokens whose bytes were not those that were computed for them when a step read them.
        counts: of what happened.
        ended: of each request that was not aborted, how long its prompt was, and all its tokens.
    """

    def __init__(self, engine: Any, sizes: Sizes, setting: Setting, oracle: Oracle, seed: int, **options: Any) -> None:
        self.engine, self.sizes, self.setting, self.oracle = engine, sizes, setting, oracle
        self.random = Random(seed)
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.ended: list[tuple[int, list[int]]] = []
        self._requests: dict[str, Any] = {}
        self._before: Any = None  # copies of all pages, around the last step
        self._after: Any = None
        self.host = HostCache(
            engine, pool_bytes=setting.pages * sizes.page_bytes, identity="random", store=setting.store, **options
        )
        cache: Any = self.host.cache
        cache.load, cache.store = self._failing(cache.load), self._failing(cache.store)

    # requests -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Conversations that share beginnings, up to four at a time."""
        size, longest = self.sizes.page_tokens, self.sizes.longest
        histories = [self._words(self.random.randrange(2, 5) * size) for _ in range(3)]
        waiting = self.setting.requests
        while waiting or self._requests:
            while waiting and len(self._requests) < self.random.randrange(1, 5):
                before = self.random.choice(histories)[: longest - 4 * size]
                prompt = before + self._words(self.random.randrange(1, 2 * size))
                self._add(str(waiting), prompt, self.random.randrange(1, size + 2))
                waiting -= 1
            histories += self.step()
            if not self._requests and self.random.random() < self.setting.reset:
                assert self.engine.scheduler.reset_prefix_cache()
                assert self.host.cache.statistics().resident == 0
                self.counts["resets"] += 1
        run_step(self.engine)  # it hears of the last that have ended

    def _add(self, name: str, prompt: list[int], new_tokens: int) -> None:
        self._requests[name] = request = new_request(name, prompt, new_tokens)
        self.engine.scheduler.add_request(request)

    def _words(self, count: int) -> list[int]:
        return [self.random.randrange(self.sizes.vocabulary - 2) for _ in range(count)]

    def step(self) -> list[list[int]]:
        """A step of the engine. Returns the tokens of each request that has ended."""
        from easydel.inference.esurge.request import EngineRequestStatus

        scheduler, runner = self.engine.scheduler, self.engine.runner
        if self._requests and self.random.random() < self.setting.abort:
            name = self.random.choice(list(self._requests))
            scheduler.finish_requests(name, EngineRequestStatus.FINISHED_ABORTED)
            del self._requests[name]
            self.counts["aborted"] += 1
        output = scheduler.schedule()
        work = [(scheduler.requests[name], count) for name, count in output.num_scheduled_tokens.items()]
        tables = [scheduler.kv_cache_manager.get_page_ids(request.request_id)[0] for request, _ in work]
        with self._around_the_model():
            result = runner.execute_model(output)
        if work:
            begun = [request.num_computed_tokens - count for request, count in work]
            self._compare(list(zip([request for request, _ in work], tables, begun, strict=True)))
        scheduler.update_from_output(output, result)
        self.counts["steps"] += 1
        self.counts["preempted"] += len(output.preempted_req_ids or ())
        ended = [name for name, request in self._requests.items() if request.is_finished()]
        return [self._check_tokens(self._requests.pop(name)) for name in ended]

    # the oracle ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _around_the_model(self) -> Iterator[None]:
        """Copy all pages before and after a step: on the device, in the order of JAX's work, so nothing waits more."""
        executor, copy = self.engine.runner.executor_manager, _copier()
        plain = executor.execute_model
        self._before = None

        def execute_model(**given: Any) -> Any:
            if self._before is None:
                self._before = copy(jax.tree.leaves(given["inputs"].kv_pages))
            outputs = plain(**given)
            self._after = copy(jax.tree.leaves(outputs.kv_pages))
            return outputs

        executor.execute_model = execute_model
        yield
        del executor.execute_model

    def _compare(self, computing: list[tuple[Any, list[int], int]]) -> None:
        """What a step has read and computed: requests, their pages, and where each has begun. The tokens before that it
        has read, perhaps from pages that another request has filled in the same step.
        """
        size = self.sizes.page_tokens
        before, after = (list(map(np.asarray, copies)) for copies in (self._before, self._after))
        new = {
            (table[place // size], place % size)
            for request, table, begin in computing
            for place in range(begin, request.num_computed_tokens)
        }
        reads = []
        for request, table, begin in computing:
            for place, prefix in enumerate(self.oracle.prefixes(request.all_token_ids[: request.num_computed_tokens])):
                row = table[place // size], place % size
                found = b"".join(copy[row].tobytes() for copy in (after if row in new else before))
                if place < begin:
                    reads.append((request.request_id, place, prefix, found))
                    continue
                known = self.oracle.rows[prefix]
                known.add(found)
                assert len(known) == 1 or not self.oracle.exact, f"token {place}, computed again, has other bytes"
        self.counts["compared tokens"] += len(reads)
        self.wrong += [
            f"request {name} reads wrong bytes of token {place}"
            for name, place, prefix, found in reads
            if found not in self.oracle.rows[prefix]
        ]

    def _check_tokens(self, request: Any) -> list[int]:
        tokens = list(request.all_token_ids)
        prefixes = self.oracle.prefixes(tokens)
        for place in range(request.num_prompt_tokens, len(tokens)):
            following = self.oracle.following[prefixes[place - 1]]
            following.add(tokens[place])
            assert len(following) == 1 or not self.oracle.exact, f"{following} follow the same tokens"
        self.ended.append((request.num_prompt_tokens, tokens))
        return tokens

    # faults -------------------------------------------------------------------------------------------------------

    def _failing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A load or store that fails now and then: refused; by a call of the driver; or a load at its end, when its
        pages have the bytes of others.
        """

        def transfer(keys: Sequence[bytes], pages: Sequence[int], *, after: Any) -> Any:
            if self.random.random() >= self.setting.fail:
                return plain(keys, pages, after=after)
            self.counts["faults"] += 1
            (device,) = self.host.cache.engine.devices
            kind = self.random.randrange(3)
            if kind == 0 and device.simulated:
                device.simulator.faults.fail_call(self.random.choice(_DRIVER_CALLS), self.random.randrange(1, 3))
                try:
                    return plain(keys, pages, after=after)
                finally:
                    device.simulator.faults.clear()
            if kind == 1 and plain.__name__ == "load":
                plain(keys[::-1], pages, after=after).wait()
                return SimpleNamespace(wait=_fail)
            return _fail()

        return transfer

    def check(self) -> None:
        """Nothing is held, and no request is left."""
        pool = self.engine.scheduler.kv_cache_manager.page_pool
        self.host.cache.engine.drain()
        self.host.cache.check()
        statistics = self.host.cache.statistics()
        assert (statistics.pending, statistics.pinned) == (0, 0), statistics
        assert pool.get_num_free_pages() == pool.num_pages - 1
        assert not self.host._keys_of
        self.counts["host tokens"] = self.host.statistics.host_tokens
        self.counts["stored pages"] = self.host.statistics.stored_pages
        self.counts["failed loads"] = self.host.statistics.failed_loads
        self.counts["failed stores"] = self.host.statistics.failed_stores


def sizes_here() -> Sizes:
    return ON_A_GPU if jax.default_backend() == "gpu" else SMALL


def compute(engine: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """A request alone, without a prefix cache of any kind. Returns its tokens."""
    manager = engine.scheduler.kv_cache_manager
    manager.enable_caching = False
    try:
        request = new_request("alone", prompt, new_tokens)
        engine.scheduler.add_request(request)
        while engine.scheduler.requests:
            run_step(engine)
        run_step(engine)
    finally:
        manager.enable_caching = True
    return list(request.all_token_ids)


def run_all(engine: Any, setting: Setting, seeds: Iterable[int]) -> Counter[str]:
    """A run with each seed, one oracle for all. Returns what happened in them."""
    sizes, total = sizes_here(), Counter[str]()
    oracle = Oracle(exact=sizes is SMALL)
    for seed in seeds:
        world = World(engine, sizes, setting, oracle, seed)
        with world.host:
            world.run()
            assert not world.wrong, (seed, world.wrong[:4])
            world.check()
        total += world.counts
    return total


def _fail() -> Any:
    raise kvoffload.TransferError("on purpose")


@lru_cache
def _copier() -> Callable[[list[Any]], list[Any]]:
    copied: Callable[[list[Any]], list[Any]] = jax.jit(lambda arrays: [jnp.copy(each) for each in arrays])
    return copied
