"""The examples that decode with a paged KV cache, when another process has computed the prefixes and put them into a
store.
"""

from __future__ import annotations

import importlib.util
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from decoding import BOTH, EXAMPLES, ON_DEMAND, PREFETCHED, TIMES, check_run, counts, refusal, run, verdicts
from mooncake_servers import MooncakeServers, mooncake_program

from kvoffload.tiers import TierStatistics

FROM_STORE, TO_STORE = "continued from the store", "computed, put into the store"
BELOW = re.compile(r"below the host: (\d+) blocks written \(.*\), (\d+) read")
FEW = ("--device", "simulated", "--conversations", "4", "--turns", "2")


@pytest.mark.servers
def test_a_process_continues_what_another_one_has_put_into_a_store() -> None:
    mooncake_program("mooncake_client")
    output = run(BOTH[0], "--device", "simulated", "--store", "mooncake", "--start-store")
    first, second = output.split("that process has ended\n")
    assert set(counts(first)) == {TO_STORE}
    _, stored, _ = counts(first)[TO_STORE]
    check_run(second, PREFETCHED, ON_DEMAND, extra=FROM_STORE)
    evicted, stored_again, loaded = counts(second)[FROM_STORE]
    assert min(evicted, loaded) > 0
    assert stored_again == 0
    assert [tuple(map(int, found)) for found in BELOW.findall(output)] == [(stored, 0), (0, loaded)]
    assert f"{FROM_STORE}: 96 of 96 tokens" in second  # of the second and third turns
    assert TIMES.search(output) is None


@pytest.mark.servers
@pytest.mark.parametrize(("name", "corrupt"), [(BOTH[0], True), (BOTH[1], False)])
def test_each_role_is_a_command_of_its_own(name: str, corrupt: bool, tmp_path: Path) -> None:
    with MooncakeServers(tmp_path) as servers:
        store = ("--store", "mooncake", f"master={servers.master.address}")
        if corrupt:
            assert "RuntimeError: only 0 of " in refusal(name, *FEW, *store, "--role", "read")
        assert set(counts(run(name, *FEW, *store, "--role", "write"))) == {TO_STORE}
        spoil = ("--corrupt",) if corrupt else ()
        said = verdicts(run(name, *FEW, *store, "--role", "read", *spoil, exit_code=int(corrupt)))
        assert said[FROM_STORE] == ("DIFFERENT" if corrupt else "bitwise equal")


@pytest.mark.servers
def test_a_store_that_does_not_answer_is_named() -> None:
    mooncake_program("mooncake_client")
    said = refusal(BOTH[0], *FEW, "--store", "mooncake", "master=127.0.0.1:9")
    assert "--store mooncake master=127.0.0.1:9 cannot be used: the connection is refused" in said
    assert "Traceback" not in said


def test_blocks_that_the_store_did_not_take_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    shared_store: Any = import_module("paged_decode.shared_store")
    shared_store.check_written(TierStatistics(written=7), 7)
    with pytest.raises(SystemExit, match=r"5 of 7 blocks are in the store \(2 declined, 0 failed\)"):
        shared_store.check_written(TierStatistics(written=5, declined=2), 7)


def test_a_server_that_ends_at_once_is_an_error_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    shared_store: Any = import_module("paged_decode.shared_store")
    with (
        pytest.raises(SystemExit, match=r"no\.such\.module has not started .*\(?pip install .*No module named"),
        shared_store.server("no.such.module", [], "http://127.0.0.1:9", b""),
    ):
        pass


@pytest.mark.gpu
@pytest.mark.servers
@pytest.mark.parametrize(("name", "framework"), list(zip(BOTH, ("cupy", "jax"), strict=True)))
@pytest.mark.usefixtures("only_gpu")
def test_on_a_gpu(name: str, framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    mooncake_program("mooncake_client")
    output = run(name, "--small", "--store", "mooncake", "--start-store", warnings="default")
    check_run(output.split("that process has ended\n")[1], PREFETCHED, ON_DEMAND, extra=FROM_STORE)
    assert f"tokens/s of '{FROM_STORE}' do not compare" in output
    assert TIMES.search(output) is not None
