"""The chat server's engine: the same answers whatever is below the device, and everything is given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chatting import BLOCK_BYTES, ask, conversations, engine_of, prompt, run

pytest.importorskip("jax")

from chat_server.blocks import DeviceBlocks
from chat_server.engine import EngineOptions
from chat_server.requests import BusyError, TooLongError, Wanted

from kvoffload.layout.coding import CODECS, CodecName


@pytest.fixture(scope="module")
def unbounded() -> Iterator[list[list[int]]]:
    """Six conversations of three turns, on a device that has room for all."""
    with engine_of(device_blocks=600, offload=False) as engine:
        yield conversations(engine, 6, 3)
        assert engine.counts["preempted"] == 0


def all_free(engine: Any) -> bool:
    return bool(engine.blocks.free == engine.options.device_blocks - 1 and not engine.running and not engine.waiting)


def test_one_after_the_other_they_are_answered_the_same(unbounded: list[list[int]]) -> None:
    with engine_of(device_blocks=600, offload=False) as engine:
        assert conversations(engine, 6, 3, at_once=False) == unbounded
        assert engine.counts["device"] > 0
        assert all_free(engine)


@pytest.mark.parametrize("pool_blocks", [4, 20, 200])
def test_below_a_small_device_they_are_answered_the_same(unbounded: list[list[int]], pool_blocks: int) -> None:
    """What is found in the pool, and what is computed again since neither has it, has the same bits."""
    with engine_of(device_blocks=18, pool_bytes=pool_blocks * BLOCK_BYTES) as engine:
        assert conversations(engine, 6, 3) == unbounded
        assert all_free(engine)
        assert engine.counts["preempted"] > 0
        assert (engine.counts["host"] > 0) or pool_blocks < 20
        engine.cache.check()
        assert engine.cache.statistics().pinned == 0


@pytest.mark.parametrize("codec", CODECS)
def test_bfloat16_is_answered_the_same(codec: CodecName) -> None:
    """It rounds 65,536 times as coarsely as float32: every bit counts."""
    with engine_of(device_blocks=400, offload=False, dtype="bfloat16") as engine:
        expected = conversations(engine, 6, 3)
    with engine_of(device_blocks=18, dtype="bfloat16", codec=codec) as engine:
        assert conversations(engine, 6, 3) == expected
        assert min(engine.counts["host"], engine.counts["preempted"]) > 0
        assert engine.cache.statistics().unfit == 0


def test_without_offload_a_small_device_computes_more(unbounded: list[list[int]]) -> None:
    with engine_of(device_blocks=18, offload=False) as engine:
        assert conversations(engine, 6, 3) == unbounded
        assert engine.counts["host"] == engine.counts["disk"] == 0


def test_another_process_goes_on_from_the_disk(unbounded: list[list[int]], tmp_path: Path) -> None:
    disk = {"disk": tmp_path / "kv", "disk_bytes": 8 << 20, "pool_bytes": 100 * BLOCK_BYTES}
    for run_number in range(2):
        with engine_of(device_blocks=60, **disk) as engine:
            assert conversations(engine, 6, 3) == unbounded
            assert (engine.counts["disk"] > 0) == (run_number > 0)


def bits(engine: Any, request: Any) -> list[bytes]:
    """K and V of the tokens of a request that goes on."""
    arrays = [np.asarray(array) for array in engine._owned.arrays]
    tokens = [array[request.blocks].reshape(-1, 2, 16)[: request.computed] for array in arrays]
    return [each.tobytes() for each in tokens]


@pytest.mark.parametrize("blocks_there", [0, 1, 2, 3, 5])
def test_a_chunk_that_begins_among_blocks_that_are_there_has_the_same_bits(blocks_there: int) -> None:
    tokens = prompt(5, 90)
    with engine_of(device_blocks=60, offload=False) as engine:
        if blocks_there:
            run(engine, ask(engine, tokens[: 16 * blocks_there] + prompt(6, 3), 1))
        request = ask(engine, tokens, 20)
        while len(request.generated) < 10:
            engine.step()
        assert request.hits["device"] == 16 * blocks_there
        found = bits(engine, request)
    with engine_of(device_blocks=60, offload=False) as engine:
        others = [ask(engine, prompt(number, 50), 20) for number in range(3)]
        same = ask(engine, tokens, 20)
        while len(same.generated) < 10:
            engine.step()
        assert bits(engine, same) == found
        assert {len(other.generated) > 0 for other in others} == {True}


def needs_the_simulator(engine: Any) -> None:
    if not engine._device.simulated:
        pytest.skip("a GPU fails no call on demand")


def test_a_load_that_fails_is_computed(unbounded: list[list[int]]) -> None:
    with engine_of(device_blocks=18) as engine:
        needs_the_simulator(engine)
        failing = engine._device.simulator.faults
        fetch = engine.cache.fetch

        def failing_fetch(*given: Any, **options: Any) -> Any:
            failing.fail_call("cuStreamWaitEvent")
            failing.fail_call("cuEventRecord")
            try:
                return fetch(*given, **options)
            finally:
                failing.clear()

        engine.cache.fetch = failing_fetch
        assert conversations(engine, 6, 3) == unbounded
        assert engine.counts["failed_loads"] > 0
        assert all_free(engine)


class FailedJob:
    """A load that was submitted, and fails afterwards."""

    submitted = done = True

    def __init__(self, job: Any, error: Exception) -> None:
        self.hits, self._job, self._error = job.hits, job, error

    def wait(self) -> None:
        self._job.wait()
        raise self._error


def test_a_load_that_fails_afterwards_is_computed(unbounded: list[list[int]]) -> None:
    import kvoffload

    with engine_of(device_blocks=18) as engine:
        needs_the_simulator(engine)
        fetch = engine.cache.fetch

        def spoiled(keys: Any, blocks: Any, **options: Any) -> Any:
            job = fetch(keys, blocks, **options)
            hits = job.hits
            arrays = [array.at[np.array(blocks[:hits], int)].set(7) for array in engine._owned.arrays] if hits else None
            if arrays is not None:
                engine._owned.arrays = engine_step(engine, arrays)
            return FailedJob(job, kvoffload.TransferError("the load has failed"))

        def engine_step(engine: Any, arrays: Any) -> Any:
            import jax

            return jax.jit(lambda _, new: new, donate_argnums=0)(engine._owned.arrays, arrays)

        engine.cache.fetch = spoiled
        assert conversations(engine, 6, 3) == unbounded
        assert engine.counts["failed_loads"] > 0
        assert all_free(engine)


def test_a_request_that_is_cancelled_gives_everything_back() -> None:
    with engine_of(device_blocks=18) as engine:
        requests = [ask(engine, prompt(number, 100), 40) for number in range(6)]
        engine.step()
        engine.step()
        for request in (requests[5], requests[0]):  # one waits, one runs
            engine.cancel(request)
        answers = run(engine, *requests)
        assert [request.finish_reason for request in requests] == ["cancelled", *["length"] * 4, "cancelled"]
        assert [len(answer) for answer in answers[1:5]] == [40] * 4
        assert engine.counts["cancelled"] == 2
        engine.cancel(requests[1])
        engine.step()
        assert requests[1].finish_reason == "length"
        assert all_free(engine)


def test_what_does_not_fit_is_refused() -> None:
    with engine_of(device_blocks=10, offload=False, most_waiting=2) as engine:
        assert engine.longest == 9 * 16
        with pytest.raises(
            TooLongError, match="the context has 144 tokens, the prompt 140, and the answer up to 5: sh"
        ):
            ask(engine, prompt(0, 140), 5)
        for wrong in ([], [1]):
            with pytest.raises(ValueError, match="prompt and max_tokens must be at least 1 token"):
                engine.submit(wrong, Wanted(max_tokens=len(wrong) - 1))
        requests = [ask(engine, prompt(0, 140), 4) for _ in range(2)]
        with pytest.raises(BusyError, match="2 requests wait already"):
            ask(engine, prompt(0, 140), 4)
        run(engine, *requests)
    for request in (ask, lambda engine, tokens: engine.submit(tokens, Wanted())):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            request(engine, [1])
    for options, message in [
        ({"context_tokens": 40}, "context_tokens must be a multiple of 16 above 0, got 40"),
        ({"chunk_tokens": 0}, "chunk_tokens must be a multiple of 16 above 0, got 0"),
        ({"batch": 0}, "batch must be a multiple of 1 above 0, got 0"),
        ({"device_blocks": 1}, "device_blocks must be at least 2, got 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            EngineOptions("test", **options)  # type: ignore[arg-type]


def test_a_thread_serves_until_the_engine_is_closed() -> None:
    with engine_of(device_blocks=60) as engine:
        engine.warm_up()
        engine.start()
        first, second = ask(engine, prompt(1, 40)), ask(engine, prompt(2, 40))
        assert [len(list(first)), len(list(second))] == [12, 12]
        assert (first.finish_reason, 0 < first.submitted <= first.first_token <= first.finished) == ("length", True)
        endless = ask(engine, prompt(3, 40), 200)
        next(iter(endless))
    assert endless.finish_reason == "cancelled"
    engine.close()


def answers(engine: Any) -> list[list[int]]:
    """Of an engine that has a thread, to prompts that begin alike."""
    requests = [ask(engine, prompt(0, 40) + prompt(number, 20)) for number in range(4)]
    return [list(request) for request in requests]


def test_after_a_change_of_weights_answers_are_those_of_a_server_that_began_with_them() -> None:
    from chat_server import llama

    with engine_of(device_blocks=60, offload=False) as plain, engine_of(device_blocks=18) as engine:
        of = {name: llama.random_weights(engine._size, "float32", seed) for seed, name in enumerate(("", "one"))}
        expected = {}
        for each in (plain, engine):
            each.start()
        for name, weights in of.items():
            plain.use_weights(name, weights)
            expected[name] = answers(plain)
        assert expected[""] != expected["one"]
        for name in ("", "one", "", "one"):
            engine.use_weights(name, of[name])
            found = engine.counts["host"]
            assert answers(engine) == expected[name]
        assert engine.counts["host"] > found, "blocks of weights that are back"
        halfway = ask(engine, prompt(7, 40), 100)
        next(iter(halfway))
        engine.use_weights("", of[""])
        assert 1 + len(list(halfway)) == 100, "it goes on with the new weights"
        assert answers(engine) == expected[""]
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.use_weights("one", of["one"])


def test_an_error_of_the_thread_ends_all_requests() -> None:
    def deliver(token: int | None) -> None:
        if token is not None:
            raise ArithmeticError("on purpose")

    with engine_of(device_blocks=60, offload=False) as engine:
        failing = engine.submit(prompt(1, 40), Wanted(max_tokens=5), deliver)
        other = ask(engine, prompt(2, 40))
        engine.start()
        assert list(other) == []
        assert (failing.finish_reason, other.finish_reason) == ("error", "error")
        with pytest.raises(RuntimeError, match="the engine is closed: on purpose"):
            ask(engine, [1])


def test_answers_may_be_drawn() -> None:
    with engine_of(device_blocks=60, offload=False) as engine:
        drawn = [ask(engine, prompt(1, 40), 20, temperature=1.0, seed=seed) for seed in (1, 2, 1)]
        greedy = [ask(engine, prompt(1, 40), 20) for _ in range(1)]
        first, second, again, likeliest = run(engine, *drawn, *greedy)
        assert first == again != second
        assert likeliest not in (first, second)
        stopped = ask(engine, prompt(1, 40), 20, stop=frozenset(likeliest[5:6]))
        assert run(engine, stopped)[0] == likeliest[: likeliest.index(likeliest[5])]
        assert stopped.finish_reason == "stop"


def test_blocks_of_answers_may_be_shared() -> None:
    for share in (False, True):
        with engine_of(device_blocks=60, share_generated=share) as engine:
            request = ask(engine, prompt(1, 40), 30)
            run(engine, request)
            again = ask(engine, request.tokens + prompt(2, 5))
            run(engine, again)
            assert again.hits["device"] == (64 if share else 32)
            assert len(engine.cache) == (5 if share else 4)


def test_a_step_writes_into_the_cache_and_copies_nothing_of_it() -> None:
    """A copy of the whole cache, written back, would undo loads that are concurrent with the step."""
    import jax
    from chat_server import llama
    from chat_server.llama import Sampling, cache_shapes
    from paged_decode.model import ModelSize, Step

    size = ModelSize(2, 64, 4, 2, 16, 128, 256)
    weights = llama.random_weights(size, "bfloat16")
    cache = [jax.ShapeDtypeStruct(shape, "uint16") for shape in cache_shapes(size, 20000)]
    for batch, length in ((4, 1), (1, 32)):
        sampling = Sampling(np.zeros(batch, np.float32), np.zeros(batch, np.uint32))
        compiled = llama.compute_step.lower(size, weights, cache, Step.padding(batch, length, 10), sampling).compile()
        memory: Any = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == sum(array.size * 2 for array in cache)
        assert memory.temp_size_in_bytes < cache[0].size // 4


def test_free_blocks_keep_their_keys_until_they_are_needed() -> None:
    blocks = DeviceBlocks(5)
    first = [blocks.take() for _ in range(3)]
    for block, key in zip(first, (b"a", b"b", b"c"), strict=True):
        blocks.publish(block, key)
    assert blocks.share([b"a", b"b", b"z", b"c"]) == first[:2]
    blocks.give_back(first)
    assert blocks.free == 2, "two are still shared"
    blocks.give_back(first[:2])
    assert blocks.free == 4
    assert blocks.share([b"a", b"b", b"c"]) == first
    blocks.give_back(first)
    taken = [blocks.take() for _ in range(2)]
    assert taken == [4, first[2]], "one that was never used, then the end of the prefix"
    assert blocks.share([b"a", b"b", b"c"]) == first[:2]
    blocks.publish(taken[0], b"a")
    blocks.give_back(first[:2])
    assert blocks.share([b"a"]) == first[:1], "the first with a key keeps it"
