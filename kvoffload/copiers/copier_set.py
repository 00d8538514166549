"""The copiers of an engine: which ones can run here, which one carries a plan, and how several share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvoffload import kernels
from kvoffload.copiers.base import Copier, Work
from kvoffload.copiers.batch import BatchCopier
from kvoffload.copiers.gather import GatherCopier, GatherKernels
from kvoffload.copiers.loop import LoopCopier
from kvoffload.copiers.pack import STAGING_BYTES, Half, PackCopier, Place, StagingRing, ring_bytes, why_not_packed
from kvoffload.copiers.selection import choose
from kvoffload.copiers.strided import StridedCopier
from kvoffload.copiers.table_arena import Table
from kvoffload.device.pinned import RegisteredMemory
from kvoffload.driver import Capabilities, Driver
from kvoffload.errors import CapabilityError, DriverError
from kvoffload.internal.cachefiles import warn_once
from kvoffload.internal.teardown import run_all
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.transfer_plan import BlockPlan, Direction, TransferPlan, joined
from kvoffload.tuning import CopierChoice, CopierName, CopyMethod, Profile, Shape

_KERNELS = ("gather", "split", "pack")
NAMES: tuple[CopierName, ...] = ("strided", "gather", "split", "batch", "loop", "pack")
_NOT_IN_PARTS = {
    "split": "kernel and copy engine go through the planes side by side, each at its own pace",
    "pack": "it copies whole blocks",
}


def why_not(capabilities: Capabilities, sm_limit: int = 1) -> dict[str, str | None]:
    """For every copier, None or the reason why it cannot run here. A kernel may still fail when it is loaded."""
    no_kernel = "sm_limit=0 forbids kernels" if sm_limit == 0 else kernels.why_not(capabilities)
    return {
        "strided": None,
        "gather": no_kernel,
        "split": no_kernel,
        "pack": no_kernel,
        "batch": None if capabilities.flat_batch else capabilities.missing["cuMemcpyBatchAsync"],
        "loop": None,
    }


def check_copier(name: Any, missing: Mapping[str, str | None]) -> None:
    """Raise ValueError if `name` is neither a copier nor None, CapabilityError if that copier cannot run here."""
    if name is None:
        return
    if isinstance(name, CopyMethod):
        if not 0.0 <= name.share <= 1.0:
            raise ValueError(f"copier has a share of {name.share!r}; a share is from 0.0 to 1.0")
        name = name.copier
    if not isinstance(name, str) or name not in NAMES:
        raise ValueError(f"copier must be one of {', '.join(NAMES)} or None, got {name!r}")
    if missing[name] is not None:
        raise CapabilityError(f"copier={name!r} cannot run here: {missing[name]}; the loop copier works")


def check_carries_parts(name: CopierChoice) -> None:
    """Raise ValueError if `name` names a copier that cannot copy a load in parts."""
    reason = _NOT_IN_PARTS.get(name.copier if isinstance(name, CopyMethod) else name or "")
    if reason is not None:
        raise ValueError(
            f"copier={name!r} cannot copy a load in parts: {reason}; ask for strided, gather, batch, loop or None, or "
            "leave parts out"
        )


def shape_of(plan: BlockPlan) -> Shape:
    """The shape of a plan with at least one block, for a profile."""
    operations, rows = plan.count()
    return Shape(plan.direction, len(plan), len(plan) * plan.group.planes, operations, rows, plan.nbytes)


class Share(NamedTuple):
    """Some of a transfer's blocks and their copier. The shares of a transfer run at the same time.

    Attributes:
        size: how many operations the work has.
        nbytes: its payload bytes.
    """

    work: Work
    copier: Copier | PackCopier
    size: int
    nbytes: int


def shares_together(shares: Sequence[Share]) -> tuple[Share, ...]:
    """The same work in as few shares as possible, for a transfer of several groups. Kernels come first, since they are
    quicker to queue.

    A kernel is launched per group, so its shares stay apart. Shares of one copier of the copy engine become one, since
    it has room for one staged share.

    Args:
        shares: of plans in one direction, none of them in parts.
    """
    found = [share for share in shares if share.copier.is_kernel]
    alike: dict[int, list[Share]] = {}
    for share in shares:
        if not share.copier.is_kernel:
            alike.setdefault(id(share.copier), []).append(share)
    for same in alike.values():
        if len(same) > 1:
            plans: list[TransferPlan] = [share.work for share in same]  # type: ignore[misc]  # what these copiers prepare
            size, nbytes = sum(share.size for share in same), sum(share.nbytes for share in same)
            same = [Share(joined(plans), same[0].copier, size, nbytes)]
        found += same
    return tuple(found)


class Selection(NamedTuple):
    """A copy method, and why it is selected."""

    method: CopyMethod
    reason: str


_MOST_SELECTIONS = 4096  # remembered; then all are forgotten


class CopierSet:
    """The copiers that can run for one layout and pool on one device. `open` makes them ready.

    Args:
        driver: its context must be current in `open` and `close`.
        capabilities: the device's.
        sm_limit: the most programs of a kernel; 0 forbids kernels.
        staging_bytes: the most device memory of a direction that transfers are packed into; None: 129 MiB.

    Attributes:
        missing: for every copier, None or the reason why it cannot run here.
        interpreted: kernels take 2 ms a tile here, so they run only when they are asked for.
    """

    def __init__(
        self, driver: Driver, capabilities: Capabilities, sm_limit: int, staging_bytes: int | None = None
    ) -> None:
        self.missing = why_not(capabilities, sm_limit)
        self._driver = driver
        self._capabilities = capabilities
        self._sm_limit = sm_limit
        self.interpreted = driver.simulated
        self._batch = BatchCopier(driver, with_prelude=capabilities.flat_batch)
        self._of_copy_engine: dict[str, Copier] = {
            "strided": StridedCopier(driver, batched=capabilities.strided_batch),
            "batch": self._batch,
            "loop": LoopCopier(driver),
        }
        self._gather: dict[int, GatherCopier] = {}
        self._kernels: GatherKernels | None = None
        self._pack: dict[int, PackCopier] = {}
        self._staging_bytes = STAGING_BYTES if staging_bytes is None else staging_bytes
        self._rings: tuple[StagingRing, ...] = ()  # of stores, of loads
        self._selected: dict[tuple[object, ...], Selection] = {}
        self._selected_by: tuple[Profile | None, str] = (None, "")

    def open(self, layout: KVLayout, memory: RegisteredMemory) -> None:
        """Allocate memory, and load the kernels for the layout's groups. `missing` says if a kernel cannot be loaded.

        Args:
            memory: the slot pool.

        Raises:
            CapacityError, DriverError: memory is short, or the driver failed. Then call `close`.
        """
        self._batch.open()
        if self._sm_limit == 0:
            return
        self._kernels = GatherKernels(self._driver, memory)
        try:
            self._kernels.open(self._capabilities, layout)
        except (CapabilityError, DriverError) as error:
            if isinstance(error, DriverError) and not error.out_of_memory:  # no room for the table of rows
                raise
            self._kernels.close()
            self._kernels = None
            self.missing.update(dict.fromkeys(_KERNELS, str(error)))
            warn_once(
                f"no copy kernels: {error}. Transfers that they would carry take the copy engine; sm_limit=0 says that "
                "this is meant, `kvoffload doctor` says more",
                cause="no kernels",
            )
            return
        nbytes = ring_bytes(layout, memory.nbytes, self._staging_bytes)
        self._rings = StagingRing(self._driver, nbytes), StagingRing(self._driver, nbytes)
        self.missing["pack"] = why_not_packed(layout, nbytes)

    def open_ring(self, direction: Direction) -> str | None:
        """Allocate the ring that packed transfers of a direction go through, at the first one. The context must be
        current, and the thread may make any call.

        Returns:
            Why there is none: no memory. From then on "pack" is missing, in both directions, and nothing tries again.

        Raises:
            DriverError: the driver failed.
        """
        ring = self._rings[0 if direction is Direction.STORE else 1]
        try:
            ring.open()
        except DriverError as error:
            if not error.out_of_memory:
                raise
            self.missing["pack"] = f"no {ring.nbytes} bytes of device memory to pack {direction}s into: {error}"
            self._selected.clear()
            return self.missing["pack"]
        return None

    @property
    def offered(self) -> tuple[str, ...]:
        """The copiers to choose from: all that can run, but no kernels on the simulated device."""
        able = tuple(name for name in NAMES if self.missing[name] is None)
        return tuple(name for name in able if name not in _KERNELS) if self.interpreted else able

    def select(
        self, plan: BlockPlan, wanted: CopierChoice, profile: Profile, prefer: str, opposite: bool = False
    ) -> Selection:
        """The copy method for a plan, and why; remembered for all plans of the same shape. In this order:

        1. An answer that is remembered, for the same profile and preference.
        2. `wanted` is a `CopyMethod`: that one, with numbers that are missing or out of range filled in.
        3. `wanted` is the name of a copier: its best method by the profile.
        4. None: the profile's choice among `offered`; for a load in parts, without copiers that cannot carry them.

        Args:
            wanted: checked by `check_copier`.
            opposite: whether transfers in the other direction are in flight.

        Raises:
            CapabilityError: "gather" is wanted for a load in parts, and cannot carry these parts; or "pack", and there
                is no memory for it.
        """
        if profile is not self._selected_by[0] or prefer != self._selected_by[1]:
            self._selected.clear()
            self._selected_by = profile, prefer
        counts = None if plan.sub_block is None else plan.count()  # without sub-blocks the blocks say it
        parts = None if plan.group.num_parts == 1 else plan.group.parts
        stores = plan.direction is Direction.STORE  # hashing an enum's member is a call of a Python function
        key = (stores, plan.group_index, len(plan.blocks), counts, parts, wanted, opposite)
        found = self._selected.get(key)
        if found is None:
            found = self._select(plan, wanted, profile, prefer, opposite)
            if parts is not None and found.method.copier == "gather":
                assert self._kernels is not None
                self._kernels.in_parts(plan.group_index, parts)  # takes its room now, so the answer stays right
            if len(self._selected) >= _MOST_SELECTIONS:
                self._selected.clear()
            self._selected[key] = found
        return found

    def _select(
        self, plan: BlockPlan, wanted: CopierChoice, profile: Profile, prefer: str, opposite: bool
    ) -> Selection:
        shape = shape_of(plan)
        check_copier(wanted, self.missing)  # again: the ring of "pack" may have found no room
        if isinstance(wanted, CopyMethod):
            self._check_parts(wanted.copier, plan)
            return Selection(self._complete(wanted, shape, profile), "asked for")
        parts = plan.group.num_parts
        available: tuple[str, ...] = self.offered
        if wanted is not None:
            self._check_parts(wanted, plan)
            available = (wanted,)
        elif parts > 1:
            unable = _KERNELS if self._why_not_in_parts(plan) else ("split", "pack")
            available = tuple(name for name in available if name not in unable)
        method, reason, _ = choose(shape, available, profile, prefer, self._sm_limit, parts, opposite)
        return Selection(method, reason if wanted is None else "asked for by name")

    def _check_parts(self, name: str, plan: BlockPlan) -> None:
        if name == "gather" and plan.group.num_parts > 1 and (reason := self._why_not_in_parts(plan)):
            raise CapabilityError(f"copier='gather' cannot carry these parts: {reason}; the loop copier can")

    def _why_not_in_parts(self, plan: BlockPlan) -> str | None:
        if self._kernels is None:
            return self.missing["gather"]
        return self._kernels.why_not_in_parts(plan.group_index, plan.group.parts)

    def _complete(self, wanted: CopyMethod, shape: Shape, profile: Profile) -> CopyMethod:
        if wanted.copier not in ("gather", "split"):
            return CopyMethod(wanted.copier)
        programs = min(max(1, wanted.programs), self._sm_limit)
        if wanted.copier == "gather":
            return CopyMethod("gather", programs, 1.0)
        return CopyMethod("split", programs, wanted.share or profile.split_share(shape, programs))

    def shares(self, method: CopyMethod, plan: BlockPlan) -> tuple[Share, ...]:
        """The plan's shares. In a split of few blocks, one side may get none; then there is one share."""
        if method.copier == "gather":
            return (self._by_kernel(method, plan),)
        if method.copier == "split":
            return self._split(method, plan)
        if method.copier == "pack":
            return (self._by_pack(plan),)
        return (_share(self._of_copy_engine[method.copier], plan),)

    def _split(self, method: CopyMethod, plan: BlockPlan) -> tuple[Share, ...]:
        by_engine = len(plan) - round(len(plan) * method.share)
        if by_engine == 0:
            return (self._by_kernel(method, plan),)
        strided = _share(self._of_copy_engine["strided"], plan.cut(0, by_engine))
        if by_engine == len(plan):
            return (strided,)
        return (self._by_kernel(method, plan.cut(by_engine, len(plan))), strided)  # the kernel is quicker to queue

    def _by_kernel(self, method: CopyMethod, plan: BlockPlan) -> Share:
        assert self._kernels is not None
        copier = self._gather.get(method.programs)
        if copier is None:
            copier = self._gather[method.programs] = GatherCopier(self._kernels, method.programs)
        return _share(copier, plan)

    def _by_pack(self, plan: BlockPlan) -> Share:
        assert self._kernels is not None
        copier = self._pack.get(plan.group_index)
        if copier is None:
            copies = self._of_copy_engine["loop" if self.missing["batch"] else "batch"]
            stores, loads = self._rings
            copier = self._pack[plan.group_index] = PackCopier(self._kernels, copies, (stores, loads), plan.group_index)
        return _share(copier, plan)

    def keep(self) -> None:
        """The context is lost: free nothing that the GPU may still use."""
        if self._kernels is not None:
            self._kernels.keep()

    def restore(self, tables: list[Table], places: Mapping[Place, list[Half]]) -> None:
        """After an interrupt: exactly these tables are in use, and these places in the rings, by these segments."""
        for ring in self._rings:
            ring.restore(places)
        if self._kernels is not None:
            self._kernels.restore(tables)

    def close(self) -> None:
        """Free the copiers' memory; nothing may be in flight. If it is interrupted, call it again."""
        kernels = () if self._kernels is None else (self._kernels.close,)
        run_all((self._batch.close, *(ring.close for ring in self._rings), *kernels))


def _share(copier: Copier | PackCopier, plan: BlockPlan) -> Share:
    work = copier.prepare(plan)
    return Share(work, copier, len(work), plan.nbytes)
