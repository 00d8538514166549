"""The logger "kvoffload": which lines are written, and that there are none by default and none for each transfer."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from growing import grows, wait_for_the_end
from helpers import COPY_ENGINE_ONLY, LEVELS, rig, simulated
from tier_classes import DictTier, attached
from tiering import SECONDS, keys, tiered

import kvoffload
from kvoffload import KVLayout, OffloadEngine, TransferError
from kvoffload.cache.policies import LRU
from kvoffload.device.pinned import PAGE_BYTES
from kvoffload.internal import cachefiles
from kvoffload.internal.log import LOGGER
from kvoffload.tiers import Origin, Outcome


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, logger="kvoffload"):
        yield caplog


def texts(lines: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [each.getMessage() for each in lines.records if each.levelno == level]


def test_opening_pinning_and_profile_are_logged(lines: pytest.LogCaptureFixture) -> None:
    with simulated() as device:
        layout = KVLayout([device.allocate_blocks(4, planes=2, block_bytes=64)])
        OffloadEngine(layout, device=device, num_slots=4).close()
    found = texts(lines, logging.INFO)
    assert any(
        text.startswith("opened simulated device 0 (") and "driver (13, 0), cuda-bindings (13, 3)" in text
        for text in found
    )
    [pinned] = [text for text in found if text.startswith("pinned 16384 bytes in ")]
    assert " s: 4 slots for device 0; profile: default for an unknown GPU" in pinned
    assert {each.name for each in lines.records} == {"kvoffload"}


@pytest.mark.parametrize("level", LEVELS)
def test_what_an_old_driver_lacks_is_a_warning(level: str, lines: pytest.LogCaptureFixture) -> None:
    with simulated(level=level) as device:
        missing = device.capabilities.missing
        batches = device.capabilities.flat_batch and device.capabilities.strided_batch
    found = [text for text in texts(lines, logging.WARNING) if "cannot be used on device 0: " in text]
    assert len(found) == (0 if batches else len(missing))
    assert batches or any(text.startswith("cuMemcpyBatchAsync cannot be used") for text in found)


def test_a_failed_transfer_is_one_warning(device: kvoffload.Device, lines: pytest.LogCaptureFixture) -> None:
    with rig(device) as bench:
        device.simulator.faults.fail_call("cuEventRecord", 2)
        job = bench.engine.store([1], [1])
        with pytest.raises(TransferError) as caught:
            job.wait(10)
        bench.engine.poll()
    assert texts(lines, logging.WARNING) == [str(caught.value)]


def test_a_lost_context_is_one_error(lines: pytest.LogCaptureFixture) -> None:
    with simulated() as device, rig(device) as bench:
        gate = bench.gate(bench.stream())
        jobs = [bench.engine.store([index], [index], after=bench.streams[0]) for index in range(3)]
        bench.device.simulator.faults.sticky()
        gate.open()
        for job in jobs:
            with pytest.raises(TransferError):
                job.wait(10)
        bench.streams.clear()
    [text] = texts(lines, logging.ERROR)
    assert text.startswith("the CUDA context is lost with 3 transfers in flight, which fail: ")
    assert texts(lines, logging.WARNING) == []


def test_closing_with_work_in_flight_is_logged(device: kvoffload.Device, lines: pytest.LogCaptureFixture) -> None:
    layout = KVLayout([device.allocate_blocks(4, planes=2, block_bytes=64)])
    engine = OffloadEngine(layout, device=device, num_slots=4)
    engine.store([0], [0])
    engine.close()
    found = [text for text in texts(lines, logging.INFO) if "is being closed" in text]
    assert found == ["an engine is being closed, and waits for 1 transfers"]


def test_transfers_that_end_well_are_not_logged(device: kvoffload.Device, lines: pytest.LogCaptureFixture) -> None:
    with rig(device) as bench:
        before = len(lines.records)
        for _ in range(3):
            bench.engine.store([1], [1]).wait(10)
            bench.engine.load([1], [2]).wait(10)
        assert len(lines.records) == before


def test_a_warning_of_the_library_is_logged_too(lines: pytest.LogCaptureFixture) -> None:
    cause = f"a cause of its own: {uuid.uuid4()}"  # each is warned about once in a process
    with pytest.warns(kvoffload.KVOffloadWarning):
        cachefiles.warn_once("the profile x is ignored", cause=cause)
    cachefiles.warn_once("the profile x is ignored", cause=cause)
    assert texts(lines, logging.WARNING) == ["the profile x is ignored"]


@pytest.fixture
def raising() -> Iterator[logging.Handler]:
    """A handler of the program's that raises for each warning."""

    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(f"no room for {record.getMessage()}")

    handler = Raising(logging.WARNING)
    logging.getLogger("kvoffload").addHandler(handler)
    yield handler
    logging.getLogger("kvoffload").removeHandler(handler)


@pytest.mark.usefixtures("raising")
def test_a_pool_knows_that_it_has_stopped_growing_whatever_a_handler_raises() -> None:
    with simulated(pinnable_bytes=5 * PAGE_BYTES) as device:
        layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=8)])
        with OffloadEngine(layout, device=device, pool_bytes=grows(8, PAGE_BYTES), **COPY_ENGINE_ONLY) as engine:
            wait_for_the_end(engine)
            assert engine.pinned_slots == 4


@pytest.mark.usefixtures("raising")
def test_the_thread_of_tiers_survives_what_a_handler_raises() -> None:
    class Breaking(LRU):
        breaks = False

        def insert(self, keys: Sequence[bytes]) -> None:
            if self.breaks and threading.current_thread().name == "kvoffload-tiers":
                self.breaks = False
                raise ZeroDivisionError
            super().insert(keys)

    policy = Breaking()
    with tiered(policy=policy) as bench:
        bench.written(range(4))
        policy.breaks = True
        assert bench.cache.promote(keys(range(4))).wait(SECONDS) == 0
        assert bench.cache.promote(keys(range(4))).wait(SECONDS) == 4


def test_the_thread_of_a_tier_survives_a_handler_that_exits() -> None:
    """In a thread SystemExit ends nothing but that: the job did not end."""

    class Failing(DictTier):
        def write_records(self, keys: Any, rows: Any, origin: Origin) -> Sequence[Outcome]:  # noqa: ARG002
            raise OSError("no room")

    handler = logging.Handler(logging.WARNING)
    handler.emit = sys.exit  # type: ignore[assignment,method-assign]
    tier = Failing(threads=1)
    with attached(tier, 4):
        logging.getLogger("kvoffload").addHandler(handler)
        try:
            for key in (b"first", b"second"):
                assert tier.put([key], [0]).wait(SECONDS) == [Outcome.FAILED]
            with pytest.raises(SystemExit):
                LOGGER.warning("as of a signal handler")
        finally:
            logging.getLogger("kvoffload").removeHandler(handler)


@pytest.mark.usefixtures("raising")
def test_a_record_that_is_wrong_is_an_error_all_the_same() -> None:
    with pytest.raises(TypeError, match="format"):
        LOGGER.warning("%d slots", "no")


def test_it_is_quiet_by_default() -> None:
    program = (
        "import kvoffload, kvoffload.testing\n"
        "old = kvoffload.testing.SimulatedDriver(driver_version=(12, 4))\n"
        "device = kvoffload.open_device(backend=old)\n"
        "layout = kvoffload.KVLayout([device.allocate_blocks(4, planes=2, block_bytes=64)])\n"
        "with kvoffload.OffloadEngine(layout, device=device, num_slots=4, staging_bytes=0) as engine:\n"
        "    device.simulator.faults.fail_call('cuEventRecord', 2)\n"
        "    try: engine.store([0], [0]).wait()\n"
        "    except kvoffload.TransferError: pass\n"
        "device.close()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("configure", "printed"),
    [
        ("", True),
        ("logging.getLogger('kvoffload').addHandler(logging.NullHandler())", False),
        ("logging.getLogger().addHandler(logging.NullHandler())", False),
    ],
)
def test_an_error_is_printed_unless_logging_is_configured(configure: str, printed: bool) -> None:
    program = f"import logging, kvoffload\n{configure}\nlogging.getLogger('kvoffload').error('a callback raised')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "a callback raised\n" if printed else "")
