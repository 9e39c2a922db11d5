"""More architectures, some of which restrict the execution."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.errors import ModelError
from tests.long.architectures import ARCHITECTURES
from tests.long.check_architectures import check
from tests.slow import long, slow

# For each architecture: (its head can be separated, its examples can be packed).
SOME = {
    "mistral3": (True, True),  # a text model within another model
    "gpt_oss": (True, True),  # attention sinks, experts, a sliding window
    "cohere": (True, True),  # scaled logits
    "deepseek_v3": (True, True),  # a mask with a gradient
    "hunyuan": (True, True),  # layers that pass on keys and values
    "lfm2": (True, True),  # layers without attention
    "nemotron_h": (True, True),  # a backbone with a different name, state spaces
    "kimi_linear": (True, True),  # an unpacked cache
    "olmo_hybrid": (True, True),  # a layer's class selects its mask
    # The head is within the backbone, and the model itself changes projections' weights.
    "gemma3n": (True, False),
}
QUICK, FURTHER = ["gpt_oss", "nemotron_h"], ("mistral3", "deepseek_v3", "lfm2", "gemma3n")


@pytest.mark.parametrize(
    "name",
    QUICK
    + [slow(name) for name in SOME if name in FURTHER]
    + [long(name) for name in SOME if name not in (*QUICK, *FURTHER)],
)
def test_everything_on_equals_the_plain_path(name: str, tmp_path: Path) -> None:
    result = check(name, tmp_path / "m")
    assert result.loss <= 1e-5
    assert result.gradient <= 1e-4
    assert (result.gets["split"], result.gets["line"]) == SOME[name]


def test_layers_in_which_nothing_is_trained(tmp_path: Path) -> None:
    """In this model, only the attention layers have a q_proj."""
    result = check("lfm2 (attention first)", tmp_path / "m", targets=("q_proj",))
    assert result.same


@pytest.mark.long
@pytest.mark.parametrize("targets", [("all",), ("q_proj", "v_proj")], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    try:
        result = check(name, tmp_path / "m", targets=targets)
    except ModelError as error:
        pytest.skip(f"it has no such projections: {error}")
    print(f"\n{name} {targets[0]}: {result}", end="")
    assert result.same
