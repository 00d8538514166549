"""Two processes over one store, or one pool of host memory: the first computes all prefixes and stores them, the second
continues from them.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from kvoffload import KVLayout
from kvoffload.commands.stores import probe
from kvoffload.pool import SharedPool
from kvoffload.terminal.store_option import argument
from kvoffload.tiers import Tier, TierStatistics, load_tier

BOTH, WRITE, READ = "both", "write", "read"
LOOPBACK = "127.0.0.1"
IDENTITY = "paged decode, random weights"
NEW = ""  # of --pool: start an owner
START_SECONDS = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    words: Any = {"nargs": "+", "metavar": ("KIND", "NAME=VALUE")}
    help_text = "also continue from blocks that another process has put into a store, e.g. mooncake master=HOST:PORT"
    parser.add_argument("--store", help=help_text, **words)
    help_text = "with --store mooncake: start a master and a store process for this run"
    parser.add_argument("--start-store", action=argparse.BooleanOptionalAction, default=False, help=help_text)
    help_text = "also continue from blocks that another process has put into the pool that an owner serves at PATH; "
    help_text += "without PATH, a process is started that owns one"
    parser.add_argument("--pool", nargs="?", const=NEW, metavar="PATH", help=help_text)
    help_text = "write: compute and put into store or pool; read: continue from there; both: one process for each"
    parser.add_argument("--role", choices=(BOTH, WRITE, READ), default=BOTH, help=help_text)


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message if options contradict each other."""
    if options.start_store and (not options.store or options.store[0] != "mooncake"):
        parser.error("--start-store starts a Mooncake Store: give --store mooncake")
    if options.start_store and any(word.startswith("master=") for word in options.store):
        parser.error("--start-store starts a master of its own: leave out master=")
    if options.start_store and options.role != BOTH:
        parser.error(f"--start-store ends the store with this run: leave out --role {options.role}")
    if options.store and options.pool is not None:
        parser.error("--store and --pool are two ways to the same: give one of them")
    if options.role != BOTH and not options.store and options.pool in (None, NEW):
        parser.error(f"--role {options.role} needs --store, or --pool PATH")


@contextmanager
def ready(options: argparse.Namespace, nbytes: int) -> Iterator[None]:
    """Inside, store or pool answer. With `--role both`, another process has put all blocks into it and has ended.

    Enter it before the framework takes memory on the GPU.

    Args:
        options: with --start-store, `options.store` gets the address of the master; `options.pool` that of a new owner.
        nbytes: memory for the records, if a store or an owner is started.

    Raises:
        SystemExit: the store cannot be used, or the other process failed.
    """
    with ExitStack() as stack:
        if options.start_store:
            options.store = [*options.store, f"master={stack.enter_context(mooncake(nbytes))}", "protocol=tcp"]
        if options.store:
            problem = probe(options.store)["problem"]
            if problem is not None:
                raise SystemExit(f"--store {' '.join(options.store)} cannot be used: {problem}")
            if options.role == BOTH:
                write("store", "--no-start-store", "--role", WRITE, "--store", *options.store)
        if options.pool == NEW:
            options.pool = stack.enter_context(owner(nbytes))
        if options.pool is not None and options.role == BOTH:
            write("pool", "--role", WRITE, "--pool", options.pool)
        yield


def write(where: str, *options: str) -> None:
    """Have a process compute all blocks and put them into store or pool. It has ended when this returns."""
    print(f"a process puts the blocks of all turns into the {where}:", flush=True)
    done = subprocess.run([sys.executable, *sys.argv, *options], check=False)
    if done.returncode != 0:
        raise SystemExit(f"the process that writes to the {where} ended with exit code {done.returncode}")
    print("that process has ended", flush=True)


@contextmanager
def owner(nbytes: int) -> Iterator[str]:
    """A process that owns a pool of so many bytes. Gives the path of its socket."""
    with TemporaryDirectory() as folder:
        path = f"{folder}/pool"
        command = [sys.executable, "-m", "kvoffload", "pool", "serve", path, "--bytes", str(nbytes)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + START_SECONDS
            while not Path(path).exists() and process.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
            print(f"process {process.pid} owns a pool of {nbytes >> 20} MiB", flush=True)
            yield path
        finally:
            process.terminate()
            process.wait()


def open_tier(words: Sequence[str]) -> Tier:
    """The tier that --store names. It is not attached yet."""
    return load_tier(words[0], **({"identity": IDENTITY} | dict(map(argument, words[1:]))))


def open_pool(path: str, layout: KVLayout) -> SharedPool:
    """The membership in the pool of --pool. It waits for answers, since a block that is missing is an error here."""
    return SharedPool.attach(path, layout, identity=IDENTITY, answer_seconds=10.0)


def check_written(statistics: TierStatistics, num_blocks: int) -> None:
    """SystemExit unless so many blocks are in the store."""
    if statistics.written != num_blocks:
        raise SystemExit(
            f"{statistics.written} of {num_blocks} blocks are in the store ({statistics.declined} declined, "
            f"{statistics.failed} failed): it has too little memory, or does not answer"
        )


@contextmanager
def mooncake(nbytes: int) -> Iterator[str]:
    """A Mooncake Store on loopback, with `nbytes` of memory in its own process. Gives the address of its master."""
    rpc, metrics, port = free_ports(3)
    master, segments = f"{LOOPBACK}:{rpc}", f"http://{LOOPBACK}:{metrics}/get_all_segments"
    of_master = [f"--rpc_address={LOOPBACK}", f"--rpc_port={rpc}", f"--metrics_host={LOOPBACK}"]
    of_client = [f"--host={LOOPBACK}", f"--port={port}", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp"]
    of_client += [f"--master_server_address={master}", f"--global_segment_size={nbytes}"]
    with (
        server("mooncake.cli", [*of_master, f"--metrics_port={metrics}"], segments, b""),
        server("mooncake.cli_client", of_client, segments, b":"),  # its memory shows as host:port
    ):
        yield master


@contextmanager
def server(module: str, arguments: Sequence[str], url: str, expected: bytes) -> Iterator[None]:
    """Run a module in a process. The `with` block begins when `url` answers with `expected`, and ends the process."""
    with TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=log, stderr=log)
        try:
            end = time.monotonic() + START_SECONDS
            while not answers(url, expected):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    said = log.read()[-2000:].strip()
                    raise SystemExit(f"{module} has not started (pip install 'kvoffload[mooncake]'): {said}")
                time.sleep(0.05)
            yield
        finally:
            process.kill()
            process.wait()


def answers(url: str, expected: bytes) -> bool:
    """Whether the answer of `url` contains `expected`."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return expected in answer.read()
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports of loopback that no process listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in probes:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in probes]
