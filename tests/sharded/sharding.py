"""One device with an OffloadEngine, or several with a ShardedEngine over them, and what transfers should have done."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import COPY_ENGINE_ONLY, NON_BLOCKING, Gate

import kvoffload
from kvoffload import NO_WAIT, Job, KVLayout, OffloadEngine, ShardedEngine
from kvoffload.device.buffers import DeviceBuffer
from kvoffload.testing import Mirror, SimulatedDriver, check_clean_close, scramble
from kvoffload.tuning import CopierName

Bytes = npt.NDArray[np.uint8]
BLOCKS = 16


class Mirrors(list[Mirror]):
    """Of each device what a loop over blocks and planes would have done there."""

    def expect(self, *move: Any, **options: Any) -> None:
        for mirror in self:
            mirror.expect(*move, **options)

    def check(self) -> None:
        for mirror in self:
            mirror.check()


class Machine:
    """Devices of one simulated driver, a layout on each, and an engine over all of them.

    Args:
        counts: devices, each with so many planes in each group.
        block_bytes: of the planes of the first device; those of device `d` have `d` times 16 more.
        groups: of every layout.
        devices: to use; None: those of a new simulated driver.
        alone: an OffloadEngine over the one device.
        driver: options of the simulated driver.
        options: of the engine.
    """

    def __init__(
        self,
        counts: Sequence[int] = (3, 2),
        *,
        seed: int = 0,
        block_bytes: int = 64,
        groups: int = 1,
        blocks_per_slot: int = 1,
        devices: Sequence[kvoffload.Device] | None = None,
        alone: bool = False,
        driver: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._own = devices is None
        if devices is None:
            simulator = SimulatedDriver(
                device_count=len(counts), seed=seed, **{"deadlock_seconds": 0.3, **(driver or {})}
            )
            devices = [kvoffload.open_device(index, backend=simulator) for index in range(len(counts))]
        self.devices = list(devices)
        self.simulator: Any = devices[0].simulator
        self.buffers: list[list[DeviceBuffer]] = []
        layouts = []
        for number, (device, count) in enumerate(zip(self.devices, counts, strict=True)):
            planes = [
                device.allocate_planes(count, block_bytes=block_bytes + 16 * number, num_blocks=BLOCKS + group)
                for group in range(groups)
            ]
            owners: list[Any] = [each[0].owner for each in planes]
            self.buffers.append(owners)
            for index, buffer in enumerate(owners):
                scramble(buffer, seed + 10 * number + index)
            described: Any = {"dtype": "uint8", "tokens_per_block": 4, "block_axes": ("tokens",)}
            layouts.append(KVLayout(planes, blocks_per_slot=blocks_per_slot, **described))
        made = {"num_slots": 16, **COPY_ENGINE_ONLY, **options}
        self.layouts, self.alone = layouts, alone
        self.engine: Any = (
            OffloadEngine(layouts[0], device=self.devices[0], **made)
            if alone
            else ShardedEngine(layouts, devices=self.devices, **made)
        )
        for number, pool in enumerate(self.pools):
            pool[:] = np.random.default_rng(seed + 99 + number).integers(0, 256, pool.shape, dtype=np.uint8)
        self.streams: list[list[int]] = [[] for _ in counts]
        self.gates: list[Gate] = []

    def stream(self, device: int) -> int:
        with self.devices[device].current():
            handle = int(self.devices[device].driver.call("cuStreamCreateWithPriority", NON_BLOCKING, 0))
        self.streams[device].append(handle)
        return handle

    def one_each(self) -> list[int]:
        """A new stream of the caller's on every device."""
        return [self.stream(device) for device in range(len(self.devices))]

    def hold(self, device: int, stream: int) -> Gate:
        """A closed gate on a stream."""
        gate = Gate(self.devices[device])
        self.gates.append(gate)
        gate.hold(stream)
        return gate

    def marker(self, device: int) -> DeviceBuffer:
        """64 zero bytes on a device."""
        buffer = self.devices[device].allocate(64)
        buffer.copy_from(np.zeros(64, np.uint8))
        return buffer

    def fill(self, device: int, buffer: DeviceBuffer, value: int, stream: int) -> None:
        with self.devices[device].current():
            self.devices[device].driver.fill(buffer.address, value, buffer.nbytes, stream)

    @property
    def pools(self) -> list[Bytes]:
        """The slots of each device."""
        return [self.engine.slots] if self.alone else list(self.engine.slots)

    def of_each(self, streams: list[Any]) -> Any:
        """What the engine takes for a stream on each device."""
        return streams[0] if self.alone else streams

    def held(self, device: int = -1) -> tuple[Any, Gate]:
        """A new stream on each device, as the engine takes them, of which one is held; its gate."""
        streams = self.one_each()
        return self.of_each(streams), self.hold(device % len(streams), streams[device])

    def nbytes(self, blocks: int) -> int:
        """Bytes of so many blocks on all devices."""
        return blocks * sum(layout.groups[0].bytes_per_block for layout in self.layouts)

    def mirrors(self) -> Mirrors:
        """Of each device what is there now, for the loop over blocks and planes."""
        return Mirrors(
            Mirror(SimpleNamespace(layout=layout, slots=pool), buffers)  # type: ignore[arg-type]
            for layout, pool, buffers in zip(self.layouts, self.pools, self.buffers, strict=True)
        )

    def settle(self) -> None:
        """Let everything run that no gate holds."""
        if self.simulator is not None:
            self.simulator.run_all()
        else:
            time.sleep(0.02)

    def whole(self) -> None:
        """Nothing is in flight, and every stream and event is back in its pool."""
        statistics = self.engine.statistics()
        assert (statistics.in_flight, statistics.streams_in_use, statistics.events_in_use) == (0, 0, 0)

    def synchronize(self, device: int, stream: int) -> None:
        with self.devices[device].current():
            self.devices[device].driver.stream_synchronize(stream)

    def warm_up(self) -> None:
        """Make every kind of transfer once: the driver may synchronise when it does something first."""
        streams = self.one_each()
        for copier in ("strided", "batch", "loop", None):
            self.engine.store([0], [0], after=self.of_each(streams), copier=copier).wait(30)
            self.engine.load([0], [0], after=self.of_each(streams), copier=copier).order_before(self.of_each(streams))
        for number, stream in enumerate(streams):
            self.fill(number, self.marker(number), 1, stream)
            self.hold(number, stream).open()
            self.synchronize(number, stream)
        self.engine.drain(30)
        self.engine.poll()

    def close(self) -> None:
        for gate in self.gates:
            gate.open()
        self.engine.close(10)
        for device, streams in zip(self.devices, self.streams, strict=True):
            if not device.closed:
                with device.current():
                    device.driver.api.cuCtxSynchronize()
                    for stream in streams:
                        device.driver.stream_destroy(stream)
        for gate in self.gates:
            gate.close()
        if self._own:
            for device in self.devices[1:]:
                device.close(10)
            check_clean_close(self.devices[0])


@contextmanager
def machine(counts: Sequence[int] = (3, 2), **options: Any) -> Iterator[Machine]:
    made = Machine(counts, **options)
    try:
        yield made
    except BaseException:
        for gate in made.gates:
            gate.open()
        raise
    made.close()


@contextmanager
def gpus(first: kvoffload.Device, how: str) -> Iterator[list[kvoffload.Device]]:
    """Devices of two shards: "one GPU twice" or "two GPUs"; skips the test without a second one."""
    if how == "one GPU twice":
        yield [first, first]
        return
    try:
        other = kvoffload.open_device(0 if first.index else 1, backend="cuda")
    except (kvoffload.KVOffloadError, ValueError) as error:
        pytest.skip(f"needs a second GPU: {error}")
    with other:
        yield [first, other]


class RandomTransfers:
    """Random transfers of a machine, and the same done by loops."""

    def __init__(self, made: Machine, chance: np.random.Generator) -> None:
        self.made = made
        self.chance = chance
        self.mirrors = made.mirrors()
        self.streams = [[made.stream(device) for _ in range(2)] for device in range(len(made.devices))]
        self.copiers: list[CopierName | None] = ["strided", "batch", "loop", None]

    def after(self) -> Any:
        chance = self.chance
        if chance.random() < 0.3:
            return NO_WAIT
        choices: list[list[Any]] = [[NO_WAIT, None, streams[0], streams] for streams in self.streams]
        return [each[int(chance.integers(4))] for each in choices]

    def transfer(self) -> tuple[Job, dict[str, Any]]:
        """Submit one; what the loop is to do."""
        chance, layout = self.chance, self.made.engine.layout
        factor, group = layout.blocks_per_slot, int(chance.integers(layout.num_groups))
        first = int(chance.integers(factor))
        count = int(chance.integers(0, min(self.made.engine.num_slots * factor - first, BLOCKS) + 1))
        blocks = chance.permutation(layout.groups[group].num_blocks)[:count].tolist()
        slots = chance.permutation(self.made.engine.num_slots)[
            : layout.slots_for(count, first_sub_block=first)
        ].tolist()
        expected = {"blocks": blocks, "slots": slots, "group": group, "first_sub_block": first}
        copier = self.copiers[int(chance.integers(len(self.copiers)))]
        direction = "store" if chance.random() < 0.5 else "load"
        options: dict[str, Any] = {**expected, "copier": copier, "after": self.after()}
        if direction == "load" and chance.random() < 0.3:
            options |= {"parts": 2}
        job = self.made.engine.submit(direction, **options)
        if chance.random() < 0.3:
            job.order_before([streams[1] for streams in self.streams])
        return job, {"direction": direction, **expected}

    def check(self, count: int) -> list[Job]:
        """Submit many without waiting; when all have ended, compare every byte."""
        jobs = []
        for _ in range(count):
            job, expected = self.transfer()
            jobs.append(job)
            self.mirrors.expect(**expected)
        self.made.engine.drain(30)
        self.mirrors.check()
        assert all(job.outcome().error is None for job in jobs)
        return jobs
