"""The copiers of an engine: which ones can run here, which one carries a plan, and how several share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload import kernels
from kvoffload.copiers.base import Copier
from kvoffload.copiers.batch import BatchCopier
from kvoffload.copiers.loop import LoopCopier
from kvoffload.copiers.observed import Comparison
from kvoffload.copiers.pack import (
    STAGING_BYTES,
    BlocksInParts,
    Half,
    PackCopier,
    Place,
    StagingRing,
    is_range,
    ring_bytes,
    why_not_packed,
)
from kvoffload.copiers.pack_kernels import PackKernels
from kvoffload.copiers.selection import Question, Selection, choose, two_ways
from kvoffload.copiers.strided import StridedCopier
from kvoffload.copiers.table_arena import Table
from kvoffload.driver import Capabilities, Driver
from kvoffload.errors import CapabilityError, DriverError
from kvoffload.internal.cachefiles import warn_once
from kvoffload.internal.teardown import run_all
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.layer_groups import Parts
from kvoffload.planning.transfer_plan import LOAD, STORE, BlockPlan, Direction, TransferPlan, joined
from kvoffload.tuning import COPIERS, CopierName, Profile, Shape


def why_not(capabilities: Capabilities, staging_bytes: int = STAGING_BYTES) -> dict[str, str | None]:
    """Return, for each copier, None or the reason why it cannot run here. A kernel may still fail when it is loaded."""
    return {
        "strided": None,
        "pack": kernels.why_not(capabilities) if staging_bytes else "staging_bytes=0 forbids kernels",
        "batch": None if capabilities.flat_batch else capabilities.missing["cuMemcpyBatchAsync"],
        "loop": None,
    }


def check_copier(name: Any, missing: Mapping[str, str | None]) -> None:
    """Raise ValueError if `name` is neither a copier nor None, CapabilityError if that copier cannot run here."""
    if name is None:
        return
    if not isinstance(name, str) or name not in COPIERS:
        raise ValueError(f"copier must be one of {', '.join(COPIERS)} or None, got {name!r:.80}")
    if missing[name] is not None:
        raise CapabilityError(f"copier={name!r} cannot run here: {missing[name]}; the loop copier works")


def check_carries_parts(name: CopierName | None, parts: Parts, *, coded: bool) -> None:
    """Raise ValueError if `name` names a copier that cannot copy a load in these parts."""
    if name == "pack" and not can_pack(parts):
        number, planes = next((number, each) for number, each in enumerate(parts) if not is_range(each))
        raise ValueError(
            f"copier='pack', which coded groups need, copies parts whose planes follow each other, and parts[{number}] "
            f"has the planes {list(planes)!r:.80}; give other parts"
            f"{'' if coded else ', or ask for strided, batch, loop or None'}"
        )


def can_pack(parts: Parts) -> bool:
    """Return whether each part is one range of a block in a slot."""
    return all(map(is_range, parts))


def shape_of(plan: BlockPlan) -> Shape:
    """Return the shape of a plan with at least one block, for a profile."""
    operations, rows = plan.count()
    return Shape(plan.direction, len(plan), len(plan) * plan.group.planes, operations, rows, plan.nbytes)


Share = tuple[TransferPlan | BlockPlan | BlocksInParts, Copier | PackCopier, int, int]
"""Some of a transfer's blocks: the work, its copier, how many operations it has, and its payload bytes. The shares of a
transfer run at the same time."""


def shares_together(shares: Sequence[Share]) -> tuple[Share, ...]:
    """Return the same work in as few shares as possible, for a transfer of several groups. Those of pack come first,
    and stay apart, since a kernel is of one group. Shares of one copier of the copy engine become one.

    Args:
        shares: of plans in one direction, none of them in parts.
    """
    found = [share for share in shares if isinstance(share[1], PackCopier)]
    alike: dict[int, list[Share]] = {}
    for share in shares:
        if not isinstance(share[1], PackCopier):
            alike.setdefault(id(share[1]), []).append(share)
    for same in alike.values():
        if len(same) > 1:
            works, copiers, sizes, nbytes = zip(*same, strict=True)
            same = [(joined(works), copiers[0], sum(sizes), sum(nbytes))]
        found += same
    return tuple(found)


_MOST_SELECTIONS = 4096  # remembered; then all are forgotten
_CODED = Selection("pack", "the kernel codes the blocks")
_WANTED = {name: Selection(name, "asked for by name") for name in COPIERS}


class CopierSet:
    """The copiers that can run for one layout and pool on one device. `open` makes them ready.

    Args:
        driver: its context must be current in `open` and `close`.
        capabilities: the device's.
        staging_bytes: of the ring of each direction, checked; 0 forbids kernels.
        profile, prefer: what selects.

    Attributes:
        missing: for every copier, None or the reason why it cannot run here.
        interpreted: kernels take 2 ms a tile here, so they run only when they are asked for.
        coded: of each group whether only "pack" can carry it.
    """

    def __init__(
        self, driver: Driver, capabilities: Capabilities, staging_bytes: int, profile: Profile, prefer: str
    ) -> None:
        self.missing = why_not(capabilities, staging_bytes)
        self._driver = driver
        self._capabilities = capabilities
        self._staging_bytes = staging_bytes
        self._profile, self._prefer = profile, prefer
        self.interpreted = driver.simulated
        self._batch = BatchCopier(driver, with_prelude=capabilities.flat_batch)
        self._of_copy_engine: dict[str, Copier] = {
            "strided": StridedCopier(driver, batched=capabilities.strided_batch),
            "batch": self._batch,
            "loop": LoopCopier(driver),
        }
        self._kernels: PackKernels | None = None
        self._pack: dict[int, PackCopier] = {}
        self._rings: tuple[StagingRing, ...] = ()  # of stores, of loads
        self.coded: tuple[bool, ...] = ()
        self._selected: dict[tuple[object, ...], Selection] = {}
        self._comparisons: dict[tuple[bool, bool, int, int, str], Comparison] = {}  # few: sizes have at most 60 bits

    def open(self, layout: KVLayout, pool_bytes: int) -> None:
        """Allocate memory, and load the kernels for the layout's groups. `missing` says if a kernel cannot be loaded.

        Args:
            pool_bytes: of all slots.

        Raises:
            CapabilityError: a group has a codec, and no kernel can run here.
            CapacityError, DriverError: memory is short, or the driver failed. Then call `close`.
        """
        self._batch.open()
        self._open_kernels(layout, pool_bytes)
        self.coded = tuple(group.coding is not None for group in layout.groups)
        if any(self.coded):
            no_ring = self.missing["pack"] or self.open_ring(STORE) or self.open_ring(LOAD)
            if no_ring is not None:
                raise CapabilityError(f"codec={layout.codecs} of the layout needs the copier 'pack': {no_ring}")

    def _open_kernels(self, layout: KVLayout, pool_bytes: int) -> None:
        if self._staging_bytes == 0 or kernels.compiler.triton_version() is None:  # meant so: no warning
            return
        self._kernels = PackKernels(self._driver)
        try:
            self._kernels.open(self._capabilities, layout)
        except (CapabilityError, DriverError) as error:
            if isinstance(error, DriverError) and not error.out_of_memory:  # no room for the table of rows
                raise
            self._kernels.close()
            self._kernels = None
            self.missing["pack"] = str(error)
            warn_once(
                f"no copy kernels: {error}. Transfers that they would carry take the copy engine; staging_bytes=0 says "
                "that this is meant, `kvoffload doctor` says more",
                cause="no kernels",
            )
            return
        nbytes = ring_bytes(layout, pool_bytes, self._staging_bytes)
        self._rings = StagingRing(self._driver, nbytes), StagingRing(self._driver, nbytes)
        self.missing["pack"] = self.missing["pack"] or why_not_packed(layout, nbytes)

    def has_ring(self, direction: Direction) -> bool:
        return self._rings[direction is LOAD].address > 0

    def open_ring(self, direction: Direction) -> str | None:
        """Allocate the ring that packed transfers of a direction go through, at the first one. The context must be
        current, and the thread may make any call.

        Returns:
            Why there is none: no memory. From then on "pack" is missing, in both directions, and nothing tries again.

        Raises:
            DriverError: the driver failed.
        """
        ring = self._rings[direction is LOAD]
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
    def staging_bytes(self) -> int:
        """Bytes of device memory that the rings have."""
        return sum(ring.allocated for ring in self._rings)

    @property
    def offered(self) -> tuple[CopierName, ...]:
        """The copiers to choose from: all that can run, but no kernel on the simulated device. For groups without a
        codec.
        """
        able = tuple(name for name in COPIERS if self.missing[name] is None)
        return tuple(name for name in able if name != "pack") if self.interpreted else able

    def select(
        self, plan: BlockPlan, wanted: CopierName | None, opposite: bool = False, queued: bool = False
    ) -> Selection:
        """Return the copier for a plan, and why; remembered for all plans of the same shape. If it has `between`, that
        has the last word. In this order:

        1. "pack" for a group with a codec.
        2. `wanted`.
        3. An answer that is remembered.
        4. The profile's choice among `offered`.

        Args:
            wanted: checked by `check_copier`.
            opposite, queued: whether transfers in the other direction are in flight, and in this one.

        Raises:
            CapabilityError: "pack" is wanted, and there is no memory for it.
        """
        if self.coded[plan.group_index]:
            return _CODED
        if wanted is not None:
            if self.missing[wanted] is not None:
                check_copier(wanted, self.missing)  # again: the ring of "pack" may have found no room
            return _WANTED[wanted]
        counts = None if plan.sub_block is None else plan.count()  # without sub-blocks the blocks say it
        parts = None if plan.group.num_parts == 1 else plan.group.parts
        stores = plan.direction is STORE  # hashing an enum's member is a call of a Python function
        key = (stores, plan.group_index, len(plan.blocks), counts, parts, opposite, queued)
        found = self._selected.get(key)
        if found is None:
            found = self._select(plan, opposite, queued)
            if len(self._selected) >= _MOST_SELECTIONS:
                self._selected.clear()
            self._selected[key] = found
        return found

    def _select(self, plan: BlockPlan, opposite: bool, queued: bool) -> Selection:
        parts = plan.group.num_parts
        shape, offered = shape_of(plan), frozenset(self.offered)
        if parts > 1 and not can_pack(plan.group.parts):
            offered -= {"pack"}
        question = Question(shape, offered, self._profile, self._prefer, parts, opposite)
        selected = choose(question)
        ways = two_ways(question, queued) if "pack" in offered else None
        if ways is None:
            return selected
        size = shape.nbytes.bit_length(), parts.bit_length()
        kind = shape.direction is STORE, opposite, *size, ways[1].copier
        return selected._replace(between=(self._comparisons.setdefault(kind, Comparison(ways)), ways))

    def share(self, copier: CopierName, plan: BlockPlan) -> Share:
        if copier != "pack":
            carrier = self._of_copy_engine[copier]
            work = carrier.prepare(plan)
            return work, carrier, len(work.device_address), plan.nbytes
        pack = self._pack.get(plan.group_index)
        if pack is None:
            assert self._kernels is not None
            copies = self._of_copy_engine["loop" if self.missing["batch"] else "batch"]
            stores, loads = self._rings
            planes = self._kernels.planes(plan.group_index, 0, plan.group.planes)
            pack = PackCopier(self._kernels, copies, (stores, loads), planes)
            self._pack[plan.group_index] = pack
        return pack.prepare(plan), pack, len(plan.blocks) * plan.group.num_parts, plan.nbytes

    def keep(self) -> None:
        """Free nothing that the GPU may still use: the context is lost."""
        if self._kernels is not None:
            self._kernels.keep()

    def restore(self, tables: list[Table], places: Mapping[Place, list[Half]]) -> None:
        """Restore the tables in use after an interrupt: exactly these, and these places in the rings, by these
        segments.
        """
        for ring in self._rings:
            ring.restore(places)
        if self._kernels is not None:
            self._kernels.restore(tables)

    def close(self) -> None:
        """Free the copiers' memory; nothing may be in flight. If it is interrupted, call it again."""
        kernels = () if self._kernels is None else (self._kernels.close,)
        run_all((self._batch.close, *(ring.close for ring in self._rings), *kernels))
