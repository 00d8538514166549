"""The command line: `kvoffload` and `python -m kvoffload`.

    doctor          what is here, what can run, and what to do about the rest      doctor.py
    demo            a made chat workload, every byte verified                      demo.py
    replay          a trace: every byte verified, or hits alone        replay.py, trace.py, verified.py, overlap.py,
                    of any policy, beside the optimum                  metadata.py, belady.py, saving.py, hitplot.py
                    made traffic instead of a trace                    workloads.py
    bench           the parser of what follows                                     bench.py
      transfer      every way of copying, by model                     transfer.py, latency.py, frameworks.py
      sweep         bytes of a copy x number of copies                 sweep.py
      interference  what the computation beside a transfer loses       interference.py, backgrounds.py
      parts         loading layer by layer                             parts.py
      interop       what users of CuPy and of JAX get                  interop.py, cargo.py, cupyways.py, jaxways.py
      submit        host time of a call                                submit.py
      marshal       Python's share of a batch call                     marshal.py
      cache         what the prefix cache's bookkeeping costs          bookkeeping.py
      plot          figures of saved results                           plots.py
    tune            what transfers cost here, for the engine's choice              tune.py

Of `bench`, also: cases.py (clock, rounds, the big copy), bed.py (addresses and bytes), baselines.py (what others do),
rows.py, summary.py, tables.py, report.py.

Exit codes: 0 done, 1 a byte was wrong, 2 it could not be done (the message says why), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvoffload.bench import command as bench
from kvoffload.commands import demo, doctor, tune
from kvoffload.errors import KVOffloadError
from kvoffload.replay import command as replay
from kvoffload.terminal.console import CommandError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. Prints results to stdout, everything else to stderr."""
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as ended:  # --help, or bad usage, which argparse has explained
        return ended.code if isinstance(ended.code, int) else 2
    try:
        return int(arguments.run(arguments))
    except (CommandError, KVOffloadError) as error:
        print(f"kvoffload: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvoffload: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; each command puts its function in `run`."""
    parser = argparse.ArgumentParser(
        prog="kvoffload",
        description="Move blocks of a paged KV cache between the GPU and pinned host memory: look, try, measure.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (doctor, demo, replay, bench, tune):
        command.add_parser(commands)
    return parser
