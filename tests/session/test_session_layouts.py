"""Saved in one layout, restored in another: the blocks of the device are the same, bit for bit."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from conversations import AXES, HEADS, POISON, Kind, talk, values_of, world
from seeds import rest_long

from kvoffload import KVLayout, LayoutError, ShardedLayout, kernels
from kvoffload.session.saving import whole_blocks

PERMUTED = ("heads", "tokens", "dim")
KINDS = [
    Kind(),
    Kind("plane-major"),
    Kind("separate"),
    Kind(factor=4),
    Kind("plane-major", factor=4),
    Kind("separate", factor=4, slot_order="block-major"),
    Kind(axes=PERMUTED),
    Kind("plane-major", axes=("dim", "heads", "tokens"), factor=4),
    Kind(heads=(4, 4)),
    Kind("plane-major", axes=PERMUTED, factor=4, heads=(1,) * 8),
    Kind("separate", heads=(6, 2), slot_order="block-major"),
    Kind(codec="bf16-12"),
    Kind("plane-major", factor=4, codec="bf16-12", axes=PERMUTED),
    Kind(codec="bf16-12", heads=(2, 6)),
]
OF_TWO = [
    Kind(groups=2),
    Kind("separate", factor=4, groups=2, axes=PERMUTED),
    Kind("plane-major", groups=2, heads=(3, 5)),
    Kind(groups=2, codec=["raw", "bf16-12"]),
]
TOKENS = talk(0)


def name(kind: Kind) -> str:
    return f"{kind.arrays} {'-'.join(kind.axes)} {kind.factor} {kind.codec} {len(kind.heads)} {kind.groups}"


def runs(kind: Kind) -> bool:
    return kind.codec == "raw" or kernels.compiler.triton_version() is not None


@lru_cache
def saved(kind: Kind) -> bytes:
    """The file that a cache of this kind saves."""
    with TemporaryDirectory() as folder, world(kind, seed=5) as each:
        each.store(TOKENS, np.random.default_rng(1).permutation(24)[:8].tolist())
        assert each.save(Path(folder) / "file", np.append(TOKENS, 7)) == len(TOKENS)
        return (Path(folder) / "file").read_bytes()


def hashable(kind: Kind) -> Kind:
    return kind._replace(codec=tuple(kind.codec)) if isinstance(kind.codec, list) else kind


def params(kinds: list[Kind]) -> list[Any]:
    marks = {True: (), False: (pytest.mark.kernels,)}
    return [pytest.param(kind, id=name(kind), marks=marks[kind.codec == "raw"]) for kind in map(hashable, kinds)]


@pytest.mark.parametrize("kind", [*params(KINDS), *params(OF_TWO)])
def test_what_any_layout_saves_every_other_restores(kind: Kind, tmp_path: Path, seed: int) -> None:
    random, sources = np.random.default_rng(seed), map(hashable, KINDS if kind.groups == 1 else OF_TWO)
    files = {each: saved(each) for each in sources if runs(each)}
    assert len(set(files.values())) == 1, "equal saves give equal bytes, in whatever layout"
    with world(kind, seed=seed) as target:
        whole = whole_blocks(target.cache)
        for place, content in enumerate(files.values()):
            (tmp_path / "file").write_bytes(content)
            for slots in target.slots:
                slots[:] = POISON
            assert target.restore(tmp_path / "file") == (len(TOKENS), len(TOKENS), "")
            with target.cache.acquire(target.keys(TOKENS)) as lease:
                rows = [lease.slots(group) for group in range(kind.groups)]
                for group, values in enumerate(values_of(kind, TOKENS)):
                    assert (whole.gather(group, rows[group]).view(values.dtype) == values).all()
            layout = target.cache.engine.layout
            for slots, of in zip(target.slots, getattr(layout, "layouts", [layout]), strict=True):
                guards = np.ones(slots.shape, bool)
                for group, used in enumerate(rows):
                    guards[used, : of.groups[group].payload_bytes] = False
                assert (slots[guards] == POISON).all(), "nothing is written beside"
            if kind.codec == "raw" or place % 4 == 0:  # the simulator interprets kernels slowly
                target.check_load(TOKENS, random.permutation(24)[:8].tolist())
            target.cache.clear()


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("blocks", [1, 3, 5, 6])
def test_the_last_blocks_may_not_fill_a_slot(factor: int, blocks: int, tmp_path: Path) -> None:
    with world(Kind()) as source:
        source.store(TOKENS)
        source.save(tmp_path / "file", TOKENS[: 4 * blocks])
    with world(Kind(factor=factor)) as target:
        rest = blocks % factor
        found = target.restore(tmp_path / "file")
        assert found[:2] == (4 * (blocks - rest), 4 * blocks)
        assert bool(found.reason) == bool(rest)
        if blocks >= factor:
            target.check_load(TOKENS[: 4 * (blocks - rest)], range(3, 3 + blocks - rest))


REFUSED: dict[str, Any] = {"layers": (1, (4, 4, 64)), "other extents": (2, (8, 4, 32)), "no shape": (2, None)}


@pytest.mark.parametrize("what", REFUSED)
def test_shards_that_do_not_divide_heads_are_refused_before_anything_is_written(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes, shape = REFUSED[what]
    with world(Kind(heads=(4, 4))) as two:
        first, second = two.cache.engine.layout.layouts
        said: dict[str, Any] = {"dtype": "bfloat16", "tokens_per_block": 4, "block_axes": AXES, "block_shape": shape}
        other = ShardedLayout([first, KVLayout([second.groups[0].planes[:planes]], **said)])
        two.store(TOKENS)
        two.save(tmp_path / "whole", TOKENS)
        monkeypatch.setattr(two.cache.engine, "layout", other)
        before = two.cache.statistics()
        for call in (lambda: two.save(tmp_path / "new", TOKENS), lambda: two.restore(tmp_path / "whole")):
            with pytest.raises(LayoutError, match="block_shape of groups" if what == "no shape" else "heads"):
                call()
        assert [each.name for each in tmp_path.iterdir()] == ["whole"]
        assert two.cache.statistics() == before


@pytest.mark.kernels
def test_blocks_that_a_codec_cannot_hold_end_what_is_restored(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    with world(Kind()) as source:
        blocks = values_of(source.kind, TOKENS)
        blocks[0][5] = random.integers(0, 1 << 16, blocks[0][5].shape)
        source.write(source.memory(range(8), blocks))
        source.cache.store(source.keys(TOKENS), range(8), after=None).wait(30)
        source.save(tmp_path / "file", TOKENS)
    for factor, held in ((1, 5), (4, 4)):
        with world(Kind(codec="bf16-12", factor=factor)) as target:
            found = target.restore(tmp_path / "file")
            assert found == (4 * held, 32, "the cache's codec cannot hold the next block")
            target.check_load(TOKENS[: 4 * held], range(held))


@pytest.mark.parametrize("number", rest_long(range(40), 6))
def test_layouts_by_chance(number: int, tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)

    def some() -> Kind:
        cuts = np.sort(random.choice(np.arange(1, HEADS), int(random.integers(0, 4)), replace=False)).tolist()
        heads = np.diff([0, *cuts, HEADS]).tolist()
        axes = tuple(AXES[axis] for axis in random.permutation(3))
        arrays = str(random.choice(["block-major", "plane-major", "separate"]))
        order = [None, "block-major", "plane-major"][int(random.integers(3))]
        return Kind(arrays, axes, int(random.choice([1, 2, 4])), "raw", tuple(heads), 1 + number % 2, order)

    with world(some(), seed=number) as source, world(some(), seed=number) as target:
        source.store(TOKENS, random.permutation(24)[:8].tolist())
        assert source.save(tmp_path / "file", TOKENS) == 32
        assert target.restore(tmp_path / "file") == (32, 32, "")
        target.check_load(TOKENS, random.permutation(24)[:8].tolist())
