"""Members of one pool with weights of their own: neither ever finds the other's keys, and unused ones go first."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooling import SECONDS, Member, eventually, keys_of, member, members, region_bytes, rows_of
from seeds import seeds

from kvoffload import NO_WAIT, LayoutError, Tenant
from kvoffload.pool import PoolOwner


def use(one: Member, name: str) -> None:
    """The weights, and what the model computes with them: other bytes for the same keys."""
    one.cache.use_weights(name)
    one.expected = rows_of(np.random.default_rng(sum(name.encode())), "raw", len(one.expected))
    for block, rows in enumerate(one.expected):
        one.put(block, rows)


@pytest.fixture(params=["alone", "with a policy"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {} if request.param == "alone" else {"policy": "lru"}


def test_members_with_different_names_find_their_own_bytes_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    with PoolOwner(tmp_path / "pool", nbytes=region_bytes(32), **options) as owner, members(owner.path, 2) as (a, b):
        use(a, "one")
        use(b, "two")
        a.store(*range(4))
        assert (a.hits(*range(4)), b.hits(*range(4))) == (4, 0)
        b.store(*range(6))
        assert (a.hits(*range(6)), b.hits(*range(6))) == (4, 6)
        a.check_load(*range(4))
        b.check_load(*range(6))
        use(b, "one")
        assert b.hits(*range(6)) == 4
        b.check_load(*range(4))
        assert a.counts()[0] == 10


def test_a_member_that_forgets_its_name_finds_what_has_none(tmp_path: Path) -> None:
    with PoolOwner(tmp_path / "pool", nbytes=region_bytes(32)) as owner, members(owner.path, 2) as (a, b):
        b.store(1)
        use(a, "one")
        assert a.hits(1) == 0
        a.cache.use_weights("")
        assert a.hits(1) == 1


def test_keys_of_weights_that_no_member_uses_go_first(tmp_path: Path) -> None:
    with PoolOwner(tmp_path / "pool", nbytes=region_bytes(8), policy="lru") as owner:
        with members(owner.path, 2) as (a, b):
            use(a, "one")
            a.store(*range(4))
            use(b, "two")
            b.store(*range(10, 14))
            use(b, "three")
            assert len(b.store(*range(20, 24)).keys) == 4, "those of two have made room, though they were stored later"
            assert a.hits(*range(4)) == 4
            a.check_load(*range(4))
        with member(owner.path) as c:
            use(c, "three")
            assert c.hits(*range(20, 24)) == 4
            c.store(*range(30, 34))
            assert c.hits(*range(20, 24)) == 4, "no member uses one any more"
            use(c, "one")
            assert c.hits(*range(4)) == 0


def test_a_new_owner_hears_which_weights_its_members_use(tmp_path: Path) -> None:
    first = PoolOwner(tmp_path / "pool", nbytes=region_bytes(8), policy="lru", tenants={"t": Tenant()})
    with member(first.path, tenant="t") as a:
        use(a, "one")
        a.store(*range(4))  # older, so they would go first
        use(a, "two")
        a.store(*range(10, 14))
        use(a, "one")
        first.close()
        with PoolOwner(tmp_path / "pool", nbytes=region_bytes(8), policy="lru", tenants={"t": Tenant()}):
            eventually(lambda: a.hits(*range(4)) == 4, "the member is back, and its keys", SECONDS)
            a.check_load(*range(4))
            eventually(lambda: len(a.store(*range(20, 24)).keys) == 4, "there is room")
            assert a.hits(*range(4)) == 4, "those of two have made room"
            use(a, "two")
            assert a.hits(*range(10, 14)) == 0


def test_an_open_request_of_the_weights_before_stores_nothing_more(tmp_path: Path) -> None:
    with PoolOwner(tmp_path / "pool", nbytes=region_bytes(8)) as owner, member(owner.path) as a:
        use(a, "one")
        with a.cache.open_request() as request:
            assert len(a.store(1, request=request).keys) == 1
            use(a, "two")
            assert a.store(1, 2, request=request).keys == ()
            assert a.hits(1) == 0


@pytest.mark.parametrize("seed", seeds(4))
def test_changes_at_random_find_no_byte_of_other_weights(tmp_path: Path, seed: int) -> None:
    rng, names = random.Random(seed), ["", "one", "two"]
    with PoolOwner(tmp_path / "pool", nbytes=region_bytes(12), policy="lru") as owner, members(owner.path, 2) as pair:
        for one in pair:
            use(one, "one")
        for _ in range(60):
            one = rng.choice(pair)
            if rng.random() < 0.3:
                use(one, rng.choice(names))
            one.store(*rng.sample(range(8), 3))
            one.check_hits(range(8))
            assert one.cache.status(keys_of([40]))[0].value == "miss"


@pytest.mark.parametrize(("name", "most"), [("", 64), ("one", 48)])
def test_a_key_that_is_too_long_is_refused_with_the_length_that_was_given(tmp_path: Path, name: str, most: int) -> None:
    with PoolOwner(tmp_path / "pool", nbytes=region_bytes(8)) as owner, member(owner.path) as a:
        use(a, name)
        a.cache.store([bytes(most)], [1], after=NO_WAIT).wait(SECONDS)
        with pytest.raises(LayoutError, match=rf"keys\[0\] has {most + 1} bytes, .* have at most {most}: "):
            a.cache.lookup([bytes(most + 1)])
