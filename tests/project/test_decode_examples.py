"""The examples that decode with a paged KV cache: their bits are equal, blocks were moved, and errors would show."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import (
    BOTH,
    EXAMPLES,
    HAS_JAX,
    LAYER_WISE,
    LAYOUTS,
    ON_DEMAND,
    PREFETCHED,
    TIMES,
    check_run,
    refusal,
    refused,
    run,
    run_here,
    run_jax,
    verdicts,
)
from programs import run_program

import kvoffload

RANKS = "ranks_in_processes.py"
END = "\n--- end of a run\n"

# on the simulated device


@pytest.mark.skipif(not HAS_JAX, reason="jax is not installed")
@pytest.mark.parametrize(("steps", "options", "computed"), [(2, (), "1.000"), (3, ("--adapter",), "0.764")])
def test_rollouts_between_changes_of_weights_are_those_of_an_unbounded_cache(
    steps: int, options: tuple[str, ...], computed: str
) -> None:
    """One that computes everything again after a change, also for weights that come back."""
    output = run("jax_rollouts.py", "--steps", str(steps), *options)
    assert f"\n0 tokens differ; prompt tokens computed: {computed} of those of an unbounded cache" in output


def check_simulated(output: str, layout: str) -> None:
    check_run(output, PREFETCHED, ON_DEMAND)
    assert f"layout='{layout}'" in output
    assert "no times: those of the simulated device mean nothing; left out as well:" in output
    assert TIMES.search(output) is None


Here = Callable[..., str]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs an example in this process."""
    return partial(run_here, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize("name", BOTH[:1] if HAS_JAX else BOTH)
def test_simulated_runs_are_bitwise_equal_and_print_no_times(name: str, here: Here) -> None:
    """In a process of its own, as users run it, and in this one."""
    check_simulated(run(name, "--device", "simulated"), LAYOUTS[0])
    check_simulated(here(name, "--device", "simulated", "--layout", LAYOUTS[1]), LAYOUTS[1])


@pytest.mark.parametrize(("devices", "backend"), [(1, "JaxBackend on "), (2, "ShardedJaxBackend on 2 x ")])
def test_simulated_devices_of_jax_are_bitwise_equal_and_a_spoiled_block_is_noticed(devices: int, backend: str) -> None:
    """All runs in one process, which imports JAX and compiles what they share once."""
    few = ["--device", "simulated", "--devices", str(devices), "--turns", "2", "--generated", "2"]
    options = [few, [*few, "--layout", LAYOUTS[1]], [*few, "--corrupt"]]
    program = f"""
    import sys, jax_paged_decode
    for options in {options!r}:
        sys.argv = ["jax_paged_decode.py", *options]
        print(jax_paged_decode.main(), end={END!r})
    """
    *equal, spoiled, _ = run_jax(program).split(END)
    for output, layout in zip(equal, LAYOUTS, strict=True):
        assert output.startswith(backend)
        assert output.endswith("\n0")
        check_simulated(output, layout)
    assert spoiled.endswith("\n1")
    assert verdicts(spoiled)[PREFETCHED] == verdicts(spoiled)[ON_DEMAND] == "DIFFERENT"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_wait_for_their_parts(layout: str, here: Here) -> None:
    output = here(BOTH[0], "--device", "simulated", "--layer-wise", "--layout", layout)
    check_run(output, PREFETCHED, ON_DEMAND, LAYER_WISE)


def test_other_conversations_and_more_room(here: Here) -> None:
    options = ("--seed", "7", "--conversations", "12", "--batch", "3", "--turns", "2", "--device-blocks", "60")
    check_run(here(BOTH[0], "--device", "simulated", *options), PREFETCHED, ON_DEMAND)


def test_a_spoiled_block_is_noticed(here: Here) -> None:
    said = verdicts(here(BOTH[0], "--device", "simulated", "--corrupt", exit_code=1))
    assert said[PREFETCHED] == said[ON_DEMAND] == "DIFFERENT"


@pytest.mark.parametrize(("forgotten", "mode"), [("follow", ON_DEMAND), ("_before_layer", LAYER_WISE)])
def test_a_step_that_does_not_wait_for_its_load_is_noticed(
    forgotten: str, mode: str, paged: Any, monkeypatch: pytest.MonkeyPatch, here: Here
) -> None:
    monkeypatch.setattr(paged("arrays").NumpyBackend, forgotten, lambda *_: None)
    said = verdicts(here(BOTH[0], "--device", "simulated", "--layer-wise", exit_code=1))
    assert said[mode] == "DIFFERENT"


@pytest.mark.parametrize(("name", "extra"), list(zip(BOTH, ("cupy", "jax"), strict=True)))
def test_without_its_framework_an_example_names_the_extra(name: str, extra: str) -> None:
    program = (
        "import importlib.util, runpy, sys\n"
        "importlib.util.find_spec = lambda name: None\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        f"sys.argv = [{name!r}]\n"
        f"runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"pip install 'kvoffload[{extra}]'" in done.stderr
    assert "--device simulated" in done.stderr


@pytest.mark.parametrize(("device", "message"), [("simulated", "--devices 2 needs JAX"), ("cuda", "JAX with 2 GPUs")])
def test_without_jax_several_devices_say_what_they_need(device: str, message: str) -> None:
    program = f"""
    import importlib.util, runpy, sys
    importlib.util.find_spec = lambda name: None
    sys.path.insert(0, {str(EXAMPLES)!r})
    sys.argv = ["jax_paged_decode.py", "--device", {device!r}, "--devices", "2"]
    sys.stderr = sys.stdout
    runpy.run_path({str(EXAMPLES / BOTH[1])!r}, run_name="__main__")
    """
    said = run_program(program, exit_code=2)
    assert message in said
    assert "pip install" in said


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (BOTH[0], ("--device-blocks", "5"), "need 39 blocks on the device"),
        (BOTH[0], ("--device-blocks", "5"), "--device-blocks must be at least that, got 5"),
        (BOTH[0], ("--device-blocks", "0"), "--device-blocks must be at least 1, got 0"),
        (BOTH[0], ("--batch", "3"), "--batch must divide the 8 --conversations, got 3"),
        (BOTH[0], ("--batch", "0"), "--batch must be at least 1, got 0"),
        (BOTH[0], ("--turns", "1"), "--turns must be at least 2, got 1"),
        (BOTH[0], ("--first-prompt", "0", "0"), "--first-prompt MIN MAX must have 1 <= MIN <= MAX, got 0 0"),
        (BOTH[0], ("--first-prompt", "20", "10"), "--first-prompt MIN MAX must have 1 <= MIN <= MAX, got 20 10"),
        (BOTH[0], ("--later-prompt", "-5", "3"), "--later-prompt MIN MAX must have 1 <= MIN <= MAX, got -5 3"),
        (BOTH[0], ("--seed", "-1"), "--seed must be at least 0, got -1"),
        (BOTH[0], ("--plot", "timeline.png"), "--plot needs a GPU"),
        (BOTH[0], ("--devices", "2"), "unrecognized arguments: --devices 2"),
        (BOTH[1], ("--devices", "3"), "--devices must divide the 2 heads of K and V, got 3"),
        (BOTH[1], ("--devices", "0"), "--devices must divide the 2 heads of K and V, got 0"),
        (BOTH[1], ("--pool", "--store", "valkey"), "give one of them"),
        (BOTH[1], ("--pool", "--role", "write"), "--role write needs --store, or --pool PATH"),
        (BOTH[1], ("--pool", "--devices", "2"), "--pool is for engines over one device: leave out --devices"),
        (BOTH[0], ("--start-store",), "give --store mooncake"),
        (BOTH[0], ("--start-store", "--store", "valkey"), "give --store mooncake"),
        (BOTH[0], ("--start-store", "--store", "mooncake", "master=127.0.0.1:9"), "leave out master="),
        (BOTH[0], ("--start-store", "--store", "mooncake", "--role", "read"), "leave out --role read"),
        (BOTH[0], ("--role", "write"), "--role write needs --store"),
        (BOTH[0], ("--store", "memory"), "--store memory cannot be used: "),
        (BOTH[0], ("--store", "valkey", "6379"), "takes arguments as name=value, got '6379'"),
        (RANKS, ("--ranks", "3"), "--ranks must divide the 2 heads of K and V, got 3"),
        (RANKS, ("--ranks", "0"), "--ranks must divide the 2 heads of K and V, got 0"),
        (RANKS, ("--generated", "0"), "--generated must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_are_refused(
    name: str,
    options: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, said = refused(name, "--device", "simulated", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert code in (1, 2)
    assert message in said


@pytest.mark.parametrize("name", BOTH)
def test_a_refusal_has_no_traceback(name: str) -> None:
    said = refusal(name, "--device", "simulated", "--turns", "1")
    assert "--turns must be at least 2, got 1" in said
    assert "Traceback" not in said


# the parts


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports modules of the package that the examples share."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return lambda name: import_module(f"paged_decode.{name}")


def test_the_pool_takes_from_the_conversation_served_longest_ago(paged: Any) -> None:
    pool = paged("workload").BlockPool(7)
    assert pool.extend(0, 2, ()) == []
    assert pool.extend(1, 2, ()) == []
    assert pool.extend(0, 3, ()) == []  # served again: 1 has waited longer
    assert pool.extend(2, 3, spared={0}) == [1]
    assert pool.extend(3, 1, spared={2}) == [0]
    assert pool.evicted == 5
    blocks = [block for own in pool.of.values() for block in own]
    assert len(blocks) == len(set(blocks)) == 4
    assert paged("model").NULL_BLOCK not in blocks
    assert max(blocks) < 7


def decode(paged: Any, blocks: list[int], chunk: int, tokens: list[int], layout: str = LAYOUTS[0]) -> Any:
    """Logits of the last token, computed chunk by chunk in a cache full of other numbers."""
    model = paged("model")
    size = model.SMALL._replace(layout=layout)
    backend = paged("arrays").ArrayModel(np, size, "float32")
    cache = np.random.default_rng(1).standard_normal(size.cache_shape(12), dtype="float32")
    for first in range(0, len(tokens), chunk):
        step = model.Step.padding(1, chunk, 6)
        step.put(0, tokens, first, blocks)
        logits = backend.logits(cache, step, lambda _: None)
    return logits[0]


def test_logits_do_not_depend_on_where_blocks_are(paged: Any) -> None:
    tokens = np.random.default_rng(0).integers(256, size=53).tolist()
    here, there = (decode(paged, blocks, 20, tokens) for blocks in ([1, 2, 3, 4], [9, 3, 11, 6]))
    assert here.tobytes() == there.tobytes()
    changed = decode(paged, [1, 2, 3, 4], 20, [tokens[0] ^ 1, *tokens[1:]])
    assert here.tobytes() != changed.tobytes()


def test_logits_do_not_depend_on_the_layout(paged: Any) -> None:
    tokens = np.random.default_rng(0).integers(256, size=53).tolist()
    first, second = (decode(paged, [4, 2, 7, 9], 20, tokens, layout).tobytes() for layout in LAYOUTS)
    assert first == second


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_chunks_compute_the_same_but_for_rounding(paged: Any, chunk: int) -> None:
    tokens = np.random.default_rng(0).integers(256, size=53).tolist()
    whole, chunked = (decode(paged, [5, 2, 8, 1], length, tokens) for length in (64, chunk))
    np.testing.assert_allclose(chunked, whole, rtol=1e-4, atol=1e-4)


TWO_DEVICES = """
    import jax, numpy as np
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    import kvoffload
    from kvoffload.testing import SimulatedDriver
    from jax_paged_decode import JaxBackend, ShardedJaxBackend
    from paged_decode import model
    driver = SimulatedDriver(device_count=2)
    devices = [kvoffload.open_device(index, backend=driver) for index in range(2)]
"""


def test_a_step_of_jax_writes_into_the_cache_and_copies_nothing_of_it() -> None:
    """A copy of the whole cache, written back, would undo loads that are concurrent with the step."""
    program = f"""{TWO_DEVICES}
    for layout in {LAYOUTS}:
        size = model.SMALL._replace(layout=layout)
        sharded = ShardedJaxBackend(devices, size)
        for backend, sharding, count in ((JaxBackend(devices[:1], size), None, 1), (sharded, sharded._sharding, 2)):
            cache = jax.ShapeDtypeStruct(size.cache_shape(20000), "uint16", sharding=sharding)
            for step in (model.Step.padding(2, 1, 10), model.Step.padding(1, 32, 10)):
                memory = backend._compute.lower(backend._weights, cache, step).compile().memory_analysis()
                few = cache.size // (10 * count)
                print(memory.alias_size_in_bytes == cache.size * 2 // count, memory.temp_size_in_bytes < few)
    """
    assert run_jax(program) == "True True\n" * 8


def test_two_devices_compute_what_one_does_but_for_rounding() -> None:
    """With the same weights: columns that are divided are in the order of the devices."""
    program = f"""{TWO_DEVICES}
    size = model.SMALL
    sharded = ShardedJaxBackend(devices, size)
    one = JaxBackend(devices[:1], size)

    def in_order(weight, *counts):
        parts = np.split(np.asarray(weight), np.cumsum(counts)[:-1], axis=-1)
        halves = [np.split(part, 2, axis=-1) for part in parts]
        return np.concatenate([half[device] for device in range(2) for half in halves], axis=-1)

    heads = [count * size.head_size for count in (size.query_heads, size.kv_heads, size.kv_heads)]
    for name, counts in (("query_key_value", heads), ("gate_up", [size.hidden] * 2)):
        ordered = in_order(one._weights[name], *counts)
        sharded._weights[name] = jax.device_put(ordered, sharded._weights[name].sharding)
    tokens = np.random.default_rng(0).integers(256, size=53).tolist()
    logits = []
    for backend in (one, sharded):
        backend.new_cache(12)
        for first in range(0, len(tokens), 20):
            step = model.Step.padding(1, 20, 6)
            step.put(0, tokens, first, [4, 2, 7, 9])
            found = backend.step(step)
        logits.append(found)
    print(np.abs(logits[0] - logits[1]).max() < 0.05 * np.abs(logits[0]).max(), logits[0].shape)
    """
    assert run_jax(program) == "True (1, 256)\n"


def test_a_timeline_has_all_that_ran(paged: Any, device: kvoffload.Device, tmp_path: Path) -> None:
    report, timeline, workload = paged("report"), paged("timeline"), paged("workload")
    backend = paged("arrays").NumpyBackend(device, paged("model").SMALL)
    work = workload.Workload(workload.SMALL, backend.size.vocabulary)
    options = Namespace(plot=True, corrupt=False)
    spans: dict[str, Any] = {}
    done = report.serve(backend, work, report.PREFETCHED, work.blocks_at_once(), options, spans)
    assert min(done.evicted, done.stored, done.loaded) > 0
    assert len(done.first_token_seconds) == 8 * (3 - 1)
    kinds = [span.kind for span in spans[PREFETCHED]]
    assert kinds.count("round") == len(work.rounds) == 12
    assert kinds.count("decode") == 12 * (work.generated - 1)
    assert kinds.count("store") == 24
    assert 0 < kinds.count("load") <= 16
    assert all(span.end >= span.begin for span in spans[PREFETCHED])
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    timeline.draw(spans, str(tmp_path / "timeline.png"))
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_timeline_destroys_the_events_of_a_computation_that_raised(paged: Any, device: kvoffload.Device) -> None:
    calls = device.simulator.faults.call_count
    created, destroyed = (calls[name] for name in ("cuEventCreate", "cuEventDestroy"))
    notes = paged("timeline").Timeline(device)
    with pytest.raises(ZeroDivisionError), notes.computing(None, "decode"):
        1 / 0  # noqa: B018
    notes.close()
    assert calls["cuEventCreate"] - created == calls["cuEventDestroy"] - destroyed == 2


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "framework"), list(zip(BOTH, ("cupy", "jax"), strict=True)))
@pytest.mark.usefixtures("only_gpu")
def test_on_a_gpu(name: str, framework: str, layout: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    figure = tmp_path / "timeline.png"
    drawn = importlib.util.find_spec("matplotlib") is not None
    by_layer = ("--layer-wise",) if framework == "cupy" else ()
    output = run(
        name, "--small", "--layout", layout, *by_layer, *(("--plot", str(figure)) if drawn else ()), warnings="default"
    )
    check_run(output, PREFETCHED, ON_DEMAND, *((LAYER_WISE,) if by_layer else ()))
    assert TIMES.search(output) is not None
    assert figure.exists() == drawn
    spoiled = verdicts(run(name, "--small", "--corrupt", exit_code=1, warnings="default"))
    assert spoiled[PREFETCHED] == "DIFFERENT"
