"""Time to first token of a prompt that eSurge knew and has evicted: from host memory, computed again, from its cache.

    python measure_prefix.py                    # a GPU; 8 layers, 4,096 wide, a prompt of 4,096 tokens and some more
    SMALL=1 JAX_PLATFORMS=cpu python measure_prefix.py      # that it runs: tiny sizes, no times

First eSurge alone, then with each way of storing, on the same engine: a prompt is computed; others push it out of the
GPU; it comes again (host); it comes again at once (device). Times are of eSurge's loop, from `add_request` to the token
on the host, without eSurge's tokenizer processes, which add the same to all. In each line, "step" is the model, and
"scheduler" its thread outside the model; in that is kvoffload's part, "load" (copies included: the scheduler waits for
them) and "store" (without the copies).
"""

from __future__ import annotations

import os
import random
import statistics
import time
from typing import Any

from small_esurge import Sizes, make_engine, new_request, run_step

SMALL = os.environ.get("SMALL") == "1"
TURNS = int(os.environ.get("TURNS", "2" if SMALL else "7"))
PREFIX = 64 if SMALL else 4096
MORE = 7  # tokens behind the prefix, less than a page
NEW = 4


def sizes() -> Sizes:
    if SMALL:
        return Sizes(token_steps=(32,), pages=18, longest=96)
    return Sizes(
        layers=8,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=8192,
        page_tokens=128,
        pages=160,
        longest=8192,
        requests=4,
        token_steps=(4, 128, 2048),
        dtype="bfloat16",
    )


def main() -> None:
    import jax
    from esurge_host_cache import HostCache

    model = sizes()
    engine = make_engine(model)
    place = jax.devices()[0]
    print(f"{place.device_kind}, JAX {jax.__version__}; {model}")
    print(f"a prefix of {PREFIX} tokens is {PREFIX // model.page_tokens * model.page_bytes / 2**20:.1f} MiB")
    try:
        _measure(engine, None, model, "eSurge alone")
        for store in ("filled", "evicted"):
            with HostCache(engine, pool_bytes=2000 * model.page_bytes, identity="random", store=store) as host:
                _measure(engine, host, model, f"pages stored when {store}")
    finally:
        engine._worker_manager.shutdown()


def _measure(engine: Any, host: Any, model: Sizes, title: str) -> None:
    generator = random.Random(title)

    def words(count: int) -> list[int]:
        return [generator.randrange(model.vocabulary - 2) for _ in range(count)]

    rows: dict[str, list[dict[str, float]]] = {"computed": [], "host": [], "device": []}
    for _ in range(TURNS + 1):
        prompt = words(PREFIX + MORE)
        rows["computed"].append(_first_token(engine, host, prompt))
        if host is not None:
            before = host.statistics.host_tokens
            while _leading_pages(engine, prompt):
                _first_token(engine, host, words(PREFIX + MORE))
            rows["host"].append(_first_token(engine, host, prompt))
            assert host.statistics.host_tokens == before + PREFIX, "not all came from the host"
        rows["device"].append(_first_token(engine, host, prompt))
    print(f"\n{title}; median of {TURNS} (least)")
    for name, measured in rows.items():
        if measured:  # its first turn warms up
            line = [f"{key} {_shown([row[key] for row in measured[1:]])}" for key in measured[0]]
            print(f"  {name:9}", "; ".join(line))
    if host is not None:
        print(f"  {host.statistics.host_tokens} tokens from the host, {host.statistics.stored_pages} pages stored")


def _leading_pages(engine: Any, prompt: list[int]) -> int:
    """How many pages eSurge's own prefix cache has of a prompt."""
    from easydel.inference.esurge.core.utils import hash_request_tokens

    manager = engine.scheduler.kv_cache_manager
    hashes = hash_request_tokens(hash, manager.page_size, new_request("probe", prompt, 1))
    return len(manager.coordinator.find_longest_cache_hit(hashes, len(prompt) - 1)[0][0])


def _first_token(engine: Any, host: Any, prompt: list[int]) -> dict[str, float]:
    """Milliseconds. The request then ends, unmeasured."""
    scheduler, runner = engine.scheduler, engine.runner
    before = None if host is None else host.statistics
    request = new_request(str(time.monotonic_ns()), prompt, NEW)
    begun, model = time.perf_counter(), 0.0
    scheduler.add_request(request)
    while not request.output_token_ids:
        output = scheduler.schedule()
        step = time.perf_counter()
        result = runner.execute_model(output)
        model += time.perf_counter() - step
        scheduler.update_from_output(output, result)
    total, load, store = time.perf_counter() - begun, 0.0, 0.0
    if before is not None:
        load = host.statistics.load_seconds - before.load_seconds
        store = host.statistics.store_seconds - before.store_seconds
        model -= 0.0 if host.stores_evicted else store  # pages that are full are stored behind the step
    while scheduler.requests:
        run_step(engine)
    seconds = {"first token": total, "step": model, "scheduler": total - model, "load": load, "store": store}
    return {name: 1e3 * each for name, each in seconds.items()}


def _shown(values: list[float]) -> str:
    if SMALL:
        return "-"
    return f"{statistics.median(values):.2f} ms ({min(values):.2f})"


if __name__ == "__main__":
    main()
