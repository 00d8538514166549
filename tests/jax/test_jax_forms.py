"""An OwnedCache in every form that a server may have, on one device and on two: one array, lists, dicts, nested tuples,
64 arrays, groups with block tables of their own. The same checks, the same bytes.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from seeds import seeds
from sharded_jax import JaxDevices, simulated_devices

import kvoffload
from kvoffload import LayoutError, OffloadEngine
from kvoffload.jax import OwnedCache

BLOCKS, WIDTH, SLOTS = 6, 8, 4
LEAF = (BLOCKS, WIDTH)
WINDOW = (4, WIDTH // 2)  # other blocks, and fewer of them
FORMS: dict[str, tuple[Any, Any]] = {  # shapes, groups
    "array": ((4, *LEAF), 0),
    "list": ([LEAF] * 4, 0),
    "one in a list": ([LEAF], 0),
    "dict": ({"v": [LEAF] * 2, "k": [LEAF] * 2}, 0),
    "nested tuple": (((LEAF, [LEAF]), ({"x": LEAF}, (LEAF,))), 0),
    "64 arrays": ([LEAF] * 64, 0),
    "groups": ({"full": {"k": [LEAF] * 2, "v": [LEAF] * 2}, "window": [WINDOW] * 3}, {"full": 0, "window": 1}),
    "alternating groups": ([LEAF, WINDOW, LEAF, WINDOW], [0, 1, 0, 1]),
}


class Rig(NamedTuple):
    """A cache, an engine over it, and steps of a model. Leaf `i` of a step that writes `value` gets `value + i`."""

    on: JaxDevices
    cache: OwnedCache
    engine: Any
    groups: list[int]  # of each leaf
    several: bool

    @property
    def leaves(self) -> list[Any]:
        found: list[Any] = self.on.jax.tree.leaves(self.cache.arrays)
        return found

    def put(self, leaf: Any, block: int, value: Any) -> Any:
        """A leaf with another value in a block. One array has planes, which get values of their own."""
        if leaf.ndim == 2:
            return leaf.at[block].set(value)
        return leaf.at[:, block].set(value + np.arange(leaf.shape[0], dtype=np.float32)[:, None])

    def jitted(self, function: Callable[..., Any], placed: Any, *, donate: bool = True) -> Any:
        options = {"out_shardings": placed} if self.several else {}
        return self.on.jax.jit(function, **({"donate_argnums": 0} if donate else {}), **options)

    def step(self, *, donate: bool = True) -> Any:
        """A step that takes the whole tree."""

        def update(tree: Any, block: int, value: float) -> Any:
            leaves, structure = self.on.jax.tree.flatten(tree)
            return structure.unflatten([self.put(leaf, block, value + at) for at, leaf in enumerate(leaves)])

        return self.jitted(update, self.cache.sharding, donate=donate)

    def step_of(self, number: int) -> Any:
        """A step that takes leaf `number` alone."""
        placed = self.on.jax.tree.leaves(self.cache.sharding)[number] if self.several else None
        return self.jitted(self.put, placed)

    def values(self) -> list[list[float]]:
        """For each plane, the value in each block; every element of a block has it."""
        arrays = [np.asarray(leaf) for leaf in self.leaves]
        planes = [plane for array in arrays for plane in (array if array.ndim == 3 else [array])]
        assert all((plane == plane[:, :1]).all() for plane in planes)
        return [plane[:, 0].tolist() for plane in planes]

    def transfer(self, name: str, first: int, second: int) -> None:
        """Of one block, or slot, of each group."""
        for group in sorted(set(self.groups)):
            slots = second if name == "store" else first
            mine = SLOTS * group + slots  # groups do not share slots
            pair = ([first], [mine]) if name == "store" else ([mine], [second])
            getattr(self.engine, name)(*pair, group=group, after=self.cache)


@pytest.fixture(params=[(count, form) for form in FORMS for count in (1, 2)], ids="{0[1]}, {0[0]}".format)
def rig(request: pytest.FixtureRequest, seed: int) -> Iterator[Rig]:
    count, form = request.param
    shapes, groups = FORMS[form]
    with simulated_devices(count, seed) as on:
        several, array = count > 1, form == "array"
        sharding = on.sharding(*([None] if array else []), None, "heads") if several else None
        cache = OwnedCache(
            on.devices if several else on.devices[0],
            shapes,
            "float32",
            sharding=sharding,
            groups=groups,
            block_axis=1 if array else 0,
            plane_axis=0 if array else None,
        )
        num_groups = 1 if groups == 0 else 2
        engine: Any = (
            on.engine(cache, SLOTS * num_groups)
            if several
            else OffloadEngine(cache.layout, device=on.devices[0], num_slots=SLOTS * num_groups, staging_bytes=0)
        )
        with engine:
            numbers = [int(leaf.shape[-1] != WIDTH) for leaf in on.jax.tree.leaves(cache.shapes)]
            yield Rig(on, cache, engine, numbers, several)


# bytes ----------------------------------------------------------------------------------------------------------------


def test_what_a_step_wrote_is_stored_and_loaded(rig: Rig) -> None:
    step, cache = rig.step(), rig.cache
    assert rig.on.jax.tree.structure(cache.arrays) == rig.on.jax.tree.structure(cache.shapes)
    cache.arrays = step(cache.arrays, 2, 10.0)
    rig.transfer("store", 2, 1)
    cache.arrays = step(cache.arrays, 2, 100.0)
    rig.transfer("load", 1, 3)
    for at, values in enumerate(rig.values()):
        assert values[:4] == [0.0, 0.0, 100.0 + at, 10.0 + at]


@pytest.mark.parametrize("turn", seeds(1))
def test_a_random_life(rig: Rig, turn: int) -> None:
    """Steps of all leaves and of single ones, transfers, steps whose result is lost, updates that are refused, calls
    inside calls: after each, every block has its bytes.
    """
    chance, cache, jax = random.Random(turn), rig.cache, rig.on.jax
    step, copying = rig.step(), rig.step(donate=False)
    expected = rig.values()
    blocks = min(len(values) for values in expected)
    stored: dict[int, list[float]] = {}
    for number in range(20):
        act = chance.choice(["step", "step", "single", "store", "load", "lost", "lost one", "copied", "nested"])
        block, value, slot = chance.randrange(blocks), 100.0 * (number + 1), chance.randrange(SLOTS)
        before = jax.tree.leaves(cache.arrays)
        if act == "step":
            cache.arrays = step(cache.arrays, block, value)
            for at, values in enumerate(expected):
                values[block] = value + at
        elif act == "single":
            leaves, structure = jax.tree.flatten(cache.arrays)
            for one in chance.sample(range(len(leaves)), min(2, len(leaves))):
                leaves[one] = rig.step_of(one)(leaves[one], block, value)
                for at in range(len(expected) // len(leaves)):
                    expected[one + at][block] = value + at
            cache.arrays = structure.unflatten(leaves)
        elif act == "store":
            rig.transfer("store", block, slot)
            stored[slot] = [values[block] for values in expected]
        elif act == "load" and slot in stored:
            rig.transfer("load", slot, block)
            for values, there in zip(expected, stored[slot], strict=True):
                values[block] = there
            assert [values[block] for values in rig.values()] == stored[slot]
            assert all(each.is_deleted() for each in before), "no array from before a transfer is read"
        elif act in ("lost", "lost one"):  # the result of a step never gets back
            if act == "lost":
                step(cache.arrays, block, value)
            else:
                rig.step_of(-1)(jax.tree.leaves(cache.arrays)[-1], block, value)
            assert cache.is_deleted()
            with pytest.raises(ValueError, match=r"deleted|donated"):
                rig.transfer("store", block, slot)
            with pytest.warns(kvoffload.KVOffloadWarning, match="array was donated and no result was set"):
                assert rig.values() == expected, "on a simulated device a lost step has written nothing"
            assert all(each.is_deleted() for each in before)
        elif act == "copied":
            with pytest.raises(LayoutError, match=r"is no update in place.*Donate"):
                cache.arrays = copying(cache.arrays, block, value)
        elif act == "nested":
            rig.engine.store([block], [0], after=cache)
            with rig.engine.lock, pytest.raises(RuntimeError, match="in the middle of another call"):
                cache.arrays  # noqa: B018
            stored.pop(0, None)
        assert rig.values() == expected, act


# checks ---------------------------------------------------------------------------------------------------------------


def wrong_leaves(rig: Rig, number: int) -> Iterator[tuple[Any, str]]:
    """What may not be set in the place of a leaf, and what the error says."""
    jax, leaf = rig.on.jax, rig.leaves[number]
    yield leaf[..., :1], "must be float32 of shape"
    yield jax.numpy.zeros(leaf.shape, "float16"), "must be float32 of shape .*, got float16"
    yield np.zeros(leaf.shape, "float32"), r"must be a jax\.Array, got ndarray"
    yield None, ""
    deleted = jax.numpy.zeros(leaf.shape)
    deleted.delete()
    yield deleted, r"was deleted, or donated to a computation: float32 of shape .*; pass the array that"
    yield jax.device_put(jax.numpy.ones(leaf.shape), leaf.sharding), "is no update in place"
    if rig.several:
        yield jax.numpy.zeros(leaf.shape), "must have the sharding"


def test_a_wrong_leaf_is_named_and_nothing_changes(rig: Rig) -> None:
    cache, jax = rig.cache, rig.on.jax
    number = len(rig.leaves) - 1
    [(path, _)] = jax.tree_util.tree_flatten_with_path(cache.shapes)[0][number:]
    name = f"arrays{jax.tree_util.keystr(path)}" if path else "array"
    before, structure = jax.tree.flatten(cache.arrays)
    for wrong, said in wrong_leaves(rig, number):
        with pytest.raises(LayoutError) as caught:
            cache.arrays = structure.unflatten([*before[:-1], wrong])
        assert said == "" or str(caught.value).startswith(name), caught.value
        caught.match(said)
        assert all(one is other for one, other in zip(rig.leaves, before, strict=True))
    cache.arrays = rig.step()(cache.arrays, 1, 3.0)
    assert [values[1] for values in rig.values()] == [3.0 + at for at in range(len(rig.values()))]


def test_two_leaves_that_change_places_are_refused(rig: Rig) -> None:
    """They lie at each other's addresses."""
    before, structure = rig.on.jax.tree.flatten(rig.cache.arrays)
    if len(before) == 1:
        return
    with pytest.raises(LayoutError):
        rig.cache.arrays = structure.unflatten([before[1], before[0], *before[2:]])
    assert all(one is other for one, other in zip(rig.leaves, before, strict=True))


def test_another_tree_is_refused(rig: Rig) -> None:
    cache = rig.cache
    before = cache.arrays
    for wrong in ([before], (before,), {"k": before}, None, [], rig.leaves[:1] * 2):
        with pytest.raises(LayoutError, match=r"arrays must be the tree|arrays?(\[0\])? must be a jax\.Array"):
            cache.arrays = wrong
    assert all(one is other for one, other in zip(rig.leaves, rig.on.jax.tree.leaves(before), strict=True))


def test_a_step_that_raises_after_it_took_the_arrays(rig: Rig) -> None:
    """As Python code between the step and the assignment does."""
    cache, step = rig.cache, rig.step()
    cache.arrays = step(cache.arrays, 2, 5.0)
    rig.transfer("store", 2, 0)

    def serve() -> None:
        cache.arrays = log(step(cache.arrays, 2, 50.0))

    def log(_: Any) -> Any:
        raise KeyError("a bug of the host's")

    with pytest.raises(KeyError):
        serve()
    with pytest.warns(kvoffload.KVOffloadWarning, match="no result was set") as caught:
        values = rig.values()
    assert [each.filename for each in caught] == [__file__]
    assert [each[2] for each in values] == [5.0 + at for at in range(len(values))]
    rig.transfer("load", 0, 1)
    assert [each[1] for each in rig.values()] == [5.0 + at for at in range(len(values))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.arrays = step(cache.arrays, 0, 7.0)
        assert [each[0] for each in rig.values()] == [7.0 + at for at in range(len(values))]


def test_single_leaves_follow_transfers_and_are_followed(rig: Rig) -> None:
    cache, jax = rig.cache, rig.on.jax
    count = len(rig.leaves)
    steps = [rig.step_of(number) for number in range(min(count, 4))]
    for turn in range(1, 4):
        leaves, structure = jax.tree.flatten(cache.arrays)
        for number, step in enumerate(steps):
            leaves[number] = step(leaves[number], 3, 10.0 * turn + number)
        with pytest.raises(ValueError, match=r"deleted|donated"):
            rig.transfer("store", 3, 1)
        cache.arrays = structure.unflatten(leaves)
        rig.transfer("store", 3, 1)
        rig.transfer("load", 1, 0)
        assert [each[0] for each in rig.values()][: len(steps)] == [10.0 * turn + at for at in range(len(steps))]
