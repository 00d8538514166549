"""`kvoffload pool serve`: owns a pool of host memory that the engines of this host share, until it is ended."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvoffload.cache.policies import DEFAULT_POLICY, POLICIES
from kvoffload.cache.pools import Tenant
from kvoffload.internal import hostinfo
from kvoffload.internal.checks import reason
from kvoffload.internal.log import LOGGER
from kvoffload.terminal.console import CommandError, Output, OutputError, counted, mib
from kvoffload.terminal.options import add_command, size, whole

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LOOK_SECONDS = 0.1  # between looks at signals and the owner
_COUNTS = ("members", "resident", "capacity", "pending", "pinned", "evicted")
_TEXT = """\
Owns memory, and the index of what it holds, for engines on this host: each opens its cache with pool=PATH. Runs until \
Ctrl-C or SIGTERM. Prints its statistics then, and on SIGUSR1. It needs no GPU."""


def add_parser(commands: Any) -> None:
    summary = "one pool of host memory for the engines of a host"
    pool = add_command(
        commands, "pool", summary, "Pools that engines share.",
        example="pool serve /run/kvoffload/pool --bytes 64GiB", usage="ACTION [options]",
    )  # fmt: skip
    actions = pool.add_subparsers(title="actions", metavar="ACTION", prog="kvoffload pool")
    parser = add_command(
        actions, "serve", "own a pool until it is ended", _TEXT,
        example="pool serve /run/kvoffload/pool --bytes 64GiB", common="--json",
        usage="PATH --bytes SIZE [options]",
    )  # fmt: skip
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="of the socket, in a folder that only you or root can write to")
    add("--bytes", type=size, required=True, metavar="SIZE", help="of all regions together, such as 64GiB")
    add("--region-bytes", type=size, metavar="SIZE", help="of a region: a layout and identity; default: all bytes")
    add("--policy", choices=sorted(POLICIES), default=DEFAULT_POLICY, metavar="NAME", help=", ".join(sorted(POLICIES)))
    add("--tenant", action="append", default=[], type=tenant, metavar="NAME[=KEYS]",
        help="a tenant, and the most keys that it may have; may be repeated")  # fmt: skip
    add("--disk", type=Path, metavar="FOLDER", help="a disk tier below, with a file for each region")
    add("--disk-bytes", type=size, metavar="SIZE", help="of each of these files")
    add("--busy-poll", type=float, metavar="SECONDS",
        help="keep a core busy for so long after each message; default: 0.02 with 8 CPUs or more, else 0")  # fmt: skip
    add("--json", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)
    pool.set_defaults(run=lambda _: pool.print_help())


def tenant(text: str) -> tuple[str, Tenant]:
    name, equals, quota = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} names no tenant: NAME or NAME=KEYS")
    return name, Tenant(max_blocks=whole(1)(quota) if equals else None)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; 130 after Ctrl-C, as of every command."""
    from kvoffload.pool.owner import BUSY_POLL_SECONDS, PoolOwner
    from kvoffload.pool.pool_memory import PAGE

    if min(arguments.bytes, arguments.region_bytes or arguments.bytes) < 3 * PAGE:  # rows, superblock, headers
        raise CommandError(f"--bytes and --region-bytes must be at least {3 * PAGE}, which is a region of few keys")
    output, tiers, tenants = Output(arguments.json), make_tiers(arguments), dict(arguments.tenant)
    if len(tenants) < len(arguments.tenant):
        raise CommandError("--tenant names a tenant twice: give each its quota once")
    available = hostinfo.available_bytes()
    if available is not None and arguments.bytes > available:
        output.note(f"kvoffload: --bytes is {mib(arguments.bytes)}, and {mib(available)} are available now")
    handler = logging.StreamHandler()  # why a member was refused or cut off, for whoever runs the service
    LOGGER.addHandler(handler)
    received = set[int]()  # handlers: of a mask of this thread those of a BLAS know nothing, and get the signal
    before = [signal.signal(each, lambda number, _: received.add(number)) for each in _SIGNALS]
    try:
        owner = PoolOwner(
            arguments.path,
            nbytes=arguments.bytes,
            region_bytes=arguments.region_bytes,
            policy=arguments.policy,
            tenants=tenants,
            tiers=tiers,
            busy_poll=BUSY_POLL_SECONDS if arguments.busy_poll is None else arguments.busy_poll,
        )
        with owner:
            output.line(f"pool: process {os.getpid()} serves {mib(arguments.bytes)} until Ctrl-C, at")
            output.path(owner.path)
            while not received - {signal.SIGUSR1}:
                time.sleep(LOOK_SECONDS)
                if owner.failure is not None:
                    raise CommandError(f"the owner of {owner.path} has ended: {reason(owner.failure)}")
                with suppress(OutputError):  # whoever reads it may have ended, and engines need the owner
                    if signal.SIGUSR1 in received:
                        received.discard(signal.SIGUSR1)
                        _report(owner.path, arguments.bytes, owner.statistics(), output)
            _report(owner.path, arguments.bytes, owner.statistics(), output)
    except OSError as error:
        raise CommandError(
            f"{error.filename or arguments.path}: {error.strerror}" if error.strerror else str(error)
        ) from error
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from error
    finally:
        LOGGER.removeHandler(handler)
        for number, known in zip(_SIGNALS, before, strict=True):
            signal.signal(number, known or signal.SIG_DFL)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    return 0


def make_tiers(arguments: argparse.Namespace) -> Callable[[str, str], Sequence[Any]] | None:
    """Return a function that makes the tiers of a region. Raises CommandError, CapabilityError now, not when an engine
    comes.
    """
    folder, nbytes = arguments.disk, arguments.disk_bytes
    if (folder is None) != (nbytes is None):
        raise CommandError("--disk FOLDER and --disk-bytes SIZE go together: the size of each region's file")
    if folder is None:
        return None
    from kvoffload.tiers.disk import DiskTier
    from kvoffload.tiers.format import make_checksum
    from kvoffload.tiers.sets import check_paths

    make_checksum()
    try:
        check_paths([str(folder / "region.kv")])
    except OSError as error:
        raise CommandError(f"--disk {folder} cannot be used: {error.strerror or error}") from error
    return lambda region, identity: [DiskTier(folder / f"{region}.kv", nbytes=nbytes, identity=identity)]


def _report(path: str, nbytes: int, regions: list[dict[str, Any]], output: Output) -> None:
    output.result({"pool": path, "nbytes": nbytes, "regions": regions})
    used, members = sum(each["nbytes"] for each in regions), sum(each["members"] for each in regions)
    where = f"{counted(len(regions), 'region')}, {mib(used)} of {mib(nbytes)}"
    output.line(f"pool: {counted(members, 'member')} in {where}")
    if regions:
        lines = [[each["name"], mib(each["nbytes"]), *map(each.get, _COUNTS)] for each in regions]
        columns = ("region", "bytes", "members", "keys", "at most", "pending", "pinned", "evicted")
        output.table("regions", columns, lines)
