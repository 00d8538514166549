"""vLLM's own tests of its offloading, as they are and with kvoffload's manager, worker and spec in place of vLLM's.

    python tests/vllm/support/vllm_own_tests.py FOLDER [FILE ...]

FOLDER is the folder `tests` of vLLM's source distribution, of the release that is installed; FILE are files or folders
in it, by default those that name one of the three classes, and the connector's. Prints the tables of
docs/vllm-tests.md. On a machine with a GPU the tests of transfers use it, elsewhere a simulated one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

from vllm_own_plugin import ANY_SLOTS, OUTPUT, WITH_OURS

HERE = Path(__file__).resolve().parent
FILES = (
    "v1/kv_offload/cpu/test_manager.py",
    "v1/kv_offload/cpu/test_gpu_worker.py",
    "v1/kv_offload/cpu/test_capacity.py",
    "v1/kv_offload/cpu/test_canonical_layout.py",
    "v1/kv_offload/cpu/policies",
    "v1/kv_offload/test_factory.py",
    "v1/kv_offload/tiering/test_tier_poll_thread.py",
    "v1/kv_connector/unit/offloading_connector",
)
OUTCOMES = ("passed", "failed", "skipped")
# What vLLM's tests read of the model that they name.
MODEL, CONFIG = "facebook/opt-125m", {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "vocab_size": 50272,
    "num_attention_heads": 12, "num_hidden_layers": 12, "max_position_embeddings": 2048, "torch_dtype": "float16",
    "word_embed_proj_dim": 768, "do_layer_norm_before": True,
}  # fmt: skip
# Of what a test that fails with ours says: its reason in the table.
REASONS = (
    (r"'?(?:Manager|vllm_substitutes.Manager)\b.* has no attribute '(_\w+)'", r"private: `\1`"),
    (r"'Worker' object has no attribute 'engine'", "private: made by `__new__`, with handlers of vLLM's worker"),
    (r"'Spec' object has no attribute '(\w+)'", r"attribute of vLLM's spec: `\1`"),
    (r"array_equal", "exact slot numbers"),
    (r"\.replicated_layout|assert 3 == 12", "one copy for all workers (`replicated_layout`)"),
    (r"policies of vLLM|policy must be one of", "a policy of vLLM's kind"),
    (r"is CPUOffloadingSpec", "the class that is in vLLM's module by that name"),
    (r"assert \[\] == \[24\]", "metrics that vLLM updates for subclasses of its own spec only"),
    (r"PrepareStoreOutput", "all or nothing: ours stores the first keys that find room"),
)
Results: TypeAlias = dict[str, dict[str, Any]]


def run(folder: Path, files: list[str], *, ours: bool, any_slots: bool = False) -> Results:
    """The results of vLLM's tests by their names. Runs pytest in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "tests").symlink_to(folder)
        (place / MODEL).mkdir(parents=True)
        (place / MODEL / "config.json").write_text(json.dumps(CONFIG))
        output, packages = place / "results.json", [str(HERE.parents[2]), str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, packages)), "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1", OUTPUT: str(output), WITH_OURS: str(int(ours)), ANY_SLOTS: str(int(any_slots)),
        }  # fmt: skip
        options = ["-q", "-p", "no:cacheprovider", "-p", "vllm_own_plugin", "-c", os.devnull, "-W", "ignore"]
        paths = [f"--rootdir={place}", "--confcutdir=tests/v1", *(f"tests/{each}" for each in files)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *paths],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1) or not output.exists():
            raise SystemExit(f"pytest has ended with {done.returncode} and no results:\n{done.stdout}\n{done.stderr}")
        results: Results = json.loads(output.read_text())
    return results


def counts_table(theirs: Results, ours: Results) -> list[str]:
    """A row for each file, and the totals: passed, failed, skipped; as they are, then with ours."""
    lines = ["| File | As they are | With ours | Of these made ours |", "|---|---|---|---|"]
    files = list(dict.fromkeys(_file(name) for name in theirs))
    for file in [*files, "Total"]:
        rows = [[r for n, r in each.items() if file in (_file(n), "Total")] for each in (theirs, ours)]
        cells = [", ".join(str(Counter(r["outcome"] for r in row)[kind]) for kind in OUTCOMES) for row in rows]
        lines.append(f"| {file} | {cells[0]} | {cells[1]} | {sum(bool(r['made']) for r in rows[1])} |")
    return lines


def reasons_table(theirs: Results, ours: Results) -> list[str]:
    """A row for each reason: the tests that pass as they are and not with ours, and how many of each there are."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for name, result in ours.items():
        if result["outcome"] != "passed" and theirs[name]["outcome"] == "passed":
            test = name.partition("[")[0].rpartition("::")[2]
            found.setdefault((_file(name), reason_of(result["reason"])), Counter())[test] += 1
    lines = ["| File | Why it does not pass | Tests |", "|---|---|---|"]
    for (file, reason), tests in sorted(found.items()):
        names = ", ".join(f"`{test}`" + (f" ({count})" if count > 1 else "") for test, count in tests.items())
        lines.append(f"| {file} | {reason} | {names} |")
    return lines


def reason_of(message: str) -> str:
    """The reason of REASONS that a failure's message fits; itself if there is none."""
    for pattern, reason in REASONS:
        match = re.search(pattern, message, re.DOTALL)
        if match:
            return match.expand(reason)
    return message.splitlines()[0] if message else "?"


def _file(name: str) -> str:
    """The file of a test, without the folders that most have in common."""
    return re.sub(
        r".*tests/(v1/kv_offload/|v1/kv_connector/unit/offloading_(?=connector/))?", "", name.partition("::")[0]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder tests of vLLM's source distribution")
    parser.add_argument("files", nargs="*", default=FILES, help="files or folders in it (default: those of offloading)")
    given = parser.parse_args()
    folder, files = given.folder.resolve(), list(given.files)
    theirs, ours = run(folder, files, ours=False), run(folder, files, ours=True)
    print("Passed, failed, skipped:\n")
    print("\n".join(counts_table(theirs, ours)))
    print("\nPass as they are, and not with ours:\n")
    print("\n".join(reasons_table(theirs, ours)))
    relaxed = run(folder, files, ours=True, any_slots=True)
    more = [n.rpartition("::")[2] for n, r in relaxed.items() if r["outcome"] == "passed" != ours[n]["outcome"]]
    print("\nPass with ours if only the number of slots is compared:", ", ".join(f"`{name}`" for name in more))


if __name__ == "__main__":
    main()
