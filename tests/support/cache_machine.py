"""BlockCache beside a plain dictionary: random calls, failures and moments of completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from helpers import cache_state, keys, rig, simulated, whole
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CapacityError, KVLayout, MissingKeyError, OffloadEngine


class CacheMachine(RuleBasedStateMachine):
    """A BlockCache beside a dictionary in the order of use. Before each rule everything ends that no gate holds."""

    capacity = 5
    groups = 1
    factor = 1
    devices = 1

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed: int) -> None:
        self.device = simulated(seed, "no-batch", device_count=self.devices)
        self.simulator: Any = self.device.simulator
        self.context = rig(self.device, planes=2, block_bytes=16, num_blocks=64, num_slots=1)
        self.bench = self.context.__enter__()
        self.engine = self.make_engine()
        self.cache: BlockCache[Any] = BlockCache(self.engine, policy="lru")
        self.model: dict[bytes, tuple[list[int], kvoffload.CacheJob]] = {}  # least recently used first
        self.loads: list[tuple[bytes, list[int], int, kvoffload.CacheJob]] = []
        self.gate: Any = None
        self.held = self.bench.stream()
        self.expected = {"evicted": 0, "failed": 0}

    def make_engine(self) -> Any:
        layout = KVLayout([self.bench.planes] * self.groups, blocks_per_slot=self.factor)
        return OffloadEngine(layout, device=self.device, num_slots=self.capacity * self.groups)

    def follow(self) -> Any:
        """What follows the stream that a gate may hold."""
        return self.held

    def close_engine(self) -> None:
        self.engine.close()

    def check_loaded(self, target: int, source: int) -> None:
        """A block was loaded with what another one held when it was stored."""
        assert (self.bench.block(target) == source + 1).all()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.simulator.faults.clear()
            if self.gate is not None:
                self.gate.open()
            self.engine.drain(10)
            self.cache.check()
            whole(self.engine)
            self.close_engine()
            self.context.__exit__(None, None, None)
            self.device.close()
            assert self.simulator.violations == []

    def ids(self, base: int, count: int) -> Any:
        """Block ids for `count` keys: the same for every group, as they share their planes."""
        each = [(base + index) % 32 for index in range(count * self.factor)]
        return each if self.groups == 1 else [each] * self.groups

    def settle(self) -> None:
        self.simulator.run_all()
        self.engine.advance()
        for name, (_, job) in list(self.model.items()):
            if job.done and any(each.error is not None for each in job.jobs):
                del self.model[name]
                self.expected["failed"] += 1

    def in_use(self, name: bytes) -> bool:
        reading = any(name == loaded and not job.done for loaded, _, _, job in self.loads)
        return reading or not self.model[name][1].done

    @rule(
        numbers=st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True),
        base=st.integers(0, 31),
        held=st.booleans(),
    )
    def store(self, numbers: list[int], base: int, held: bool) -> None:
        self.settle()
        names = keys(*numbers)
        new = [name for name in names if name not in self.model]
        wanted = len(new) - (self.capacity - len(self.model))
        victims = [name for name in self.model if name not in names and not self.in_use(name)][: max(wanted, 0)]
        after = self.follow() if held else NO_WAIT
        before = cache_state(self.cache)
        if new and wanted > len(victims):
            with pytest.raises(CapacityError):
                self.cache.store(names, self.ids(base, len(names)), after=after, all_or_nothing=True)
            assert cache_state(self.cache) == before
            new = new[: len(new) - (wanted - len(victims))]
        job = self.cache.store(names, self.ids(base, len(names)), after=after)
        assert job.keys == tuple(new)
        for name in victims if new else []:
            del self.model[name]
            self.expected["evicted"] += 1
        for name in reversed(new):
            first = base + names.index(name) * self.factor
            self.model[name] = ([(first + index) % 32 for index in range(self.factor)], job)

    @rule(nth=st.integers(1, 3))
    def fail_a_copy_soon(self, nth: int) -> None:
        self.simulator.faults.clear()
        for name in ("cuMemcpyAsync", "cuMemcpy2DAsync", "cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync"):
            self.simulator.faults.fail_call(name, nth=nth)

    @rule()
    def no_more_failures(self) -> None:
        self.simulator.faults.clear()

    @rule(numbers=st.lists(st.integers(0, 11), min_size=1, max_size=3), held=st.booleans())
    def load(self, numbers: list[int], held: bool) -> None:
        self.settle()
        names = keys(*numbers)
        if len(self.loads) * 3 * self.factor + 32 >= 64 - 3 * self.factor:
            self.finish()
        target = 32 + len(self.loads) * 3 * self.factor
        ids = list(range(target, target + len(names) * self.factor))
        blocks = ids if self.groups == 1 else [ids] * self.groups
        after = self.follow() if held else NO_WAIT
        if not all(name in self.model and self.model[name][1].done for name in names):
            before = cache_state(self.cache)
            with pytest.raises(MissingKeyError):
                self.cache.load(names, blocks, after=after)
            assert cache_state(self.cache) == before
            return
        job = self.cache.load(names, blocks, after=after)
        for at, name in enumerate(names):
            self.loads.append((name, self.model[name][0], target + at * self.factor, job))
        self.use(names)

    def use(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            if name in self.model:
                self.model[name] = self.model.pop(name)

    @rule(numbers=st.lists(st.integers(0, 11), max_size=4))
    def touch(self, numbers: list[int]) -> None:
        self.settle()
        self.cache.touch(keys(*numbers))
        self.use(keys(*numbers))

    @precondition(lambda self: self.gate is None)
    @rule()
    def shut(self) -> None:
        self.gate = self.bench.gate(self.held)

    @rule()
    def finish(self) -> None:
        """Open the gate, let everything end, compare the bytes of the loads."""
        if self.gate is not None:
            self.gate.open()
            self.gate = None
        self.engine.drain(10)
        self.settle()
        for _, sources, target, job in self.loads:
            if all(each.error is None for each in job.jobs):
                for offset, source in enumerate(sources):
                    self.check_loaded(target + offset, source)
        self.loads.clear()
        self.engine.poll()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.settle()
        self.cache.check()
        assert list(self.cache._state.pools.all[0].policy) == list(self.model)
        for name, (_, job) in self.model.items():
            assert self.cache.lookup([name]) == int(job.done)
        statistics = self.cache.statistics()
        assert (statistics.evicted, statistics.failed) == (self.expected["evicted"], self.expected["failed"])
        assert statistics.resident == sum(job.done for _, job in self.model.values())


MACHINE_SETTINGS = settings(
    max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
