"""The core is imported without mlx and other slow or optional packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlxtune

BLOCKED = """
import importlib, pkgutil, sys

BLOCKED = {"mlx", "mlx_lm", "transformers", "torch"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
import mlxtune, mlxtune.config, mlxtune.errors, mlxtune.core
names = [module.name for module in pkgutil.walk_packages(mlxtune.core.__path__, "mlxtune.core.")]
for name in names:
    importlib.import_module(name)
mlxtune.TrainConfig, mlxtune.InstructTrainer, mlxtune.Example
loaded = {name.partition(".")[0] for name in sys.modules}
print(*names)
print(*sorted(loaded & (BLOCKED | {"tokenizers", "sentencepiece", "safetensors", "click"})))
print("mlxtune.backend" in sys.modules)
"""


def test_core_is_imported_where_no_mlx_is_installed(tmp_path: Path) -> None:
    package = Path(mlxtune.__file__).parent
    output = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(package.parent)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    names, *rest = output.split("\n")
    assert len(names.split()) == len(list((package / "core").rglob("*.py"))) - 1
    assert rest == ["", "False", ""]
