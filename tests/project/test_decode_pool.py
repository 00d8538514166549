"""The examples that decode with a paged KV cache, when another process has computed the prefixes, in a shared pool."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from decoding import BOTH, HAS_JAX, ON_DEMAND, PREFETCHED, TIMES, check_run, counts, refusal, run, verdicts

from kvoffload.pool import PoolOwner

FROM_POOL, TO_POOL = "continued from the pool", "computed, put into the pool"
IN_POOL = re.compile(r"in the pool: (\d+) blocks; (\d+) hits of another process's")
FEW = ("--device", "simulated", "--turns", "2", "--generated", "2")


def check_both(output: str) -> None:
    """One process has stored the blocks of all turns, the other one has loaded prefixes of them, bit for bit."""
    owner, first, second = re.split(r"a process puts .*\n|that process has ended\n", output)
    assert re.fullmatch(r"process \d+ owns a pool of \d+ MiB\n", owner)
    assert set(counts(first)) == {TO_POOL}
    _, stored, _ = counts(first)[TO_POOL]
    check_run(second, PREFETCHED, ON_DEMAND, extra=FROM_POOL)
    _, stored_again, loaded = counts(second)[FROM_POOL]
    assert stored_again == 0 < loaded
    assert [tuple(map(int, found)) for found in IN_POOL.findall(output)] == [(stored, 0), (stored, loaded)]


@pytest.mark.parametrize("name", BOTH[1:] if HAS_JAX else BOTH[:1])
def test_a_process_continues_what_another_one_has_put_into_the_pool(name: str) -> None:
    output = run(name, *FEW, "--pool")
    check_both(output)
    assert TIMES.search(output) is None


@pytest.mark.long
def test_each_role_is_a_command_of_its_own_and_a_spoiled_block_is_noticed(tmp_path: Path) -> None:
    name, pool = BOTH[0], ("--pool", str(tmp_path / "pool"))
    with PoolOwner(tmp_path / "pool", nbytes=8 << 20):
        assert "RuntimeError: only 0 of " in refusal(name, *FEW, *pool, "--role", "read")
        assert set(counts(run(name, *FEW, *pool, "--role", "write"))) == {TO_POOL}
        assert verdicts(run(name, *FEW, *pool, "--role", "read"))[FROM_POOL] == "bitwise equal"
        said = verdicts(run(name, *FEW, *pool, "--role", "read", "--corrupt", exit_code=1))
    assert said[FROM_POOL] == "DIFFERENT"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "framework"), list(zip(BOTH, ("cupy", "jax"), strict=True)))
@pytest.mark.usefixtures("only_gpu")
def test_on_a_gpu(name: str, framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    output = run(name, "--small", "--pool", warnings="default")
    check_both(output)
    assert f"tokens/s of '{FROM_POOL}' do not compare" in output
