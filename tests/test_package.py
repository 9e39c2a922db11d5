"""The package's public names, and the modules that importing it loads."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import pydoc
import re
import subprocess
import sys

import pytest

import mlxtune
from mlxtune.core.machine.installation import DISTRIBUTION


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
