"""DiskTier: records in preallocated files, verified at each read, and still there after a restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kvoffload.cache.policies import DEFAULT_POLICY, PolicyChoice
from kvoffload.cache.pools import Pools, Tenant
from kvoffload.cache.tiering.tier import Outcome, TierCapabilities, TierJob
from kvoffload.cache.weights import namespace_of, split_namespace
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import at_least, flag, shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import new_lock
from kvoffload.tiers.disk_index import DiskIndex, DiskPut
from kvoffload.tiers.files import SYSTEM, Buffer, FileOperations
from kvoffload.tiers.format import check_identity, make_checksum
from kvoffload.tiers.member_file import ReadResult
from kvoffload.tiers.options import Limits
from kvoffload.tiers.refusals import outcome_of
from kvoffload.tiers.sets import file_at
from kvoffload.tiers.slot_files import SlotFiles
from kvoffload.tiers.threaded import Origin, Rows, ThreadedTier


class DiskTier(ThreadedTier):
    """Records in one preallocated file for each path. The files never grow beyond `nbytes`.

    Every read compares header, key and checksum, so anything that a crash, a torn write or a failing disk leaves is a
    miss. `remove` and `clear` are durable when their jobs are DONE, puts when `drain` has returned True; `close` syncs,
    too, and logs if that fails. docs/disk-format.md has the format. The default checksum is no signature, and prompts
    lie on the disk unencrypted. If a file is deleted or replaced while it is open, the next `drain` logs that; it
    and all later ones return False, puts are DECLINED from then on, and records are still read.

    Args:
        path: a file, or several, best on different disks, over which records are spread. For a folder, the file
            `kvoffload` in it. `~` is your home. Missing files are created with mode 0600, unless others of the set
            exist: then it is another set. The folder must exist, and must not be writable by every user, unless it has
            the sticky bit, as `/tmp` has, which the system may clean. If one file is blank, damaged or of another
            version of the format, `attach` empties all (with `read_only` it finds no records), and logs that.
        nbytes: size of all files together, allocated by `attach`. Required, unless `read_only`.
        identity: a text for everything but the layout that the bytes depend on: model and revision, adapter,
            quantisation, positions, shard. Files of another identity are refused.
        policy, tenants: how a full tier evicts, and quotas, as for `BlockCache`. Records of tenants that are not named
            here count for "".
        key: 16 to 64 secret bytes. Keyed blake2b then verifies records: it also finds deliberate changes, and takes at
            least 15 times as long. None: xxh3_128, which finds accidents.
        reset: if the files have another layout, identity, size, key or set, drop their records instead of refusing
            them, in `attach`. Files that are no disk tier's stay refused.
        read_only: read the files while another process writes them. Puts are DECLINED. Removals are FAILED, and this
            tier then misses these keys. Records that the other process adds after `attach` are not found.
        direct: bypass the page cache where the file system can; see `direct_io`.
        name: for metrics and messages.
        limits: see `Limits`. 4 threads transfer by default; one more computes checksums meanwhile.
        operations: the system calls, for tests.

    Raises:
        TypeError, ValueError: an argument.
        From `attach`, which opens the files: whatever a function given as `policy` raises, or TypeError, it returns no
        policy. LayoutError, they have another layout, identity, size, key or set, are no
        disk tier's, or one is given twice. CapacityError, `nbytes` is too small for a record in each file, or there is
        too little space. FileNotFoundError, there is no such folder, or with `read_only` no file. BlockingIOError, they
        are open for writing elsewhere. PermissionError, a file or its folder is a symbolic link, every user may write a
        folder, or a file is not this user's alone. OSError, a system call failed.
    """

    bytes_per_call = 4 << 20  # small records: the bookkeeping of several at once

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        nbytes: int = 0,
        identity: str,
        policy: PolicyChoice = DEFAULT_POLICY,
        tenants: Mapping[str, Tenant] | None = None,
        key: bytes | None = None,
        reset: bool = False,
        read_only: bool = False,
        direct: bool = True,
        name: str = "disk",
        limits: Limits | None = None,
        operations: FileOperations = SYSTEM,
    ) -> None:
        self.read_only = flag("read_only", read_only)
        super().__init__(limits=limits)
        self.io_threads, self.threads = self.threads, self.threads + 1
        paths = [path] if isinstance(path, str | Path) else [*path] if isinstance(path, Sequence) else []
        if not paths or not all(isinstance(each, str | Path) for each in paths):
            raise TypeError(f"path (disk of open_cache) must be a path, or a list of paths, got {shown(path)}")
        if any(not str(each) or "\0" in str(each) for each in paths):
            raise ValueError(f"path (disk of open_cache) must name a file or a folder, got {shown(path)}")
        self.paths = [file_at(each) for each in paths]
        self.nbytes = 0 if read_only else at_least("nbytes", nbytes, 1)
        make_checksum(key)
        self.name = name
        self.identity = check_identity(identity)
        most = None if read_only else nbytes
        self.capabilities = TierCapabilities(durable=True, shared=False, local_index=True, max_bytes=most)
        Pools(DEFAULT_POLICY if callable(policy) else policy, {} if tenants is None else tenants, 1)  # checks both
        self._policy, self._tenants = policy, dict(tenants or {})
        self._open = partial(
            SlotFiles,
            self.paths,
            nbytes=self.nbytes,
            identity=identity,
            key=key,
            reset=flag("reset", reset),
            read_only=read_only,
            direct=flag("direct", direct),
            io_threads=self.io_threads,
            operations=operations,
        )
        self._disk: DiskIndex | None = None
        self._unlinked = False  # a file: what is put now does not outlive the process
        self._puts: dict[TierJob, DiskPut] = {}
        self._lock = new_lock()

    @property
    def direct_io(self) -> tuple[bool, ...]:
        """For each file whether transfers bypass the page cache; () before `attach`, after `close`, and with
        `read_only` if a file is blank or damaged.
        """
        return () if self._disk is None else self._disk.files.direct

    @property
    def num_slots(self) -> int:
        """How many records the files can hold, full or empty; 0 where `direct_io` is ()."""
        return 0 if self._disk is None else self._disk.files.num_slots

    # for ThreadedTier ---------------------------------------------------------------------------------------------

    def start(self, layout: bytes | None) -> None:
        assert layout is not None, "a durable tier is given one"
        try:
            files = self._open(slot_bytes=self.record_bytes, layout_digest=layout)
        except ValueError as error:
            raise LayoutError(str(error)) from error
        try:
            self._disk = DiskIndex(files, policy=self._policy, tenants=self._tenants)
        except BaseException:
            files.close()
            raise

    def release(self) -> None:
        self._here.files.close()

    def write_records(self, keys: Sequence[bytes], rows: Sequence[Rows], origin: Origin) -> list[Outcome]:
        if self.read_only or self._unlinked:
            return [Outcome.DECLINED] * len(keys)
        disk = self._here
        with self._lock:  # of a put, slots are reserved for all keys when the first of them is written
            put = self._puts.get(origin.job)
            if put is None:
                tenant, weights = split_namespace(origin.tenant)
                namespace = namespace_of(tenant if tenant in self._tenants else "", weights)
                put = self._puts[origin.job] = disk.reserve(origin.job.keys, namespace)
        payloads = {key: _views(each) for key, each in zip(keys, rows, strict=True) if key in put.slots}
        results = dict(zip(payloads, disk.write(put, list(payloads), list(payloads.values())), strict=True))
        known = zip(keys, disk.contains(keys), strict=True)
        return [self._outcome(results.get(key, there), Outcome.DECLINED, outcome_of) for key, there in known]

    def read_records(self, keys: Sequence[bytes], rows: Sequence[Rows]) -> list[Outcome]:
        results = self._here.read(keys, list(map(_views, rows)))
        self.count_corrupt(results.count(None))
        return [self._outcome(result, Outcome.MISSING, lambda _: Outcome.FAILED) for result in results]

    def have_records(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys) if self._disk is None else self._disk.contains(keys)

    def keep_weights(self, names: frozenset[str]) -> None:
        if self._disk is not None:
            self._disk.index.records.keep_weights(names)

    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        return self._here.remove(keys)

    def remove_all(self) -> None:
        self._here.clear()

    def flush(self) -> None:
        if self.read_only:
            return
        files = self._here.files
        files.sync()
        if not self._unlinked and (unlinked := files.unlinked):
            self._unlinked = True
            LOGGER.warning("%r: %s was deleted while it is open; it takes no more puts", self, ", ".join(unlinked))

    def drain(self, timeout: float | None = None) -> bool:
        return super().drain(timeout) and not self._unlinked

    def num_records(self) -> int | None:
        return None if self._disk is None else len(self._disk)

    def put_ended(self, job: TierJob) -> None:
        with self._lock:
            put = self._puts.pop(job, None)
        if put is not None:
            self._here.finish(put)

    def get_ended(self, job: TierJob) -> None:
        found = [key for key, outcome in zip(job.keys, job.outcomes, strict=True) if outcome is Outcome.DONE]
        if found:
            self._here.index.touch(found)

    # inner workings -----------------------------------------------------------------------------------------------

    @property
    def _here(self) -> DiskIndex:
        assert self._disk is not None, "the files are open from `start` on"
        return self._disk

    def _outcome(self, result: ReadResult, without: Outcome, judge: Callable[[OSError], Outcome]) -> Outcome:
        """Return DONE for True, `without` for no record, and what `judge` says of an error, which is logged."""
        if isinstance(result, OSError):
            self.warn(result)
            return judge(result)
        return Outcome.DONE if result else without


def _views(rows: Rows) -> list[Buffer]:
    return [row.data for row in rows]
