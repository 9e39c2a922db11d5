"""The short form of tests/long/models_table.py: tiny models, and a page of made-up figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.models.loading import open_base
from mlxtune.benchmark.peers import write_start
from mlxtune.benchmark.worker import OURS, Job, run_job
from mlxtune.config import TrainConfig
from tests.backend.step.executions import fixed_step
from tests.long import models_table
from tests.long.architectures import ARCHITECTURES
from tests.long.model_sizes import LISTED, config_of, write_sized
from tests.long.models_page import broken, page
from tests.models import sums, write_chat, write_model
from tests.paths import DOCS, SHARED
from tests.slow import long_except

TEN = (
    *("qwen3", "qwen3_moe", "qwen3_5", "gemma3_text", "gemma4_text"),
    *("gpt_oss", "lfm2", "granitemoehybrid", "mamba2", "deepseek_v3"),
)


@pytest.mark.parametrize("name", long_except(TEN, "qwen3_moe"))
def test_architecture_trains_with_the_loss_of_mlx_lms_trainer(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", name, **ARCHITECTURES[name])
    config = TrainConfig(str(folder), ("x",), dtype="float32", targets=("all",), max_grad_norm=0)
    write_start(open_base(folder, "float32"), config.lora(), tmp_path / "adapter")
    step = fixed_step()
    losses = []
    for side in (OURS, "mlx-lm"):
        # The second step's loss shows that the first step changed both adapters equally.
        job = Job(side, folder, config, tmp_path / "adapter", [step, step], 2 * len(step), "auto")
        *steps, _ = run_job(job)
        losses.append([each["step"]["loss"] for each in steps])
    ours, theirs = losses
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[1] < ours[0]


def figures(speed: float = 4.0, memory: float = 0.5, **more: Any) -> dict[str, Any]:
    return {
        "execution": "cpu",
        "real_tokens_per_s": [speed * 100, 100.0],
        "peak_memory": [memory * 1e9, 1e9],
        "step_efficiency": 0.55,
        "losses_agree": True,
        "theirs_failed": None,
        "model_layers": None,
        **more,
    }


def record(name: str, **cases: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "trains": True,
        "gets": {"split": True, "head": False, "line": True, "layerwise": True, "compiled": False},
        "targets": ["self_attn.q_proj", "self_attn.v_proj"],
        "layers": [2, 8],
        "exports": ["mlx-lm", "PEFT"],
        "exports_all": ["mlx-lm"],
        "cases": {"auto": {"wikisql": figures(), **cases}},
    }


def test_row_says_what_was_measured() -> None:
    (row,) = (
        line
        for line in page(
            {"qwen3_5": record("qwen3_5", long=figures(20, 0.1, model_layers=4))}
        ).splitlines()
        if line.startswith("| Qwen3.5 ")
    )
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "Qwen3.5",
        "yes",
        "4.0×, 0.50",
        "",
        "20.0×, 0.10 (4 layers)",
        "55%",
        "head split, packed line, kernels",
        "`q_proj`, `v_proj`, in the layers that have them",
        "mlx-lm, PEFT*",
        "yes",
    ]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (figures(speed=0.97), "0.97 times mlx-lm's speed"),
        (figures(memory=1.02), "1.02 times mlx-lm's memory"),
        (figures(losses_agree=False), "the losses differ"),
        ({"failed": "killed"}, "fails: killed"),
        (figures(speed=0.1, theirs_failed="killed"), None),
        (figures(speed=1, memory=1), None),
    ],
)
def test_law_names_what_is_slower_or_larger_than_in_mlx_lms_trainer(
    found: dict[str, Any], why: str | None
) -> None:
    records = {"qwen3": record("qwen3"), "llama": record("llama", alpaca=found)}
    expected = [] if why is None else [f"Llama 3: Alpaca: {why}"]
    assert [each[: len(expected[0])] for each in broken(records)] == expected
    assert ("Not yet met" in page(records)) is bool(expected)


def test_records_are_kept_by_architecture_in_the_order_of_the_list(tmp_path: Path) -> None:
    path = tmp_path / "models.jsonl"
    assert models_table.read_records(path) == {}
    records = {name: record(name) for name in ("starcoder2", "qwen2")}
    for each in records.values():
        models_table.keep(path, each)
    assert models_table.read_records(path) == records
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == [
        "qwen2",
        "starcoder2",
    ]


def test_shapes_stay_comparable_with_earlier_measurements() -> None:
    shape = {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 151_936}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    expected = {
        "qwen3": heads,
        "lfm2": heads,
        "gemma3_text": {**heads, "sliding_window": 512},
        "qwen3_moe": {
            **heads,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 384,
        },
        "qwen3_5": {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "full_attention_interval": 4,
            "linear_num_value_heads": 8,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
        },
        "gpt_oss": {
            **heads,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 512,
            "sliding_window": 128,
        },
    }
    for name, more in expected.items():
        assert config_of(name).items() >= {**shape, **more}.items(), name
    assert all(len(config_of(name).get("layer_types", [0] * 8)) == 8 for name in LISTED)


def test_page_in_the_docs_shows_what_is_recorded() -> None:
    records = models_table.read_records(models_table.RECORDS)
    assert (DOCS / "models.md").read_text(encoding="utf-8") == page(records)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs {SHARED}")
def test_smaller_vocabulary_has_its_tokens_only(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_sized(tmp_path / "m", "starcoder2", SHARED, layers=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>user\nHow many? 你好<|im_end|>"
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert max(tokens) < LISTED["starcoder2"].vocabulary == len(tokenizer)


def test_models_with_experts_or_recurrences_get_no_kernels_and_dense_ones_do(
    tmp_path: Path,
) -> None:
    kernels = {
        name: models_table.describe(name, tmp_path / name)["gets"]["layerwise"]
        for name in ("qwen3", "hunyuan", "mamba2")
    }
    assert kernels == {"qwen3": True, "hunyuan": False, "mamba2": False}


@pytest.mark.slow
def test_case_is_measured_beside_mlx_lm(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3")
    data = write_chat(tmp_path / "sums.jsonl", sums(8))
    case = models_table.Case("sums", 4, 1, 64)
    found = models_table.measure(folder, data, case, execution="auto", repeats=1)
    assert found["losses_agree"] is True
    assert min(found["real_tokens_per_s"] + found["peak_memory"]) > 0
    missing = models_table.measure(folder, tmp_path / "none.jsonl", case)
    assert "none.jsonl" in missing["failed"]
