"""The seam: errors translated, capabilities at every level, what is said where there is no driver."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from cuda.bindings import driver as bindings
from driver_levels import LEVELS

import kvoffload
from kvoffload import CapabilityError, DriverError, KVLayout, KVOffloadError, OffloadEngine
from kvoffload.copiers import why_not
from kvoffload.driver import Driver, StridedTable, cuda, functions
from kvoffload.testing import SimulatedDriver, check_clean_close

R = bindings.CUresult


class Api:
    """A driver API whose every function gives the same answer."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*_: Any) -> Any:
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer

        return call


def driver_of(answer: Any, raw: Any = None) -> Driver:
    return Driver(Api(answer), raw=raw, bindings_version=(13, 3), simulated=True)


# errors


def test_an_error_carries_the_call_and_cudas_name_and_number() -> None:
    with pytest.raises(DriverError) as caught:
        driver_of((R.CUDA_ERROR_INVALID_VALUE,)).call("cuMemFree", 5)
    error = caught.value
    assert (error.call, error.name, error.code) == ("cuMemFree", "CUDA_ERROR_INVALID_VALUE", 1)
    assert str(error) == "cuMemFree returned CUDA_ERROR_INVALID_VALUE (1)"
    assert not error.sticky


@pytest.mark.parametrize(
    ("code", "sticky"),
    [
        (R.CUDA_ERROR_ILLEGAL_ADDRESS, True),
        (R.CUDA_ERROR_LAUNCH_FAILED, True),
        (R.CUDA_ERROR_ECC_UNCORRECTABLE, True),
        (R.CUDA_ERROR_OUT_OF_MEMORY, False),
        (R.CUDA_ERROR_INVALID_HANDLE, False),
    ],
)
def test_sticky_errors_are_those_that_end_the_context(code: Any, sticky: bool) -> None:
    assert DriverError("cuMemcpyAsync", code.name, int(code)).sticky is sticky


def test_values_come_back_single_as_tuple_or_not_at_all() -> None:
    assert driver_of((R.CUDA_SUCCESS, 7)).call("cuDeviceGetCount") == 7
    assert driver_of((R.CUDA_SUCCESS, 7, 8)).call("cuMemGetInfo") == (7, 8)
    assert driver_of((R.CUDA_SUCCESS,)).call("cuMemFree", 1) is None


def test_queries_tell_not_ready_from_failure() -> None:
    assert driver_of((R.CUDA_SUCCESS,)).event_query(1) is True
    assert driver_of((R.CUDA_ERROR_NOT_READY,)).event_query(1) is False
    assert driver_of((R.CUDA_ERROR_NOT_READY,)).stream_query(1) is False
    with pytest.raises(DriverError, match="cuEventQuery returned CUDA_ERROR_ILLEGAL_ADDRESS"):
        driver_of((R.CUDA_ERROR_ILLEGAL_ADDRESS,)).event_query(1)


def test_a_function_that_the_driver_library_lacks_is_a_capability_error() -> None:
    missing = RuntimeError("function cuMemcpyBatchAsync is not found")  # what FunctionNotFoundError is
    with pytest.raises(CapabilityError, match=r"cuMemcpyBatchAsync cannot be called: function .* is not found"):
        driver_of(missing).call("cuMemcpyBatchAsync")


def test_a_simulator_verdict_is_not_taken_for_a_driver_error() -> None:
    with pytest.raises(AssertionError, match="undefined"):
        driver_of(AssertionError("undefined")).call("cuMemcpyAsync")


def test_raw_calls_translate_their_exceptions() -> None:
    class RawError(Exception):
        status = 700

    def fail(*_: Any) -> None:
        raise RawError("ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered")

    raw = type("Raw", (), {name: staticmethod(fail) for name in functions.RAW})
    driver = driver_of((R.CUDA_SUCCESS,), raw)
    driver.use_raw = True
    table = StridedTable(1, batched=True)
    with pytest.raises(DriverError, match="memcpy_3d_batch_async_v2 returned CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        driver.copy_strided_batch(table, 1, 5)
    assert caught.value.code == 700
    assert caught.value.sticky


@pytest.mark.parametrize("level", ["driver13.0-bindings13.3", "driver13.0-bindings13.5"])
def test_the_same_mistake_has_the_same_name_through_both_kinds_of_calls(level: str) -> None:
    driver_version, bindings_version = LEVELS[level]
    device = kvoffload.open_device(
        backend=SimulatedDriver(driver_version=driver_version, bindings_version=bindings_version)
    )
    table = StridedTable(1, batched=True)  # zeros: an operation without an extent
    with device.current():
        stream = device.driver.stream_create(0)
        with pytest.raises(DriverError) as caught:
            device.driver.copy_strided_batch(table, 1, stream)
        device.driver.stream_destroy(stream)
    assert (caught.value.name, caught.value.code) == ("CUDA_ERROR_INVALID_VALUE", 1)
    check_clean_close(device)


# the surface


def test_the_installed_bindings_offer_every_function_of_the_seam() -> None:
    assert [name for name in functions.REQUIRED + functions.OPTIONAL if not hasattr(bindings, name)] == []


def test_optional_functions_may_be_missing() -> None:
    class Old:
        def __getattr__(self, name: str) -> Any:
            if name in functions.OPTIONAL:
                raise AttributeError(name)
            return lambda *_: (R.CUDA_SUCCESS,)

    driver = Driver(Old(), raw=None, bindings_version=(12, 9), simulated=True)
    assert not any(driver.has(name) for name in functions.OPTIONAL + functions.RAW)
    assert driver.has("cuInit")


# capabilities

EXPECTED = {  # level: (flat and strided batch, raw addresses)
    "driver12.4-bindings12.9": (False, False),
    "driver12.8-bindings12.9": (True, False),
    "driver12.8-bindings13.3": (False, False),
    "driver13.0-bindings13.3": (True, False),
    "driver13.0-bindings13.5": (True, True),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.kernels
def test_pitfall_14_capabilities_at_every_level(level: str) -> None:
    driver_version, bindings_version = LEVELS[level]
    device = kvoffload.open_device(
        backend=SimulatedDriver(driver_version=driver_version, bindings_version=bindings_version)
    )
    found = device.capabilities
    batch, raw = EXPECTED[level]
    assert (found.flat_batch, found.strided_batch, found.raw_addresses) == (batch, batch, raw)
    assert device.driver.use_raw is raw
    assert (found.driver_version, found.bindings_version) == (driver_version, bindings_version)
    assert (found.compute_capability, found.copy_engines) == ((9, 0), 3)
    assert found.stream_memory_operations
    expected = set() if raw else {"raw addresses"}
    assert set(found.missing) == expected | (set() if batch else {"cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync"})
    assert (found.kernels, found.max_shared_bytes) == (True, 232448)
    assert {name for name, missing in why_not(found).items() if missing is not None} == (set() if batch else {"batch"})
    assert why_not(found, staging_bytes=0)["pack"] == "staging_bytes=0 forbids kernels"
    check_clean_close(device)


def test_why_not_names_what_is_needed_and_what_is_there() -> None:
    device = kvoffload.open_device(backend=SimulatedDriver(driver_version=(12, 8), bindings_version=(13, 3)))
    reason = why_not(device.capabilities)["batch"]
    assert reason == "cuda-bindings 13.3 need a CUDA driver >= 13.0 for cuMemcpyBatchAsync"
    with OffloadEngine(
        KVLayout([device.allocate_planes(1, block_bytes=16, num_blocks=2)]), device=device, num_slots=2
    ) as engine:
        with pytest.raises(
            CapabilityError, match=r"copier='batch' cannot run here: cuda-bindings 13.3 need .* >= 13.0"
        ):
            engine.store([0], [0], copier="batch")
        with pytest.raises(ValueError, match="copier must be one of strided, pack, batch, loop or None, got 'fast'"):
            engine.store([0], [0], copier="fast")  # type: ignore[arg-type]
    check_clean_close(device)


def test_a_capability_probe_leaves_nothing_queued() -> None:
    simulator = SimulatedDriver(bindings_version=(13, 5))
    with kvoffload.open_device(backend=simulator):
        assert simulator.pending_operations() == 0
        assert {name: count for name, count in simulator.leaks().items() if count} == {"primary_retains": 1}


def test_a_gpu_without_stream_memory_operations_is_seen_as_such() -> None:
    simulator = SimulatedDriver()
    for number in [key for key in simulator.attributes if simulator.attributes[key] == 1]:
        simulator.attributes[number] = 0
    with kvoffload.open_device(backend=simulator) as device:
        assert not device.capabilities.stream_memory_operations


# no driver


def test_without_a_usable_gpu_the_error_says_how_to_go_on() -> None:
    program = "import kvoffload; kvoffload.open_device()"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=hidden)
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith("kvoffload.errors.")
    assert 'open_device(backend="simulated")' in last_line
    assert "nvidia-smi" in last_line


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(RuntimeError("Failure finding libcuda.so"), CapabilityError), ((R.CUDA_ERROR_NO_DEVICE,), DriverError)],
)
def test_a_missing_library_and_a_missing_device_come_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, answer: Any, kind: type[KVOffloadError]
) -> None:
    def init(_: int) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(bindings, "cuInit", init)
    with pytest.raises(kind, match=r'nvidia-smi.* doctor.*open_device\(backend="simulated"\), .*--backend sim'):
        cuda.load()
    with kvoffload.open_device(backend="auto") as device:
        assert device.simulated


def test_bindings_that_are_too_old_are_refused_with_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.bindings as package

    monkeypatch.setattr(package, "__version__", "12.6.2")
    with pytest.raises(CapabilityError, match=r"cuda-bindings 12.6 is too old.*pip install 'cuda-bindings>=12.9'"):
        cuda.load()


def test_without_bindings_importing_works_and_opening_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['cuda'] = sys.modules['cuda.bindings'] = None\n"
        "import kvoffload\n"
        "try: kvoffload.open_device()\n"
        "except kvoffload.CapabilityError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert "pip install 'cuda-bindings>=12.9'" in done.stdout
