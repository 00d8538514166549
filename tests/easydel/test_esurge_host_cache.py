"""HostCache: what it refuses, what it leaves behind, and eSurge's own loop over it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from esurge_environment import need_easydel

need_easydel()

from esurge_host_cache import HostCache  # noqa: E402
from esurge_world import SMALL  # noqa: E402
from small_esurge import new_request, run_step  # noqa: E402

import kvoffload  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

POOL: dict[str, Any] = {"pool_bytes": 200 * SMALL.page_bytes, "identity": "random"}
PROMPT = [7 * number % 120 for number in range(60)]


@pytest.fixture
def host(engine: Any) -> Iterator[HostCache]:
    with HostCache(engine, **POOL) as made:
        yield made


def run(engine: Any, prompt: list[int], new_tokens: int = 5) -> list[int]:
    request = new_request("a request", prompt, new_tokens)
    engine.scheduler.add_request(request)
    while engine.scheduler.requests:
        run_step(engine)
    run_step(engine)
    return list(request.output_token_ids)


def push_out(engine: Any) -> None:
    """Let other prompts take all pages."""
    for number in range(3):
        run(engine, [(11 * place + number) % 125 for place in range(80)])


def test_a_prompt_comes_back_from_the_host(engine: Any, host: HostCache) -> None:
    tokens = run(engine, PROMPT)
    push_out(engine)
    assert run(engine, PROMPT) == tokens
    assert host.statistics.host_tokens == 56, "all but the last page, one of whose tokens is computed"
    assert run(engine, PROMPT) == tokens
    assert host.statistics.host_tokens == 56, "the second time the device has it"
    assert host.statistics.requests == 6


def test_a_disk_has_it_when_the_engine_is_new(engine: Any, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk": tmp_path / "kv", "disk_bytes": 64 << 20, "deadline": 30.0}
    with HostCache(engine, **POOL, **disk) as host:
        tokens = run(engine, PROMPT)
        push_out(engine)
        assert run(engine, PROMPT) == tokens, "asked for again, so it is worth a write"
        assert host.cache.drain(30)
    with HostCache(engine, **POOL, **disk) as host:
        assert run(engine, PROMPT) == tokens
        assert host.statistics.host_tokens == 56


def test_a_reset_clears_the_host(engine: Any, host: HostCache) -> None:
    run(engine, PROMPT)
    engine.scheduler.add_request(new_request("running", PROMPT, 5))
    run_step(engine)
    assert not engine.scheduler.reset_prefix_cache(), "a request is running"
    assert host.cache.statistics().resident > 0
    while engine.scheduler.requests:
        run_step(engine)
    assert engine.scheduler.reset_prefix_cache()
    assert host.cache.statistics().resident == 0
    run(engine, PROMPT)
    assert host.statistics.host_tokens == 0


def test_new_weights_clear_the_host(engine: Any, host: HostCache) -> None:
    tokens = run(engine, PROMPT)
    engine.update_model_weights(engine.runner.model, restart_scheduler=False)
    assert host.cache.statistics().resident == 0
    assert not engine.scheduler.scheduler_config.async_scheduling, "as it was"
    assert run(engine, PROMPT) == tokens
    push_out(engine)
    assert host.statistics.host_tokens == 0
    assert run(engine, PROMPT) == tokens
    assert host.statistics.host_tokens == 56, "the methods of the new scheduler are wrapped"


def test_it_leaves_the_engine_as_it_was(engine: Any) -> None:
    with HostCache(engine, **POOL):
        tokens = run(engine, PROMPT)
    assert run(engine, PROMPT) == tokens
    executor, manager = engine.runner.executor_manager, engine.scheduler.kv_cache_manager
    assert not isinstance(vars(type(executor)).get("kv_pages"), property)
    assert manager.get_computed_pages.__func__ is type(manager).get_computed_pages


def test_eSurges_own_loop_runs_over_it(engine: Any, host: HostCache) -> None:  # noqa: N802
    from easydel.inference.sampling_params import SamplingParams

    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)

    def answer(words: range) -> list[int]:
        (output,) = engine.generate(" ".join(f"w{word}" for word in words), sampling_params=sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    engine.initiate()
    try:
        tokens = answer(range(60))
        for begin in range(3):
            answer(range(begin, begin + 80))
        assert answer(range(60)) == tokens
        assert host.statistics.host_tokens > 0
    finally:
        engine.terminate()


def test_after_a_failed_step_none_runs(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """eSurge has counted its tokens as computed."""

    def fail(**_: Any) -> None:
        raise ArithmeticError("on purpose")

    with HostCache(engine, **POOL) as host:
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.executor_manager, "execute_model", fail)
            engine.scheduler.add_request(new_request("lost", PROMPT, 5))
            with pytest.raises(ArithmeticError):
                run_step(engine)
        with pytest.raises(RuntimeError, match=r"a step of the model has failed, .* make a new engine"):
            run_step(engine)
        with pytest.raises(RuntimeError, match="1 requests are running"):
            host.close()
        from easydel.inference.esurge.request import EngineRequestStatus

        engine.scheduler.finish_requests("lost", EngineRequestStatus.FINISHED_ABORTED)
    run_step(engine)
    assert run(engine, PROMPT), "its arrays are new"


def test_what_it_refuses(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = engine.runner.executor_manager.kv_pages
    with pytest.raises(ValueError, match="store must be 'filled' or 'evicted', got 'never'"):
        HostCache(engine, store="never", **POOL)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda _: "0.3.1")
        with pytest.raises(
            kvoffload.CapabilityError, match=r"methods of EasyDeL 0\.3\.0, and 0\.3\.1 is installed: pip"
        ):
            HostCache(engine, **POOL)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_overlap_execution", True)
        with pytest.raises(kvoffload.CapabilityError, match="the engine has overlap_execution=True: make the engine"):
            HostCache(engine, **POOL)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "scheduler_config", SimpleNamespace(async_scheduling=True))
        with pytest.raises(kvoffload.CapabilityError, match="the engine has async_scheduling=True: make the engine"):
            HostCache(engine, **POOL)
    with pytest.raises(kvoffload.CapacityError):
        HostCache(engine, pool_bytes=1, identity="random")
    assert engine.runner.executor_manager.kv_pages is pages, "refused, it has changed nothing"
    with (
        HostCache(engine, **POOL),
        pytest.raises(RuntimeError, match="the engine has a HostCache: close that one first"),
    ):
        HostCache(engine, **POOL)
