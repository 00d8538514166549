"""The command line; serves the workload in all modes, one after the other, and prints the results."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload import KVLayout
from kvoffload.tiers import DiskTier, Tier
from paged_decode import model, shared_store, timeline, workload
from paged_decode.backend import Backend
from paged_decode.offload import Offloader, block_bytes, open_engine
from paged_decode.server import (
    FITS,
    FROM_DISK,
    FROM_POOL,
    FROM_STORE,
    LAYER_WISE,
    ON_DEMAND,
    PREFETCHED,
    RECOMPUTED,
    TO_POOL,
    TO_STORE,
    Mode,
    Run,
    Server,
)

CUDA, SIMULATED = "cuda", "simulated"  # as `open_device` calls them


def command_line(description: str, *, by_layer: bool = False, sharded: bool = False) -> argparse.Namespace:
    """The options. `by_layer`: whether a layer can follow its part of a load in this backend; `sharded`: whether the
    backend can compute on several devices.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--device", choices=(CUDA, SIMULATED), default=CUDA, help="simulated: a small model, no times")
    help_text = "layout of the KV cache: (planes, blocks, ...), the default, or (blocks, planes, ...)"
    layouts = (model.PLANE_MAJOR, model.BLOCK_MAJOR)
    parser.add_argument("--layout", choices=layouts, default=model.PLANE_MAJOR, help=help_text)
    parser.add_argument("--small", action="store_true", help="a small model, few conversations, few tokens")
    parser.add_argument("--conversations", type=int, help="number of conversations")
    parser.add_argument("--turns", type=int, help="turns of each conversation")
    parser.add_argument("--batch", type=int, help="conversations to serve together; must divide --conversations")
    parser.add_argument("--generated", type=int, help="tokens to generate for each answer")
    span: Any = {"type": int, "nargs": 2, "metavar": ("MIN", "MAX")}
    parser.add_argument("--first-prompt", help="tokens of a conversation's first prompt", **span)
    parser.add_argument("--later-prompt", help="tokens of its later prompts", **span)
    parser.add_argument("--device-blocks", type=int, help="blocks on the device; default: as few as possible")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the conversations")
    parser.add_argument("--plot", metavar="FILE", help="draw a timeline; needs a GPU and kvoffload[plot]")
    parser.add_argument("--disk", type=Path, metavar="FILE", help="also with a disk, and host memory for a quarter")
    shared_store.add_options(parser)
    parser.add_argument("--corrupt", action="store_true", help="spoil a stored block; the comparison must notice")
    if by_layer:
        parser.add_argument("--layer-wise", action="store_true", help="also with layers that wait only for their part")
    if sharded:
        parser.add_argument("--devices", type=int, default=1, help="divide heads and hidden units among N devices")
    options = parser.parse_args()
    options.small |= options.device == SIMULATED
    options.layer_wise = by_layer and options.layer_wise
    extent = workload.SMALL if options.small else workload.LARGE
    chosen = {name: getattr(options, name) for name in extent._fields if name != "chunk"}
    options.extent = extent._replace(**{name: value for name, value in chosen.items() if value is not None})
    check_counts(parser, options)
    shared_store.check_options(parser, options)
    if options.plot and options.device == SIMULATED:
        parser.error("--plot needs a GPU: times of the simulated device mean nothing")
    if sharded:
        heads = model_size(options).kv_heads
        if options.devices < 1 or heads % options.devices:
            parser.error(f"--devices must divide the {heads} heads of K and V, got {options.devices}")
        if options.pool is not None and options.devices > 1:
            parser.error("--pool is for engines over one device: leave out --devices")
        if options.plot and options.devices > 1:
            parser.error("--plot shows one device: leave out --devices")
    return options


def check_counts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message that names the option if there is no such workload."""
    extent = options.extent
    least = {"conversations": 1, "turns": 2, "batch": 1, "generated": 1}
    for name, minimum in least.items():
        if getattr(extent, name) < minimum:
            parser.error(f"--{name} must be at least {minimum}, got {getattr(extent, name)}")
    if extent.conversations % extent.batch:
        parser.error(f"--batch must divide the {extent.conversations} --conversations, got {extent.batch}")
    for name in ("first-prompt", "later-prompt"):
        low, high = getattr(extent, name.replace("-", "_"))
        if not 1 <= low <= high:
            parser.error(f"--{name} MIN MAX must have 1 <= MIN <= MAX, got {low} {high}")
    if options.device_blocks is not None and options.device_blocks < 1:
        parser.error(f"--device-blocks must be at least 1, got {options.device_blocks}")
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, got {options.seed}")


def model_size(options: argparse.Namespace) -> model.ModelSize:
    return (model.SMALL if options.small else model.ModelSize())._replace(layout=options.layout)


def store_is_ready(options: argparse.Namespace) -> AbstractContextManager[None]:
    """See `shared_store.ready`: serve inside it, and make the backend there."""
    size = model_size(options)
    work = workload.Workload(options.extent, size.vocabulary, options.seed)
    nbytes = int(np.prod(size.cache_shape(work.blocks_in_all()))) * (4 if options.small else 2)
    return shared_store.ready(options, (nbytes // 2 * 3 + (128 << 20)) >> 20 << 20)  # it rounds records up


def serve_and_compare(backend: Backend, options: argparse.Namespace, *, left_out: str) -> int:
    """Serve the same workload in all modes, and print the results.

    Args:
        left_out: what the simulated device does not test, for the output.

    Returns:
        The exit code: 0 if offloading did not change a bit of any logits, else 1.
    """
    work = workload.Workload(options.extent, backend.size.vocabulary, options.seed)
    at_once = work.blocks_at_once()
    device_blocks = at_once if options.device_blocks is None else options.device_blocks
    if device_blocks < at_once:
        raise SystemExit(
            f"a batch and the prefixes of the next need {at_once} blocks on the device: --device-blocks must be at "
            f"least that, got {device_blocks}"
        )
    device = backend.devices[0]
    count = f"{len(backend.devices)} x " if len(backend.devices) > 1 else ""
    print(f"{type(backend).__name__} on {count}{device.name}", backend.size, options.extent, sep="\n")
    print(f"{work.blocks_in_all()} blocks in all, room for {device_blocks} on the device", flush=True)
    spans: dict[str, list[timeline.Span]] = {}
    runs: list[Run] = []
    for mode in modes_of(options):
        begun = work.first_turns(runs[0].tokens) if mode.from_store else ()
        runs.append(serve(backend, work, mode, device_blocks, options, spans, begun))
    if options.role == shared_store.WRITE:
        return 0
    if device.simulated:
        print(f"no times: those of the simulated device mean nothing; left out as well: {left_out}")
    else:
        print(*table(runs), sep="\n")
    if options.plot:
        timeline.draw(spans, options.plot)
        print(f"{options.plot}: timeline of two of the rounds")
    return compare(runs)


def modes_of(options: argparse.Namespace) -> list[Mode]:
    """The modes to serve in, one after the other."""
    if options.role == shared_store.WRITE:
        return [TO_POOL if options.pool else TO_STORE]
    modes = [FITS, PREFETCHED, ON_DEMAND, *([LAYER_WISE] if options.layer_wise else [])]
    modes += [*([FROM_DISK] if options.disk else []), *([FROM_STORE] if options.store else [])]
    modes += [FROM_POOL] if options.pool else []
    return [*modes, RECOMPUTED]


def serve(
    backend: Backend,
    work: workload.Workload,
    mode: Mode,
    device_blocks: int,
    options: argparse.Namespace,
    spans: dict[str, list[timeline.Span]],
    begun: Sequence[list[int]] = (),
) -> Run:
    """Serve the workload in one mode; `begun`: see `Server`. With --plot, its spans go into `spans`."""
    num_blocks = work.blocks_in_all() if mode.fits else device_blocks
    layout = backend.new_cache(num_blocks)
    megabytes = block_bytes(layout) / 1e6
    notes = offloader = None
    with ExitStack() as stack:
        if options.plot and mode in (FITS, PREFETCHED, RECOMPUTED):
            notes = stack.enter_context(closing(timeline.Timeline(backend.devices[0])))
        if mode.offloads:
            pool = None
            if mode.in_pool and isinstance(layout, KVLayout):
                pool = stack.enter_context(shared_store.open_pool(options.pool, layout))
            engine = open_engine(backend, layout, slots_of(work, mode), pool)
            stack.enter_context(engine)
            offloader = Offloader(
                backend,
                engine,
                notes,
                by_layer=mode.by_layer,
                corrupt=options.corrupt,
                tier=open_tier(mode, options),
                pool=pool,
                stores=not mode.from_store,
            )
            stack.callback(offloader.close)
            if mode.to_store:
                offloader.clear()
        run = Server(backend, work, mode, num_blocks, offloader, notes, begun).run()
        if notes is not None:
            spans[mode.name] = notes.spans()
        print_counts(run, megabytes, offloader)
    return run


def slots_of(work: workload.Workload, mode: Mode) -> int:
    """Host memory, in blocks."""
    if mode.from_store:
        return 2 * work.longest  # a prefix may take half; few enough that the next turn finds no loaded block again
    return max(work.blocks_in_all() // 4, 2 * work.longest) if mode.from_disk else work.blocks_in_all()


def open_tier(mode: Mode, options: argparse.Namespace) -> Tier | None:
    """The tier of a mode, or None. The disk has room for twice any of these workloads."""
    if mode.from_disk:
        return DiskTier(options.disk, nbytes=2 << 30, identity=shared_store.IDENTITY, reset=True)
    in_store = (mode.to_store or mode.from_store) and not mode.in_pool
    return shared_store.open_tier(options.store) if in_store else None


def print_counts(run: Run, megabytes: float, offloader: Offloader | None) -> None:
    """Print how many blocks were moved, at `megabytes` each. SystemExit if a store did not take all."""
    mode = run.mode
    print(
        f"{mode.name}: {run.evicted} blocks evicted, {run.stored} stored ({run.stored * megabytes:,.1f} MB), "
        f"{run.loaded} loaded ({run.loaded * megabytes:,.1f} MB)",
        flush=True,
    )
    if offloader is not None and mode.in_pool:
        found = offloader.statistics()
        print(f"    in the pool: {found.resident} blocks; {found.hits} hits of another process's", flush=True)
    below = None if offloader is None else offloader.tier_statistics()
    if below is not None:
        put, got = f"{below.bytes_written / 1e9:,.3f} GB", f"{below.bytes_read / 1e9:,.3f} GB"
        print(f"    below the host: {below.written} blocks written ({put}), {below.read} read ({got})", flush=True)
        if mode.to_store:
            shared_store.check_written(below, run.stored)


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Lines with tokens a second and time to first token of each run; in brackets, ratios to the first run."""
    yield f"{'':26} {'tokens/s':>18} {'TTFT median, ms':>20} {'TTFT p95, ms':>20}"
    figures = np.array([_figures(run) for run in runs])
    for run, row, ratios in zip(runs, figures, figures / figures[0], strict=True):
        rate, median, p95 = (f"{value:,.1f} ({ratio:.2f})" for value, ratio in zip(row, ratios, strict=True))
        yield f"{run.mode.name:26} {rate:>18} {median:>20} {p95:>20}"
    yield "(ratio to the first row); tokens/s: generated tokens over the whole time; TTFT: for turns that continue a"
    yield "conversation, from the beginning of the turn until its first token is on the host"
    for mode in (run.mode for run in runs if run.mode.from_store):
        yield f"tokens/s of '{mode.name}' do not compare: the first turns were served by the other process"


def _figures(run: Run) -> tuple[float, float, float]:
    """Tokens a second; median and 95th percentile of the time to first token, milliseconds."""
    median, p95 = np.percentile(run.first_token_seconds, (50, 95)) * 1e3
    return sum(map(len, run.logits)) / run.seconds, median, p95


def compare(runs: Sequence[Run]) -> int:
    """Print for each run how many tokens have the same logits as with a cache that fits. Returns the exit code."""
    fits, exit_code = runs[0], 0
    for run in runs[1:]:
        pairs = zip(run.logits, fits.logits[-len(run.logits) :], strict=True)  # some runs begin with the second turns
        same = np.concatenate(
            [(logits.view(np.uint32) == expected.view(np.uint32)).all(axis=-1) for logits, expected in pairs]
        )
        if not run.mode.offloads:
            verdict = "not required, because it computes decoded tokens again in chunks"
        elif same.all():
            verdict = "bitwise equal"
        else:
            verdict, exit_code = "DIFFERENT", 1
        print(f"{run.mode.name}: {same.sum()} of {same.size} tokens have the bits of the first run: {verdict}")
    return exit_code
