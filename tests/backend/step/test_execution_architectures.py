"""Further architectures, some of which restrict the execution; see also check_architectures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long.check_architectures import check
from tests.slow import slow_except

# Name, then whether it allows a separate head, and lines.
SOME = {
    "mistral3": (True, True),  # a text model within another
    "gpt_oss": (True, True),  # attention sinks, experts, a sliding window
    "cohere": (True, True),  # scaled logits
    "deepseek_v3": (True, True),  # a mask that carries a gradient
    "hunyuan": (True, True),  # layers that hand on keys and values
    "lfm2": (True, True),  # layers without attention
    "nemotron_h": (True, True),  # a trunk by another name, state spaces
    "kimi_linear": (True, True),  # a cache that is unpacked
    "olmo_hybrid": (True, True),  # a layer's class decides which mask it gets
    # A head in the trunk, and projections whose weights the model itself changes.
    "gemma3n": (True, False),
}


@pytest.mark.parametrize("name", slow_except(SOME, "gpt_oss", "deepseek_v3", "lfm2", "nemotron_h"))
def test_everything_on_equals_the_plain_path(name: str, tmp_path: Path) -> None:
    result = check(name, tmp_path / "m")
    assert result.loss <= 1e-5
    assert result.gradient <= 1e-4
    assert (result.gets["split"], result.gets["line"]) == SOME[name]


def test_layers_in_which_nothing_is_trained(tmp_path: Path) -> None:
    """Only the attention layers of this model have q_proj."""
    result = check("lfm2 (attention first)", tmp_path / "m", targets=("q_proj",))
    assert result.same
