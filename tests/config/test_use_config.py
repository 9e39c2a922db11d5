"""Outputs of the commands that convert an adapter: a folder, or the main file in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxtune.config import EvalConfig, ExportConfig, FuseConfig, ImportConfig
from mlxtune.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "options", "file"),
    [
        (ImportConfig, {}, "adapters.safetensors"),
        (FuseConfig, {}, "model.safetensors"),
        (FuseConfig, {"gguf": True}, "model.gguf"),
        (ExportConfig, {"format": "mlx-lm"}, "adapters.safetensors"),
        (ExportConfig, {"format": "peft"}, "adapter_model.safetensors"),
        (ExportConfig, {"format": "gguf"}, "adapter.gguf"),
        (ExportConfig, {"format": "gguf", "merge": True}, "model.gguf"),
        (ExportConfig, {"format": "flat"}, "adapter.safetensors"),
    ],
)
def test_output_is_a_folder_or_the_main_file_in_it(
    config: type[ImportConfig], options: dict[str, Any], file: str
) -> None:
    for given in ("out", f"out/{file}"):
        assert config(adapter="a", output=given, **options).output_path == Path("out")

    with pytest.raises(ConfigError, match=rf"--output out/b.gguf: the file written is .*{file}"):
        config(adapter="a", output="out/b.gguf", **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"format": "Ollama"}, "--format must be one of .*, not 'Ollama': use gguf"),
        ({"format": "peft", "merge": True}, "--merge is for --format gguf"),
        ({"format": "gguf", "quantize": "Q4_K_M"}, "--quantize is for a merged model: add --merge"),
        *(
            ({"format": "gguf", "merge": True, "quantize": name}, "--quantize must be a type of")
            for name in ("../x", "-q", "Q4_K_M;rm", "Q4 K", "4")
        ),
    ],
)
def test_merging_and_quantizing_name_what_they_need(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ExportConfig(adapter="a", output="out", **options)


@pytest.mark.parametrize(
    "pattern", ["", "x" * 1001, "(" * 400 + ")" * 400, "(?au)a", "(?:b){1,10000}"]
)
def test_pattern_that_cannot_be_searched_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="--match "):
        EvalConfig(adapter="a", data=("a.jsonl",), generate=True, match=f"regex={pattern}")
