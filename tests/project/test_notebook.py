"""The notebook runs as it is, once and again, leaves nothing behind, and its committed outputs are not stale.

To execute it again after a change, on a machine with a GPU, CuPy and JAX with CUDA:

    KVOFFLOAD_EXECUTED=folder pytest -m gpu -n 0 tests/project/test_notebook.py
    cp folder/offload_tour.ipynb examples/

KVOFFLOAD_EXECUTED names the folder in which executed notebooks are kept as they are to be committed; without `-m gpu`
`offload_tour_simulated.ipynb`, of the simulated device.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from notebook_outputs import (
    LARGEST,
    METADATA,
    TAGS,
    as_committed,
    cell_of,
    code_cells,
    defects,
    differences,
    is_of_a_gpu,
    text_of,
)

pytestmark = pytest.mark.long

NOTEBOOK = Path(__file__).parent.parent.parent / "examples" / "offload_tour.ipynb"
PACKAGES = ("nbclient", "nbformat", "ipykernel", "matplotlib")
AGAIN = "execute the notebook again: the top of this test's file says how"
HEAD = """\
import warnings

warnings.filterwarnings("always", message=".*never closed", category=ResourceWarning)
"""
COUNT = """\
import gc, json, threading

gc.collect()
device.reclaim()
open_devices = [each for each in gc.get_objects() if isinstance(each, kvoffload.Device) and not each.closed]
descriptors = len(os.listdir("/proc/self/fd"))
counts = {"threads": threading.active_count(), "descriptors": descriptors, "devices": len(open_devices)}
counts |= {"owned": device.owned} | ({} if device.simulator is None else device.simulator.leaks())
simulators = [*globals().get("simulators", []), device.simulator]
print(json.dumps(counts))
"""
TAIL = """\
device.close()
for simulator in simulators:
    simulator.check_guards()
    assert simulator.violations == []
left = [{kind: count for kind, count in simulator.leaks().items() if count} for simulator in simulators]
print(json.dumps(left))
"""

Cell = Any  # of nbformat, which has no types
Notebook = Any


def read() -> Notebook:
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)


def execute(cells: Sequence[Cell], folder: Path, patch: pytest.MonkeyPatch) -> list[Cell]:
    """Run cells in a kernel of this interpreter, in a folder of its own; the code cells, with their outputs.

    No kernel needs to be installed, and installed ones are not used.
    """
    import nbformat
    from nbclient import NotebookClient

    kernel = folder / "kernels" / "here" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "here", "language": "python"}))
    patch.setenv("JUPYTER_PATH", str(folder))
    for variable in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        patch.setenv(variable, str(folder / variable.lower()))
    path = [str(NOTEBOOK.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    patch.setenv("PYTHONPATH", os.pathsep.join(path))
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    options: dict[str, Any] = {"kernel_name": "here", "timeout": 100, "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}, **options).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def keep(notebook: Notebook, name: str) -> None:
    """Write an executed notebook into the folder KVOFFLOAD_EXECUTED, if that is set, as it is to be committed."""
    if folder := os.environ.get("KVOFFLOAD_EXECUTED"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{name}.ipynb").write_text(written(notebook))


def written(notebook: Notebook) -> str:
    import nbformat

    return str(nbformat.writes(notebook)) + "\n"


def printed(cell: Cell) -> str:
    """The stdout of an executed cell, which has nothing on its stderr: no warning either."""
    streams = [output for output in cell.outputs if output.output_type == "stream"]
    assert [each.text for each in streams if each.name == "stderr"] == []
    return "".join(each.text for each in streams)


def code(source: str) -> Cell:
    import nbformat

    return nbformat.v4.new_code_cell(source)


def copies(cells: Sequence[Cell]) -> list[Cell]:
    """The same cells with ids of their own: a notebook has each once."""
    copied = [copy.deepcopy(cell) for cell in cells]
    for cell in copied:
        cell.id = uuid.uuid4().hex
    return copied


def require_jupyter() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'kvoffload[notebook]'")


@pytest.fixture
def _jupyter() -> None:
    require_jupyter()


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Notebook:
    """The notebook as it is executed on the simulated device, wherever this runs."""
    require_jupyter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        cells = read().cells
        ran = execute([code(HEAD), *copies(cells)], tmp_path_factory.mktemp("simulated"), patch)
    notebook = as_committed(cells, ran[1:])
    keep(notebook, "offload_tour_simulated")
    return notebook


# outputs --------------------------------------------------------------------------------------------------------------


def test_the_committed_outputs_are_of_these_sources() -> None:
    """Every code cell has been executed as it stands, in order and without errors."""
    require_jupyter()
    assert defects(read()) == [], AGAIN


def test_the_committed_outputs_are_of_a_gpu() -> None:
    """A reader sees measured bandwidths: what the simulated device shows is not what is committed."""
    require_jupyter()
    assert is_of_a_gpu(read()), f"the outputs are of the simulated device; {AGAIN}"


def test_the_committed_outputs_are_those_of_an_execution(simulated: Notebook) -> None:
    """The notebook is executed on the simulated device; what does not depend on the device is the same."""
    assert defects(simulated) == []
    assert not is_of_a_gpu(simulated)
    assert differences(read(), simulated) == [], AGAIN


def test_what_the_notebook_shows(simulated: Notebook) -> None:
    text = "".join(map(text_of, code_cells(simulated)))
    assert "simulated" in text
    assert "every byte came back: True" in text
    assert "every byte is what was stored: True" in text
    assert "turn 3: 220 tokens, 13 full blocks, 11 found" in text
    assert "8 blocks, an allocation for each plane: 512 operations" in text
    assert text.count("there is nothing to measure") == 2
    assert "NumPy sees what was loaded: True" in text
    assert "GB/s" not in text
    figures = [
        output for cell in code_cells(simulated) for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    assert len(figures) == 4


def test_what_the_text_says_of_the_policies(simulated: Notebook) -> None:
    """The default finds the most of the four, and Belady's is the bound."""
    lines = [line.split() for line in text_of(cell_of(simulated, "policies")).splitlines()]
    assert lines[1] == ["slots", "GiB", "prefix", "lru", "arc", "s3fifo", "belady"]
    for slots, gib, *rates in lines[2:]:
        default, *others, bound = (float(rate.rstrip("%")) for rate in rates)
        assert max(others) < default <= bound
        assert int(slots) / 512 == float(gib)
    assert [line[0] for line in lines[2:]] == ["256", "512", "1024", "2048", "4096"]


def _change_source(notebook: Notebook) -> None:
    cell_of(notebook, "traffic").source += "\n# not executed"


def _remove_outputs(notebook: Notebook) -> None:
    cell_of(notebook, "picture").outputs = []


def _change_text(notebook: Notebook) -> None:
    output = cell_of(notebook, "serve").outputs[0]
    output.text = output.text.replace("evicted", "moved")


def _remove_a_card(notebook: Notebook) -> None:
    del cell_of(notebook, "plan").outputs[0]["data"]["text/html"]


def _keep_an_error(notebook: Notebook) -> None:
    import nbformat

    error = nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])
    cell_of(notebook, "jax").outputs.append(error)


def _keep_a_warning(notebook: Notebook) -> None:
    import nbformat

    output = nbformat.v4.new_output("stream", name="stderr", text="warning")
    cell_of(notebook, "layout").outputs.append(output)


def _forget_the_sources(notebook: Notebook) -> None:
    del notebook.metadata["executed_sources"]


def _execute_out_of_order(notebook: Notebook) -> None:
    code_cells(notebook)[3].execution_count += 1


def _name_a_path(notebook: Notebook) -> None:
    code_cells(notebook)[1].outputs[0].text += "/home/of-a-person/.cache\n"


@pytest.mark.parametrize(
    "change",
    [
        _change_source, _remove_outputs, _change_text, _remove_a_card, _keep_an_error, _keep_a_warning,
        _forget_the_sources, _execute_out_of_order, _name_a_path,
    ],
)  # fmt: skip
def test_stale_outputs_are_found(change: Callable[[Notebook], None], simulated: Notebook) -> None:
    """Each of these changes to the notebook is found."""
    changed = copy.deepcopy(simulated)
    change(changed)
    assert defects(changed) or differences(changed, simulated)


def test_outputs_of_a_gpu_are_compared(simulated: Notebook) -> None:
    """What differs on a GPU is compared with patterns, cards by their rows, everything else to the letter."""
    notebook = read()
    for name in ("compute", "bandwidth", "numpy", "cupy", "jax"):
        changed = copy.deepcopy(notebook)
        cell_of(changed, name).outputs[0].text = re.sub(r"\.|:|NumPy", "", text_of(cell_of(notebook, name)))
        assert len(differences(changed, simulated)) == 1
    for name in ("compute-figure", "bandwidth-figure", "picture", "policies", "engine", "cache"):
        changed = copy.deepcopy(notebook)
        del cell_of(changed, name).outputs[-1]
        assert len(differences(changed, simulated)) == 1
    changed = copy.deepcopy(notebook)
    card = cell_of(changed, "engine").outputs[0].data
    card["text/html"] = card["text/html"].replace("selected by", "chosen by")
    assert len(differences(changed, simulated)) == 1


# running --------------------------------------------------------------------------------------------------------------


def lighter(cells: Sequence[Cell]) -> list[Cell]:
    """The same cells with fewer requests: they are run four times."""
    lighter = [copy.deepcopy(cell) for cell in cells]
    for cell in lighter:
        cell.source = re.sub(r"\brequests=\d+", "requests=20", cell.source)
    assert sum(cell.source != other.source for cell, other in zip(lighter, cells, strict=True)) == 2
    return lighter


@pytest.mark.usefixtures("_jupyter")
def test_the_notebook_runs_again_and_again_and_leaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells, all again, and each one twice in a row."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on the simulated device, wherever this runs
    cells = lighter(code_cells(read()))
    twice = [each for cell in cells for each in copies([cell, cell])]
    runs = [copies(cells), copies(cells), twice]
    program = [code(HEAD), *(cell for run in runs for cell in [*run, code(COUNT)]), code(TAIL)]
    out = [printed(cell) for cell in execute(program, tmp_path, monkeypatch)]
    once, per_run = out[1 : len(cells) + 1], len(cells) + 1
    counts = [json.loads(out[place]) for place in (per_run, 2 * per_run, 2 * per_run + len(twice) + 1)]
    assert counts[0]["devices"] == 1
    opened, events = ([each.pop(kind) for each in counts] for kind in ("descriptors", "events"))
    assert counts[0] == counts[1] == counts[2]
    assert opened[2] <= opened[0] + 2, "each cell has run three times more; the kernel itself opens some now and then"
    assert max(events) < 40, "open engines keep theirs; how many depends on how many of 20 transfers were in flight"
    assert json.loads(out[-1]) == [{}, {}, {}]
    assert out[per_run + 1 : 2 * per_run] == once, "the same again"


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_jupyter", "only_gpu")
def test_the_notebook_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = read().cells
    program = [code(HEAD), *copies(cells), code(COUNT), *copies(cells), code(COUNT)]
    ran = execute(program, tmp_path, monkeypatch)
    half = len(ran) // 2
    notebook = as_committed(cells, ran[1:half])  # the cells between HEAD and COUNT
    keep(notebook, "offload_tour")
    assert defects(notebook) == []
    assert is_of_a_gpu(notebook)
    found = [each for each in differences(notebook, notebook) if not each.startswith(missing_libraries())]
    assert found == []
    assert len(written(notebook)) < LARGEST
    counts = [json.loads(printed(cell)) for cell in (ran[half], ran[-1])]
    assert counts[1]["owned"] == counts[0]["owned"]
    assert counts[1]["devices"] == counts[0]["devices"] == 1


def missing_libraries() -> tuple[str, ...]:
    """The cells of libraries that are not installed here."""
    packages = {"cupy": ["cupy"], "jax": ["jax_cuda12_plugin", "jax_cuda13_plugin"]}
    return tuple(f"{cell}:" for cell, names in packages.items() if not any(map(importlib.util.find_spec, names)))


# form -----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_jupyter")
def test_the_notebook_is_kept_clean() -> None:
    """Nothing in the file depends on the program that has written it, or on the time."""
    import nbformat

    notebook = read()
    nbformat.validate(notebook)
    assert NOTEBOOK.read_text() == written(notebook), "as nbformat writes it"
    assert len(written(notebook)) < LARGEST
    assert {key: value for key, value in notebook.metadata.items() if key != "executed_sources"} == METADATA
    names = [cell.id for cell in notebook.cells]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").isalpha() for name in names), "ids are names, which do not change"
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
        assert cell.metadata.get("tags", []) in TAGS


@pytest.mark.usefixtures("_jupyter")
def test_each_code_cell_is_short_and_has_words_before_it() -> None:
    cells = read().cells
    sources = [cell.source for cell in code_cells(read())]
    assert 12 <= len(sources) <= 24
    assert max(len(source.splitlines()) for source in sources) <= 40
    kinds = "".join(cell.cell_type[0] for cell in cells)
    assert "cc" not in kinds
