"""Continuous batching over a paged cache, with a prefix cache on the device and kvoffload below it.

    waiting    until a row of the batch, and blocks for the whole prompt, are free
    fetching   leading blocks that the device does not have come from host memory or the disk: `cache.fetch`
    prefill    the rest of the prompt, a chunk a step; then its blocks are shared, and stored: `cache.keep`
    decode     a token a step, with all others that decode
    finished   its blocks are free, and keep their keys

**The same tokens give the same bits**, whatever is evicted, loaded, preempted or computed at the same time:

- A step has one of two shapes: a chunk of `chunk_tokens` of one prompt, or a token of each of `batch` sequences. XLA
  computes a row in the same way whatever the other rows are, and wherever its blocks lie.
- A chunk begins at a multiple of `chunk_tokens`, even if its first blocks are there already. So a token of a prompt is
  always in the same row of the same shape.
- Prompts are computed in chunks, and answers token by token, also after a preemption. The two round differently, so
  only blocks of prompts are shared and stored: the next turn computes the last answer once more, as part of its prompt.
  With `share_generated` it need not, but if such a block is lost, what follows may be another answer.

Blocks are stored when a prompt has been computed, not when the device evicts them. So no request waits for a store, and
conversations survive a process that is killed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from paged_decode.model import BLOCK_TOKENS, NULL_BLOCK, ModelSize, Step

import kvoffload
import kvoffload.jax
from chat_server.blocks import DeviceBlocks
from chat_server.llama import Sampling, cache_shapes, compute_step
from chat_server.requests import BusyError, Deliver, FinishReason, Request, TooLongError, Wanted
from kvoffload.cache.policies import DEFAULT_POLICY, PolicyName
from kvoffload.layout.coding import CodecName

FETCH_SECONDS = 1.0  # then a prompt is computed instead of read from the disk
IDLE_SECONDS = 0.001  # between looks at fetches, if there is nothing else to do

log = logging.getLogger("chat_server")


@dataclass(frozen=True)
class EngineOptions:
    """What the engine may use.

    Attributes:
        identity: names the weights: whose bytes the blocks hold.
        dtype: of weights and cache, "float32" or "bfloat16".
        device_blocks: blocks of 16 tokens on the device; one of them takes padding.
        context_tokens: prompt and answer together have at most as many. Every step reads tables of this length.
        chunk_tokens: of a prompt, in one step.
        batch: sequences that are served at the same time.
        most_waiting: further requests are refused.
        offload: whether there is anything below the device.
        pool_bytes, disk, disk_bytes, prefill_tokens_per_second: as for `kvoffload.open_cache`.
        share_generated: whether blocks of answers are shared and stored, too.
        policy: of the cache.
        codec: of its slots, see `kvoffload.KVLayout`.
    """

    identity: str
    dtype: str = "float32"
    device_blocks: int = 256
    context_tokens: int = 1024
    chunk_tokens: int = 64
    batch: int = 8
    most_waiting: int = 256
    offload: bool = True
    pool_bytes: int = 1 << 30
    disk: Path | None = None
    disk_bytes: int = 0
    prefill_tokens_per_second: float | None = None
    share_generated: bool = False
    policy: PolicyName = DEFAULT_POLICY
    codec: CodecName = "raw"

    def __post_init__(self) -> None:
        for name, unit in {"context_tokens": BLOCK_TOKENS, "chunk_tokens": BLOCK_TOKENS, "batch": 1}.items():
            if (value := getattr(self, name)) < 1 or value % unit:
                raise ValueError(f"{name} must be a multiple of {unit} above 0, got {value}")
        if self.device_blocks < 2:
            raise ValueError(f"device_blocks must be at least 2, got {self.device_blocks}")


class Engine:
    """Serves requests. Call `step` until it returns False, or let a thread do so: `start`. Close it, or use `with`.

    `submit`, `cancel`, `save` and `restore` are for any thread.

    Attributes:
        cache: from `kvoffload.open_cache`; None without offload.
        longest: prompt and answer together have at most so many tokens.
        counts: tokens of prompts by where they were found, "device", "host", "disk" or "computed"; tokens that were
            "generated"; requests that were "preempted", "cancelled", and "failed_loads".
        error: what ended the thread.
    """

    def __init__(self, size: ModelSize, weights: dict[str, Any], options: EngineOptions) -> None:
        self.options = options
        self.longest = min(options.context_tokens, (options.device_blocks - 1) * BLOCK_TOKENS)
        self.counts: Counter[str] = Counter()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.blocks = DeviceBlocks(options.device_blocks)
        self.error: BaseException | None = None
        self._size, self._weights = size, weights
        self._next: tuple[str, dict[str, Any], threading.Event] | None = None  # weights that come before the next step
        self._changed, self._closing = threading.Condition(), False
        self._thread: threading.Thread | None = None
        shapes = cache_shapes(size, options.device_blocks)
        # bfloat16 lies in the cache as its bits, see `jax_layers.write`.
        dtype = "uint16" if options.dtype == "bfloat16" else options.dtype
        self.cache: kvoffload.BlockCache[Any] | None = None
        self._owned: Any = None
        if options.offload:
            self._open(shapes, dtype)
        else:
            self._owned = SimpleNamespace(arrays=[jnp.zeros(shape, dtype) for shape in shapes])
        # All that the bits of a block depend on, so that no other run's blocks are taken for ours. Where the blocks lie
        # is no part of it: a saved conversation goes on with another codec, pool or disk, or other device_blocks.
        identity = {
            "model": options.identity,
            "dtype": options.dtype,
            "chunk_tokens": str(options.chunk_tokens),
            "context_tokens": str(options.context_tokens),
            "generated": str(options.share_generated and options.batch),
            "backend": jax.default_backend(),
            "jax": jax.__version__,
        }
        self._salt = " ".join(identity.values())
        self._terms: dict[str, Any] = {"salt": self._salt, "identity": identity}  # of saved conversations

    def _open(self, shapes: list[tuple[int, ...]], dtype: str) -> None:
        options = self.options
        on_gpu = jax.default_backend() == "gpu"
        self._device = kvoffload.open_device(0) if on_gpu else kvoffload.open_device(backend="simulated")
        try:
            axes = ("tokens", "heads", "dim")
            paged: dict[str, Any] = {"block_axis": 0, "plane_axis": None, "tokens_per_block": BLOCK_TOKENS}
            self._owned = kvoffload.jax.OwnedCache(self._device, shapes, dtype, block_axes=axes, **paged)
            below = {"disk": options.disk, "disk_bytes": options.disk_bytes, "identity": options.identity}
            disk: dict[str, Any] = below if options.disk is not None else {}
            speed = options.prefill_tokens_per_second
            self.cache = kvoffload.open_cache(
                self._owned.layout.with_codec(options.codec),
                device=self._device,
                pool_bytes=options.pool_bytes,
                policy=options.policy,
                prefill_tokens_per_second=speed,
                **disk,
            )
        except BaseException:
            self._device.close()
            raise

    # for any thread -----------------------------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """True from `start` until `close`, or until an error has ended the thread."""
        return self._thread is not None and self._thread.is_alive() and not self._closing

    def submit(self, prompt: Sequence[int], wanted: Wanted, deliver: Deliver | None = None) -> Request:
        """Queue a request.

        Args:
            deliver: called in the engine's thread with each token, and with None after the last. It must not block.

        Raises:
            TooLongError: it does not fit into the context, or into the blocks of the device.
            BusyError: too many wait.
            RuntimeError: the engine is closed, or its thread has ended with `error`.
        """
        if not prompt or wanted.max_tokens < 1:
            raise ValueError(f"prompt and max_tokens must be at least 1 token, got {len(prompt)}, {wanted.max_tokens}")
        if len(prompt) + wanted.max_tokens > self.longest:
            raise TooLongError(
                f"the context has {self.longest} tokens, the prompt {len(prompt)}, and the answer up to "
                f"{wanted.max_tokens}: shorten the messages, or lower max_tokens"
            )
        request = Request(list(prompt), wanted, deliver)
        with self._changed:
            self._check_open()
            if len(self.waiting) >= self.options.most_waiting:
                raise BusyError(f"{len(self.waiting)} requests wait already: try again later")
            self.waiting.append(request)
            self._changed.notify()
        return request

    def cancel(self, request: Request) -> None:
        """Its client has gone: free its blocks soon. Idempotent, and nothing happens if it has finished."""
        with self._changed:
            request.cancelled = True
            self._changed.notify()

    def use_weights(self, name: str, weights: dict[str, Any]) -> None:
        """Compute with these weights from the next step on; returns when the thread has changed them. Requests that are
        being answered keep what they have said, and go on from there: their blocks are computed again.

        Raises:
            RuntimeError: the engine is closed, or its thread has ended with `error`.
        """
        done = threading.Event()
        with self._changed:
            if self._closing or self._next is not None:
                raise RuntimeError("the engine is closed, or is changing its weights")
            self._next = (name, weights, done)
            self._changed.notify()
        done.wait()
        if self.error is not None:
            raise RuntimeError(f"the engine has ended: {self.error!r}")

    def save(self, tokens: Sequence[int], path: str | Path) -> int:
        """Write the leading blocks of a prompt, as many as are below the device, into a file. It blocks. Returns how
        many tokens they hold.

        Raises:
            RuntimeError: the engine is closed, or has nothing below the device.
            The errors of `kvoffload.BlockCache.save`.
        """
        return self._below().save(path, tokens, **self._terms, progress=self._check_open)

    def restore(self, path: str | Path) -> kvoffload.Restored:
        """Let prompts find the blocks of a file that `save` has written, here or in another engine. It blocks.

        Raises:
            RuntimeError: the engine is closed, or has nothing below the device.
            The errors of `kvoffload.BlockCache.restore`. ValueError: the file does not fit.
        """
        return self._below().restore(path, **self._terms, progress=self._check_open)

    def _below(self) -> kvoffload.BlockCache[Any]:
        self._check_open()
        if self.cache is None:
            raise RuntimeError("the engine has nothing below the device")
        return self.cache

    def _check_open(self, *_: int) -> None:
        if self._closing:
            raise RuntimeError(f"the engine is closed: {self.error}")

    # the thread ---------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile both steps, so that no request waits for that."""
        for batch, length in ((1, self.options.chunk_tokens), (self.options.batch, 1)):
            self._run(Step.padding(batch, length, self.options.context_tokens // BLOCK_TOKENS), [])

    def start(self) -> None:
        """Serve in a thread of the engine's own until `close`."""
        self._thread = threading.Thread(target=self._serve, name="engine")
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._closing:
                if not self.step():
                    with self._changed:
                        if not self._closing and self._next is None:
                            self._changed.wait(IDLE_SECONDS if self.waiting or self.running else None)
        except BaseException as error:  # all requests end with it
            self.error = error
            log.exception("the engine has ended")
        self._finish_all()

    def _finish_all(self) -> None:
        self._closing = True
        for request in [*self.running, *self.waiting]:
            self._finish(request, "cancelled" if self.error is None else "error")
        if self._next is not None:
            self._next[2].set()

    def close(self) -> None:
        """End all requests, write what the disk has not got yet, and free everything. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self._finish_all()
        if self.cache is not None and not self._device.closed:
            self.cache.close()
            self._device.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # a step -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit who fits, then compute a chunk of one prompt, and a token of each sequence that decodes. False if there
        was nothing to compute.
        """
        if self._next is not None:
            self._change_weights(*self._next)
        self._drop_cancelled()
        while self.waiting and len(self.running) < self.options.batch and self._admit(self.waiting[0]):
            pass
        for request in self.running:
            if request.fetching:
                self._collect(request)
        computed = self._prefill()
        return self._decode() or computed

    def _change_weights(self, name: str, weights: dict[str, Any], done: threading.Event) -> None:
        """Between two steps: nothing that was computed with the weights before is used any more."""
        for request in reversed(self.running[:]):
            if request.job is not None:
                request.job.cancel()
                with suppress(kvoffload.KVOffloadError):
                    request.job.wait()  # it may be writing the blocks
            request.job, request.fetching, request.of_session = None, [], None
            self._send_back(request)
        for request in self.waiting:
            request.of_session = None  # opened again: what an open request stores is of the weights before
        self.blocks.forget()
        if self.cache is not None:
            self.cache.use_weights(name)
        self._weights, self._next = weights, None
        done.set()

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = [each for each in [*self.waiting, *self.running] if each.cancelled]
        for request in gone:
            if request.job is not None and not request.job.done:
                request.job.cancel()  # nothing may use its blocks until the job is done
            else:
                self._finish(request, "cancelled")

    def _admit(self, request: Request) -> bool:
        """Give it blocks, and begin to fetch. False if too few are free."""
        request.keys = request.keys or self._keys(request.prompt)
        usable = (len(request.prompt) - 1) // BLOCK_TOKENS  # at least one token is computed, which tells the next
        found = self.blocks.share(request.keys[:usable])
        missing = len(request.prompt) // BLOCK_TOKENS + 1 - len(found)
        if missing > self.blocks.free:
            self.blocks.give_back(found)
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.blocks = found + [self.blocks.take() for _ in range(missing)]
        request.computed = len(found) * BLOCK_TOKENS
        self._count(request, "device", request.computed)
        self._open_request(request)
        keys, blocks = request.keys[len(found) : usable], request.blocks[len(found) : usable]
        if self.cache is not None and request.may_fetch and keys:
            places = self.cache.locate(keys)
            try:
                request.job = self.cache.fetch(
                    keys, blocks, after=self._owned, deadline=FETCH_SECONDS, request=request.of_session
                )
                request.fetching = places
            except kvoffload.KVOffloadError as error:
                self._note_failure(error)
        return True

    def _open_request(self, request: Request) -> None:
        """Tell the cache which session it belongs to, and when the next request of that is due."""
        session, due = request.wanted.session, request.wanted.due
        if self.cache is None or session is None or request.of_session is not None:
            return
        request.of_session = self.cache.open_request(session=session)
        if due is not None:
            self.cache.hint("retain", session=session, ttl=due, due=due)

    def _collect(self, request: Request) -> None:
        """Note how much a fetch has found, once that is known. On a GPU others decode until the disk has answered; on
        the simulated device nothing may be computed while a load may be submitted, so there we wait.
        """
        assert request.job is not None
        if not (request.job.submitted or self._device.simulated):
            return
        places, request.fetching = request.fetching, []
        try:
            hits = request.job.hits
        except kvoffload.KVOffloadError as error:
            self._note_failure(error)
            hits = 0
        if not hits:
            request.job = None
        request.computed += hits * BLOCK_TOKENS
        for place in places[:hits]:
            self._count(request, "disk" if place == "disk" else "host", BLOCK_TOKENS)

    def _prefill(self) -> bool:
        """A chunk of the prompt that was admitted first."""
        request = next((each for each in self.running if each.in_prompt and each.ready), None)
        if request is None:
            return False
        chunk = self.options.chunk_tokens
        first = request.computed // chunk * chunk
        end = min(first + chunk, len(request.prompt))
        step = Step.padding(1, chunk, self.options.context_tokens // BLOCK_TOKENS)
        step.put(0, request.prompt, first, request.blocks)
        step.rows[0, : request.computed - first] = NULL_BLOCK * BLOCK_TOKENS  # these are there, perhaps shared
        (token,) = self._run(step, [request])
        if self._loaded(request):
            request.prompt_computed += end - request.computed
            self.counts["computed"] += end - request.computed
            request.computed = end
            if not request.in_prompt:
                self._share(request)
                self._take_token(request, token)
        return True

    def _decode(self) -> bool:
        """A token of each sequence whose prompt has been computed."""
        for request in list(self.running):
            while request in self.running and request.computed == len(request.blocks) * BLOCK_TOKENS:
                if self.blocks.free:
                    request.blocks.append(self.blocks.take())
                else:
                    self._preempt()
        rows = [each for each in self.running if each.ready and not each.in_prompt]
        if not rows:
            return False
        step = Step.padding(self.options.batch, 1, self.options.context_tokens // BLOCK_TOKENS)
        for row, request in enumerate(rows):
            step.put(row, request.tokens, request.computed, request.blocks)
        for request, token in zip(rows, self._run(step, rows), strict=True):
            request.computed += 1
            self._take_token(request, token)
        return True

    def _run(self, step: Step, rows: list[Request]) -> list[int]:
        """The next token of each row. Reading `arrays` makes JAX follow all transfers that were submitted so far."""
        sampling = Sampling(np.zeros(len(step.last), np.float32), np.zeros(len(step.last), np.uint32))
        for row, request in enumerate(rows):
            sampling.temperatures[row], sampling.seeds[row] = request.wanted.temperature, request.wanted.seed
        self._owned.arrays, tokens = compute_step(self._size, self._weights, self._owned.arrays, step, sampling)
        return list(map(int, np.asarray(tokens)[: len(rows)]))

    def _loaded(self, request: Request) -> bool:
        """Whether what was fetched has come, which JAX does not notice. If not, the request begins again and computes
        it. The step that has ended followed the load, so this does not wait.
        """
        if request.job is None:
            return True
        try:
            request.job.wait()
            return True
        except kvoffload.KVOffloadError as error:
            self._note_failure(error)
            request.may_fetch = False
            self._send_back(request)
            return False
        finally:
            request.job = None

    def _share(self, request: Request) -> None:
        """Let others find the full blocks: on the device, and below it."""
        full = request.computed // BLOCK_TOKENS
        if full > len(request.keys):
            request.keys = self._keys(request.tokens[: request.computed])
        keys, blocks = request.keys[request.shared : full], request.blocks[request.shared : full]
        request.shared = full
        for block, key in zip(blocks, keys, strict=True):
            self.blocks.publish(block, key)
        if self.cache is not None and keys:
            try:
                if request.of_session is None:
                    self.cache.keep(keys, blocks, after=self._owned)
                else:
                    keys, blocks = request.keys[:full], request.blocks[:full]
                    self.cache.store(keys, blocks, after=self._owned, request=request.of_session)
            except kvoffload.KVOffloadError as error:
                log.warning("blocks are not stored: %s", error)

    def _take_token(self, request: Request, token: int) -> None:
        """Append what follows the computed tokens, unless it is known, as after a preemption."""
        if request.computed < len(request.tokens):
            return
        if token in request.wanted.stop:
            self._finish(request, "stop")
            return
        request.generated.append(token)
        request.first_token = request.first_token or time.monotonic()
        self.counts["generated"] += 1
        self._deliver(request, token)
        if len(request.generated) == request.wanted.max_tokens:
            self._finish(request, "length")

    # leaving the batch --------------------------------------------------------------------------------------------

    def _preempt(self) -> None:
        """Take the blocks of the request that was admitted last; what it has shared can be found again."""
        request = next(each for each in reversed(self.running) if each.job is None)
        request.preemptions += 1
        self.counts["preempted"] += 1
        self._send_back(request)

    def _send_back(self, request: Request) -> None:
        self._release(request)
        with self._changed:
            self.waiting.appendleft(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if self.options.share_generated and reason in ("stop", "length"):
            self._share(request)
        self.counts["cancelled"] += reason == "cancelled"
        self._release(request)
        if request.of_session is not None and self.cache is not None and reason in ("stop", "length"):
            request.of_session.end()
            if request.wanted.last:
                self.cache.hint("release", session=request.wanted.session or "")
        request.finish_reason, request.finished = reason, time.monotonic()
        self._deliver(request, None)

    def _release(self, request: Request) -> None:
        with self._changed:
            for queue in (self.waiting, self.running):
                if request in queue:
                    queue.remove(request)
        self.blocks.give_back(request.blocks)
        request.blocks, request.computed, request.shared = [], 0, 0

    def _deliver(self, request: Request, token: int | None) -> None:
        assert request.deliver is not None
        try:
            request.deliver(token)
        except RuntimeError:  # the event loop of its client is closed
            request.cancelled = True

    def _keys(self, tokens: Sequence[int]) -> list[bytes]:
        """A key for each full block, which covers all tokens up to its end."""
        if self.cache is not None:
            return self.cache.keys(tokens, salt=self._salt)
        data, step = np.asarray(tokens, "<u4").tobytes(), 4 * BLOCK_TOKENS
        return [blake2b(data[:end]).digest() for end in range(step, len(data) + 1, step)]

    def _count(self, request: Request, place: str, tokens: int) -> None:
        request.hits[place] += tokens
        self.counts[place] += tokens

    def _note_failure(self, error: Exception) -> None:
        self.counts["failed_loads"] += 1
        log.warning("what could not be loaded is computed: %s", error)
