"""Costs, how they are fitted, and profiles: what is kept, what is trusted, and what is used instead."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import run_program

import kvoffload
from kvoffload import tuning
from kvoffload.errors import KVOffloadWarning
from kvoffload.internal import cachefiles
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import (
    COPIERS,
    Profile,
    ProfileKey,
    Shape,
    check_profile,
    default_profile,
    key_of,
    load_profile,
    parse,
    profile_for,
    profile_path,
    render,
    save_profile,
)
from kvoffload.tuning.costs import Costs, Curve, FlatCosts, StridedCosts, along
from kvoffload.tuning.fitting import Sample, fit, fit_strided, solve

H200 = ProfileKey("NVIDIA H200", "13.0", 5, 16, "13.3")
KIB = 1 << 10


def shape(block_bytes: int, blocks: int, planes: int = 64, *, folds: bool = True, merged: int = 1) -> Shape:
    plane_blocks = blocks * planes
    rows = plane_blocks // merged
    operations = blocks // merged if folds else rows
    return Shape(Direction.LOAD, blocks, plane_blocks, operations, rows, plane_blocks * block_bytes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv(cachefiles.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


# lines ----------------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1e-4), st.floats(1e-8, 1e-5), st.integers(64, 100_000))
def test_a_straight_line_is_followed_exactly_between_points_and_beyond(price: float, each: float, x: int) -> None:
    points = (64, 512, 4096)
    assert along(points, [price + each * p for p in points], x) == pytest.approx(price + each * x)


def test_below_the_first_point_costs_stay_between_constant_and_proportional() -> None:
    assert along((64, 128), (10.0, 11.0), 1) == pytest.approx(10.0 - 63 / 64)
    assert along((64, 128), (10.0, 9.0), 1) == 10.0, "a falling line is not followed upwards"
    assert along((64, 128), (10.0, 30.0), 32) == 5.0, "nor one through zero downwards"


def test_beyond_the_last_point_costs_do_not_fall() -> None:
    assert along((64, 128), (10.0, 9.0), 1000) == 9.0


def test_a_single_point_is_proportional() -> None:
    assert along((64,), (2.0,), 32) == 1.0


def test_flat_costs_are_exact_where_prices_add_up() -> None:
    def seconds(nbytes: float, count: float) -> float:
        return 1e-5 + count * (4e-7 + nbytes / 5e10)

    counts = (64, 1024)
    curves = [Curve(nbytes, counts, tuple(seconds(nbytes, n) for n in counts)) for nbytes in (2048, 8192, 65536)]
    costs = FlatCosts(tuple(curves))
    for nbytes in (2048, 3000, 18 * KIB, 65536, 1 << 20):
        for count in (64, 200, 5000):
            assert costs.seconds(nbytes, count) == pytest.approx(seconds(nbytes, count))
    single = FlatCosts((curves[0],))
    assert single.seconds(4096, 64) == pytest.approx(2 * single.seconds(2048, 64))


# fitting --------------------------------------------------------------------------------------------------------------

STRIDED = StridedCosts(9e-6, (4 * KIB, 16 * KIB), (1.5e-6, 2.0e-6), (1.2e-7, 3.4e-7))


def strided_samples(noise: float = 0.0, seed: int = 0) -> list[Sample]:
    random = np.random.default_rng(seed)
    found = []
    for nbytes in STRIDED.row_bytes:
        for planes in (8, 64):
            for blocks in (1, 8, 64):
                where = shape(nbytes, blocks, planes)
                exact = STRIDED.seconds(nbytes, where.rows, where.operations)
                found.append(Sample("strided", where, exact * (1 + noise * random.standard_normal())))
    return found


def test_the_prices_of_strided_copies_are_found() -> None:
    found = fit_strided(strided_samples())
    assert found.fixed == pytest.approx(STRIDED.fixed)
    assert found.row_bytes == STRIDED.row_bytes
    assert found.operation_seconds == pytest.approx(STRIDED.operation_seconds)
    assert found.row_seconds == pytest.approx(STRIDED.row_seconds)


def test_noise_of_2_percent_leaves_strided_times_right_within_5(seed: int) -> None:
    found = fit_strided(strided_samples(0.02, seed))
    for nbytes in (4 * KIB, 10 * KIB, 16 * KIB):
        for planes, blocks in ((8, 3), (32, 20), (64, 500)):
            exact = STRIDED.seconds(nbytes, planes * blocks, blocks)
            assert found.seconds(nbytes, planes * blocks, blocks) == pytest.approx(exact, rel=0.05)


def test_no_price_is_negative() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    prices = solve(columns, np.array([3.0, 2.0, 1.0]))
    assert (prices >= 0).all()
    assert prices[0] > 0


def test_curves_are_what_was_measured() -> None:
    where = [shape(nbytes, blocks, folds=False) for nbytes in (4096, 8192) for blocks in (1, 4)]
    samples = [Sample(method, each, 1e-6 * each.plane_blocks) for each in where for method in ("batch", "loop")]
    costs = fit(55e9, samples)
    assert costs.flat["batch"].curves == costs.flat["loop"].curves
    assert costs.flat["batch"].curves == (
        Curve(4096, (64, 256), (6.4e-5, 2.56e-4)),
        Curve(8192, (64, 256), (6.4e-5, 2.56e-4)),
    )
    assert costs.strided is None


# costs ----------------------------------------------------------------------------------------------------------------


def test_what_was_not_measured_takes_for_ever() -> None:
    empty = Costs(55e9)
    for method in (
        "strided",
        "batch",
        "loop",
        "pack",
    ):
        assert empty.seconds(method, shape(4096, 8)) == inf


# defaults -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "h200"),
    [
        (H200, True),
        (H200._replace(gpu="NVIDIA H100 80GB HBM3", link_generation=None, link_width=None), True),
        (H200._replace(link_generation=4), False),
        (H200._replace(link_width=8), False),
        (H200._replace(gpu="NVIDIA A100-SXM4-80GB", link_generation=4), False),
        (H200._replace(gpu="NVIDIA GeForce RTX 5090"), False),
        (None, False),
    ],
)
def test_who_gets_which_default(key: ProfileKey | None, h200: bool) -> None:
    source = default_profile(key).source
    assert source.startswith("default for " + ("H200-class GPUs" if h200 else "an unknown GPU"))


def test_a_simulated_device_has_the_default_for_an_unknown_gpu(device: kvoffload.Device, folder: Path) -> None:
    path = profile_path(key_of(device))
    path.parent.mkdir()
    path.write_bytes(b"not even looked at")
    assert folder in path.parents
    assert profile_for(device) is default_profile(None)


@given(st.sampled_from(Direction), st.integers(1, 3000), st.integers(4096, 1 << 20), st.booleans())
def test_for_an_unknown_gpu_nothing_is_faster_than_pcie_gen4_nor_than_on_an_h200(
    direction: Direction, blocks: int, block_bytes: int, folds: bool
) -> None:
    where = shape(block_bytes, blocks, folds=folds)._replace(direction=direction)
    unknown, h200 = default_profile(None), default_profile(H200)
    for copier in COPIERS:
        seconds = unknown.seconds(copier, where)
        assert where.nbytes / seconds <= 25e9 * 1.04
        assert seconds >= h200.seconds(copier, where) * 0.97


# files ----------------------------------------------------------------------------------------------------------------


def measured(key: ProfileKey = H200) -> Profile:
    return replace(default_profile(H200), key=key, source="measured on a day")


def test_a_default_profile_is_not_kept(folder: Path) -> None:
    with pytest.raises(ValueError, match="defaults come with the package"):
        save_profile(default_profile(H200))
    assert not list(folder.rglob("*.json"))


def test_a_profile_comes_back_as_it_was(folder: Path) -> None:
    path = save_profile(measured())
    assert path is not None
    assert folder in path.parents
    found = load_profile(H200)
    assert (found.key, found.source, found.simulated) == (H200, "measured on a day", False)
    assert render(found) == render(measured()) == path.read_bytes()
    for direction in Direction:
        assert found.costs[direction] == default_profile(H200).costs[direction]


def test_the_shipped_profile_is_as_tune_writes_it_without_blanks() -> None:
    """`kvoffload tune --output FILE` makes a new one; it is shipped with `separators=(",", ":")` and a line's end."""
    content = Path(tuning.__file__).with_name("h200_pcie5.json").read_bytes()
    assert json.loads(render(parse(content))) == json.loads(content)
    assert json.dumps(json.loads(content), separators=(",", ":")).encode() + b"\n" == content


def test_profiles_of_other_drivers_links_and_bindings_are_not_found(folder: Path) -> None:
    save_profile(measured())
    assert list(folder.rglob("*.json"))
    for change in ({"gpu": "NVIDIA H100"}, {"driver": "13.1"}, {"link_width": 8}, {"bindings": "13.5"}):
        key = H200._replace(**change)
        assert load_profile(key) is default_profile(key)


def test_no_profile_is_no_reason_to_warn(folder: Path) -> None:
    assert load_profile(H200) is default_profile(H200)
    assert load_profile(None) is default_profile(None)
    assert list(folder.iterdir()) == []


def edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    fields = json.loads(render(measured()))
    change(fields)
    return json.dumps(fields).encode()


HALF = {"row_bytes": [0.5], "operation": [1.0], "row": [1.0]}
HALF_CURVE = {"counts": [0.5], "us": [1.0]}


def _only_size(fields: dict[str, Any], size: str) -> None:
    fields["costs"]["load"]["flat"]["batch"] = {size: {"counts": [64], "us": [1.0]}}


BAD_FILES = {
    "empty": b"",
    "no JSON": b"\x00\xff profile",
    "cut off": render(measured())[:1000],
    "a list": b"[1, 2]",
    "old": edited(lambda fields: fields.update(format=0)),
    "foreign": render(measured(H200._replace(driver="12.9"))),
    "simulated": edited(lambda fields: fields.update(simulated=True)),
    "without a direction": edited(lambda fields: fields["costs"].pop("load")),
    "negative": edited(lambda fields: fields["costs"]["load"]["strided"].update(fixed=-1)),
    "not a number": edited(lambda fields: fields["costs"]["load"]["strided"].update(fixed=float("nan"))),
    "too few values": edited(lambda fields: fields["costs"]["load"]["flat"]["batch"]["4096"]["us"].pop()),
    "not ascending": edited(lambda fields: fields["costs"]["store"]["strided"]["row_bytes"].reverse()),
    "no curves": edited(lambda fields: fields["costs"]["store"]["flat"].update({"batch": {}})),
    "a text for a number": edited(lambda fields: fields["host"]["strided"].update(fixed="1.0")),
    "deep": b"[" * 200_000,
    "a huge link": edited(lambda fields: fields["costs"]["load"].update(link_gb_per_s=10**400)),
    "an infinite time": edited(lambda fields: fields["costs"]["load"]["strided"].update(fixed=inf)),
    "a time that would overflow": edited(lambda fields: fields["costs"]["load"]["strided"].update(fixed=1e300)),
    "a huge size": edited(lambda fields: _only_size(fields, "9" * 400)),
    "a size of 0": edited(lambda fields: _only_size(fields, "0")),
    "a size in other digits": edited(lambda fields: _only_size(fields, "\u0664")),
    "half a byte": edited(lambda fields: fields["costs"]["load"]["strided"].update(HALF)),
    "half a copy": edited(lambda fields: fields["costs"]["load"]["flat"]["batch"].update({"4096": HALF_CURVE})),
    "a truth for a count": edited(
        lambda fields: fields["costs"]["load"]["flat"]["batch"].update({"4096": HALF_CURVE | {"counts": [True]}})
    ),
    "strided with nothing in it": edited(lambda fields: fields["costs"]["load"].update(strided={})),
    "strided 0": edited(lambda fields: fields["costs"]["load"].update(strided=0)),
    "strided false": edited(lambda fields: fields["costs"]["load"].update(strided=False)),
    "strided without rows": edited(lambda fields: fields["costs"]["load"].update(strided=[])),
    "a key of other parts": edited(lambda fields: fields["key"].update(colour="green")),
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES)
def test_a_profile_that_cannot_be_used_is_ignored_with_one_warning(folder: Path, content: bytes) -> None:
    path = profile_path(H200)
    path.parent.mkdir()
    path.write_bytes(content)
    assert folder in path.parents
    with pytest.warns(
        KVOffloadWarning,
        match=r"is ignored \((it is not|it cannot|it was measured).*`kvoffload tune` measures a new one",
    ) as caught:
        assert load_profile(H200) is default_profile(H200)
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_profile(H200) is default_profile(H200)
    assert path.read_bytes() == content, "it is left for its owner to look at"


@pytest.mark.parametrize("label", ["", "warp", "strided 2", "gather", "Pack", " pack"])
def test_host_times_of_other_copiers_are_refused(label: str) -> None:
    with pytest.raises(ValueError, match="is no copier; known are strided, pack"):
        parse(edited(lambda fields: fields["host"].update({label: fields["host"]["loop"]})))


def test_a_direction_without_strided_copies_is_read() -> None:
    found = parse(edited(lambda fields: fields["costs"]["load"].update(strided=None)))
    assert found.costs[Direction.LOAD].strided is None
    assert found.seconds("strided", shape(8 * KIB, 8)) == inf


NEEDED = {"fixed", "row_bytes", "row", "operation", "counts", "us", "link_gb_per_s"}
NEEDED |= {"store", "load", "flat", "strided"}


def test_every_cut_and_every_missing_field_is_noticed() -> None:
    content = render(measured())
    for stop in range(0, len(content) - 2, 97):
        with pytest.raises(ValueError, match="it cannot be read"):
            parse(content[:stop])
    for path in _paths(json.loads(content)):
        parent = fields = json.loads(content)
        for name in path[:-1]:
            parent = parent[name]
        del parent[path[-1]]
        if len(path) == 1 or (path[-1] in NEEDED and path[0] == "costs"):
            with pytest.raises(ValueError, match="it is not a profile"):
                parse(json.dumps(fields).encode())


def _paths(fields: dict[str, Any]) -> list[list[str]]:
    found = []
    for name, value in fields.items():
        found.append([name])
        if isinstance(value, dict):
            found += [[name, *rest] for rest in _paths(value)]
    return found


def test_a_folder_that_cannot_be_written_costs_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("in the way")
    monkeypatch.setenv(cachefiles.FOLDER_VARIABLE, str(folder / "file"))
    with pytest.warns(KVOffloadWarning, match=cachefiles.FOLDER_VARIABLE):
        assert save_profile(measured()) is None
    assert load_profile(H200) is default_profile(H200)


def test_the_key_names_what_a_profile_depends_on(device: kvoffload.Device) -> None:
    assert key_of(device) == ProfileKey(device.name, "13.0", None, None, "13.3")


def test_a_profile_in_words() -> None:
    assert repr(measured()) == "Profile('measured on a day')"


# arguments


@pytest.mark.parametrize("given", ["x", None, 5, {"costs": {}}, Profile])
def test_what_is_no_profile_is_refused_by_name_with_the_remedy(given: object) -> None:
    with pytest.raises(TypeError, match=r"^profile must be a kvoffload.tuning.Profile, or None .*parse\(.*; got "):
        check_profile(given)


def test_a_profile_is_returned_as_it_is() -> None:
    assert check_profile(default_profile(None)) is default_profile(None)


def test_a_fifo_in_place_of_a_profile_does_not_block(tmp_path: Path) -> None:
    """To read one waits for a writer, and none comes. In a subprocess, so that a failure is no hang of the suite."""
    program = f"""
        import os, warnings
        warnings.simplefilter("ignore")
        os.environ["KVOFFLOAD_CACHE"] = {str(tmp_path)!r}
        from kvoffload.tuning import ProfileKey, default_profile, load_profile, profile_path
        key = ProfileKey("NVIDIA H200", "13.0", 5, 16, "13.3")
        path = profile_path(key)
        path.parent.mkdir(parents=True)
        os.mkfifo(path)
        print(load_profile(key).source == default_profile(key).source)
    """
    assert run_program(program, timeout=30).strip() == "True"
