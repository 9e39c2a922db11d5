"""The package's public names, and the modules that importing it loads."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

import mlxtune
from mlxtune.core.machine.installation import DISTRIBUTION
from tests.paths import ROOT
from tests.sources import PACKAGE


def test_all_public_names_can_be_imported_and_no_others_are_offered() -> None:
    assert sorted(mlxtune.__all__) == dir(mlxtune)
    for name in mlxtune.__all__:
        assert getattr(mlxtune, name).__module__.startswith("mlxtune.")
    with pytest.raises(AttributeError, match="nonsense"):
        _ = mlxtune.nonsense


def test_version_is_the_package_s() -> None:
    assert mlxtune.__version__ == importlib.metadata.version(DISTRIBUTION)


def test_help_has_a_sentence_on_each_field_of_each_config() -> None:
    configs = [getattr(mlxtune, name) for name in mlxtune.__all__ if name.endswith("Config")]
    assert len(configs) >= 12
    for config in configs:
        shown = pydoc.plain(pydoc.render_doc(config))
        for field in dataclasses.fields(config):
            assert f"{field.name}: {field.metadata['option'].help}" in shown


def test_help_shows_public_names_only() -> None:
    shown = pydoc.plain(pydoc.render_doc(mlxtune)).split("FUNCTIONS")[1]
    functions = re.findall(r"^    (\w+)\(", shown, re.MULTILINE)
    assert set(functions) == {
        name for name in mlxtune.__all__ if inspect.isfunction(getattr(mlxtune, name))
    }
    assert {"bench", "demo", "plan", "train"} <= set(functions)


@pytest.mark.slow
def test_recipe_is_the_function_however_it_is_imported() -> None:
    code = (
        "import mlxtune.commands.train; from types import FunctionType\n"
        "from mlxtune import train; assert type(train) is FunctionType\n"
        "from mlxtune import *; assert type(inspect) is FunctionType"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_recipes_stay_the_functions_within_this_process() -> None:
    import mlxtune.commands.inspect
    import mlxtune.commands.train

    assert inspect.isfunction(mlxtune.train)
    assert inspect.isfunction(mlxtune.inspect)


def test_importing_the_package_loads_neither_mlx_nor_numpy() -> None:
    code = (
        "import sys, mlxtune; mlxtune.TrainConfig, mlxtune.DataError\n"
        "assert not {'mlx', 'mlx_lm', 'transformers', 'numpy', 'rich'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


PUBLIC = {
    "mlxtune": ("InstructPipeline", "InstructTrainer", "Example", "generate", "train", "evaluate"),
    "mlxtune.core.run.metrics": ("StepHistory", "TrainingMetrics"),
    "mlxtune.core.run.profile": ("StepProfiler",),
    "mlxtune.core.machine.reservation": ("reserve", "reserve_when_free", "reservations"),
    "mlxtune.backend.models.nf4": ("NF4Linear", "quantize", "dequantize"),
}
METHODS = {
    "InstructPipeline": ("train_step", "train_batch", "evaluate", "loss_and_gradients"),
    "TrainingMetrics": ("average_loss", "convergence_rate", "is_complete"),
    "StepHistory": ("append", "pop", "__len__", "__getitem__"),
}


@pytest.mark.parametrize("module", PUBLIC)
def test_names_that_programs_import_stay_where_they_are_documented(module: str) -> None:
    found = importlib.import_module(module)

    for name in PUBLIC[module]:
        assert callable(getattr(found, name))
        assert name in mlxtune.__all__ or module in str(mlxtune.__doc__).replace("\n", " ")
        for method in METHODS.get(name, ()):
            assert callable(getattr(getattr(found, name), method))


def documented_python() -> Iterator[str]:
    """Yield the Python blocks of the pages, and the code spans with a call, of pages and code."""
    # The reference is made from the code.
    pages = {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "reference.md"}
    for path in (*pages, *PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield from re.findall(r"(?ms)^```python\n(.*?)^```$", text)
        yield from re.findall(r"`([^`\n]*\([^`\n]*)`", text)


def unknown_names(code: str) -> Iterator[str]:
    """Yield the attributes of the package and of its public classes that do not exist."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            name = ast.unparse(owner).removeprefix("mlxtune.")
            found = mlxtune if name == "mlxtune" else getattr(mlxtune, name, None)
            names = {node.attr}
            if inspect.isclass(found) or inspect.ismodule(found):
                names = {*dir(found), *inspect.get_annotations(found)}
            if node.attr not in names:
                yield f"{name} has no {node.attr}: {code}"


def test_documented_python_uses_names_that_exist() -> None:
    wrong = []
    for code in (*documented_python(), "DemoConfig().nonsense", "mlxtune.nonsense()"):
        with suppress(SyntaxError):
            wrong += unknown_names(code)
    assert wrong == [
        "DemoConfig has no nonsense: DemoConfig().nonsense",
        "mlxtune has no nonsense: mlxtune.nonsense()",
    ]
