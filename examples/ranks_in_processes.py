"""Decode with tensor-parallel ranks, each in its own process, and offload their KV caches; compare every bit.

Each rank has a process, a GPU, its heads and hidden units of a small transformer, its part of the paged KV cache, and
an OffloadEngine over that part. The scheduler, in this process, has the CacheIndex and no GPU. It sends slot numbers
over pipes, and the ranks answer when a transfer has ended. It also adds up their partial products. Code shared with
cupy_paged_decode.py is in paged_decode/, the rest in rank_processes/.

    python examples/ranks_in_processes.py                       # two GPUs; pip install 'kvoffload[cupy]'
    python examples/ranks_in_processes.py --device simulated    # the same in numpy, without a GPU
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from paged_decode import model, report, workload
from paged_decode.backend import Logits
from paged_decode.server import FITS, ON_DEMAND, PREFETCHED, Mode, Run, Server
from rank_processes.group import RankError, RankGroup
from rank_processes.offload import IndexedOffloader

import kvoffload

MEDIUM = workload.Extent(8, 3, 2, 16, 256, first_prompt=(512, 1024), later_prompt=(32, 128))


class GroupComputer:
    """Computes a step in all ranks together, for the server."""

    stream: int | None = None  # each rank has its own

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def step(self, step: model.Step) -> Logits:
        return self._group.compute(step)


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=(report.CUDA, report.SIMULATED), default=report.CUDA)
    parser.add_argument("--ranks", type=int, default=2, help="processes; each has a GPU and its share of the heads")
    parser.add_argument("--small", action="store_true", help="a small model and short conversations")
    parser.add_argument("--generated", type=int, help="tokens to generate for each answer")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the conversations")
    parser.add_argument("--corrupt", action="store_true", help="spoil a stored block; the comparison must notice")
    options = parser.parse_args()
    options.small |= options.device == report.SIMULATED
    options.size = model.SMALL if options.small else model.ModelSize()
    options.extent = workload.SMALL if options.small else MEDIUM
    if options.generated is not None:
        options.extent = options.extent._replace(generated=options.generated)
    if options.ranks < 1 or options.size.kv_heads % options.ranks:
        parser.error(f"--ranks must divide the {options.size.kv_heads} heads of K and V, got {options.ranks}")
    if options.extent.generated < 1:
        parser.error(f"--generated must be at least 1, got {options.generated}")
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, got {options.seed}")
    return options


def serve(group: RankGroup, work: workload.Workload, mode: Mode, corrupt: bool) -> Run:
    """Serve the workload in one mode, with new caches and a new index, and print how many blocks were moved."""
    num_blocks = work.blocks_in_all() if mode.fits else work.blocks_at_once()
    num_slots = work.blocks_in_all()
    layout = group.open(num_blocks, num_slots)
    offloader = None
    if mode.offloads:
        offloader = IndexedOffloader(group, kvoffload.CacheIndex(num_slots), layout, corrupt=corrupt)
    run = Server(GroupComputer(group), work, mode, num_blocks, offloader, None).run()
    report.print_counts(run, layout.groups[0].bytes_per_block / 1e6, None)
    return run


def main() -> int:
    options = command_line()
    simulated = options.device == report.SIMULATED
    if not simulated and find_spec("cupy") is None:
        print("CuPy is not installed: pip install 'kvoffload[cupy]', or try --device simulated", file=sys.stderr)
        return 2
    work = workload.Workload(options.extent, options.size.vocabulary, options.seed)
    try:
        with RankGroup(options.ranks, options.size, simulated=simulated) as group:
            for process in group.processes:
                print(f"{process.name}: process {process.pid}")
            print(f"{work.blocks_in_all()} blocks in all, room for {work.blocks_at_once()} in each rank", flush=True)
            runs = [serve(group, work, mode, options.corrupt) for mode in (FITS, PREFETCHED, ON_DEMAND)]
    except (RankError, kvoffload.TransferError) as error:
        print(error, file=sys.stderr)
        return 1
    if simulated:
        print("no times: those of the simulated device mean nothing")
    return report.compare(runs)


if __name__ == "__main__":
    sys.exit(main())
