"""Every wait matters on a GPU: each call that makes a stream wait is removed in turn, and bytes must then be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import Run, Site, run_mutant, wait_sites
from seeds import rest_long

import kvoffload

ORDER = str(Path(__file__).with_name("test_order.py"))
TESTS_PASSED, TESTS_FAILED = 0, 1

pytestmark = pytest.mark.timeout(300)


def order_tests(device: kvoffload.Device, folder: Path, module: str, line: int, column: int) -> Run:
    """Until the first one fails; on a device of the same kind."""
    options = ["-n", "0", "-p", "no:cacheprovider", "-q", "--no-header", "--tb=line", "--assert=plain", "-x"]
    kind = "not gpu" if device.simulated else "gpu"
    return run_mutant([module, str(line), str(column), *options, "-m", kind, ORDER], {}, folder / "output", seconds=240)


@pytest.mark.long
def test_the_bytes_are_right_with_every_wait_in_place(each_device: kvoffload.Device, tmp_path: Path) -> None:
    run = order_tests(each_device, tmp_path, "-", 0, 0)
    assert run.returncode == TESTS_PASSED, run.output
    assert " passed" in run.output, run.output


@pytest.mark.parametrize("site", rest_long([(site,) for site in wait_sites()], 4), ids=str)
def test_without_a_wait_bytes_are_wrong(each_device: kvoffload.Device, site: Site, tmp_path: Path) -> None:
    run = order_tests(each_device, tmp_path, site.module, site.line, site.column)
    place = f"{site.module.replace('.', '/')}.py:{site.line}: without this call of {site.name}"
    assert run.returncode == TESTS_FAILED, f"{place} no byte is wrong\n{run.output[-4000:]}"
    assert "wrong bytes" in run.output, f"{place}\n{run.output[-4000:]}"
