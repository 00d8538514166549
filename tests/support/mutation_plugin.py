"""Inside pytest, for `mutation_search`: records which test runs which lines, or runs chosen tests in an order.

What to do is in the JSON file that the environment names; what came of it is written to the file that it names.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

VARIABLE = "MUTATION_SEARCH"


class Orders:
    """Attributes:
    output: the file to write.
    package: whose lines are recorded.
    tests: to run, in this order; None: all, and what they run is recorded.
    """

    def __init__(self, path: str) -> None:
        given = json.loads(Path(path).read_text())
        self.output = Path(given["output"])
        self.package: str = given["package"]
        self.tests: list[str] | None = given["tests"]
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.results: dict[str, dict[str, Any]] = {}

    def write(self, report: object) -> None:
        self.output.write_text(json.dumps(report))

    def line(self, code: CodeType, line: int) -> object:
        """A line of the package has run; it is not told again before the next test."""
        if code.co_filename.startswith(self.package):
            self.lines[code.co_filename[len(self.package) :]].add(line)
        return sys.monitoring.DISABLE  # type: ignore[attr-defined, unused-ignore]


_orders = Orders(os.environ[VARIABLE])

if find_spec("xdist") is None:

    @pytest.fixture(scope="session")
    def worker_id() -> str:
        """As xdist says it where it is installed, and starts no workers."""
        return "master"


def pytest_configure() -> None:
    """Have lines told, where Python can (from 3.12)."""
    if _orders.tests is None and sys.version_info >= (3, 12):
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutation_search")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, _orders.line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only the chosen tests, in their order."""
    if _orders.tests is not None:
        places = {test: place for place, test in enumerate(_orders.tests)}
        left_out = [item for item in items if item.nodeid not in places]
        items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What the test runs, fixtures included; or which test is running, should it never end."""
    if _orders.tests is not None:
        _orders.write({"test": item.nodeid})
    else:
        _orders.lines.clear()
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()
    result = yield
    if _orders.tests is None and item.nodeid in _orders.results:
        _orders.results[item.nodeid]["lines"] = {file: sorted(lines) for file, lines in _orders.lines.items()}
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of recorded tests whether each passed, and its seconds; else the first test that fails."""
    if _orders.tests is None:
        known = _orders.results.setdefault(report.nodeid, {"seconds": 0.0, "passed": True, "lines": {}})
        known["seconds"] += report.duration
        known["passed"] &= report.passed
    elif report.failed:
        _orders.write({"test": report.nodeid, "failed": True, "says": str(report.longrepr)[-600:]})


def pytest_sessionfinish() -> None:
    """Write what was recorded."""
    if _orders.tests is None:
        if sys.version_info >= (3, 12):
            sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)
        _orders.write(_orders.results)
