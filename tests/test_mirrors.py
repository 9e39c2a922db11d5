"""Every large module has a test file of its name, in the folder that mirrors its own."""

from __future__ import annotations

from tests.paths import ROOT
from tests.sources import PACKAGE

LARGE = 120
# Modules whose tests are in files named for the behaviour.
EXCEPTIONS = {
    "backend/adapters/compare_logits.py",
    "backend/adapters/files.py",
    "backend/adapters/formats/adapter.py",
    "backend/adapters/formats/gguf.py",
    "backend/adapters/formats/merged_gguf.py",
    "backend/adapters/formats/peft.py",
    "backend/adapters/fuse.py",
    "backend/adapters/initialise.py",
    "backend/cpu/kernels.py",
    "backend/cpu/layers.py",
    "backend/forward/layer_calls.py",
    "backend/lora/layers.py",
    "backend/lora/optimizer.py",
    "backend/lora/vectors.py",
    "backend/models/model_folder.py",
    "backend/step/builder.py",
    "backend/step/runner.py",
    "backend/workers/launch.py",
    "backend/workers/split.py",
    "backend/workers/watch.py",
    "backend/workers/worker_run.py",
    "benchmark/worker.py",
    "commands/chat.py",
    "commands/plan.py",
    "commands/retention.py",
    "config/data.py",
    "config/fields.py",
    "config/mlx_lm_file.py",
    "core/data/problems.py",
    "core/data/prompt.py",
    "core/data/sources/datafiles.py",
    "core/data/sources/tables.py",
    "core/evaluation/interval.py",
    "core/evaluation/losses.py",
    "core/evaluation/text.py",
    "core/objectives/objective.py",
    "core/objectives/preference_rows.py",
    "core/run/verification.py",
    "core/steps/graph_memory.py",
    "core/steps/memory_terms.py",
    "core/training/recorder.py",
    "diagnosis/machine.py",
    "hub/responses.py",
    "session/model.py",
    "session/proof.py",
    "session/resuming.py",
    "tracking/trackers.py",
    "views/pages/page.py",
    "watch/page.py",
}


def test_large_module_has_a_test_file_of_its_name() -> None:
    missing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("[!_]*.py")
        if len(path.read_text(encoding="utf-8").splitlines()) > LARGE
        and not (ROOT / "tests" / path.parent.relative_to(PACKAGE) / f"test_{path.name}").exists()
    }
    assert missing - EXCEPTIONS == set()
    assert EXCEPTIONS - missing == set(), "these are no exceptions any more"
