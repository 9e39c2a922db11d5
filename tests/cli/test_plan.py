"""`mlxtune plan`, and the plan of `train`, from the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command import Cli, files_in, unless_given
from tests.slow import slow


@pytest.fixture(scope="session")
def model(deep_model: Path) -> Path:
    return deep_model


@pytest.fixture(autouse=True)
def restore_limits(model: Path) -> Iterator[None]:
    import mlx.core as mx

    limit, cache = mx.get_memory_limit(), mx.set_cache_limit(0)
    mx.set_cache_limit(cache)
    yield
    mx.set_memory_limit(limit)
    mx.set_cache_limit(cache)


def adapter(path: Path) -> dict[str, Any]:
    import mlx.core as mx

    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    return {name: np.array(value) for name, value in loaded.items()}


@pytest.fixture
def plan(cli: Cli, model: Path, chat: Path, tmp_path: Path) -> Cli:
    def run(*arguments: object) -> Any:
        good = {"model_path": model, "data": chat, "cache_dir": tmp_path / "cache"}
        return cli("plan", *unless_given(arguments, **good), *arguments)

    return run


def test_plan_prints_memory_steps_and_time_and_writes_no_files(plan: Cli, tmp_path: Path) -> None:
    outcome = plan("--no-cache")
    assert outcome.code == 0, outcome.err
    stages = [line.split()[0] for line in outcome.out.splitlines() if not line.startswith(" ")]
    assert stages == ["Model", "LoRA", "Device", "Memory", "Plan", "Data", "Steps", "Time"]
    assert "16 training rows" in outcome.out
    assert "4 steps, 4 per epoch" in outcome.out
    assert files_in(tmp_path) == ["chat.jsonl"]


def test_workers_share_each_step(plan: Cli) -> None:
    alone = json.loads(plan("--json").out)
    found = json.loads(plan("--json", "--workers", 4, "--link", 40).out)
    assert alone["workers"] is None
    workers = found["workers"]
    assert workers["exchanged"] == 4 * found["lora"]["trainable_parameters"]
    assert workers["gbps"] == 40
    # A step has four rows of similar lengths, so the largest share is a little over 1/4.
    assert 1 / 4 < workers["dearest"] < 1 / 3
    assert found["memory"]["peak"] < alone["memory"]["peak"]
    assert found["data"]["steps"] == alone["data"]["steps"]
    assert (
        json.loads(plan("--json", "--workers", 64).out)["workers"]["dearest"] == workers["dearest"]
    )


def test_longest_example_grows_with_the_limit(plan: Cli) -> None:
    found = [
        json.loads(plan("--longest", "--json", "--memory-limit", gb).out)["longest"]
        for gb in (0.006, 0.04)
    ]
    # `<=`, because a GPU rounds lengths up to the same number.
    for longest in found:
        assert 0 < longest["kept"] <= longest["recomputed"] <= longest["context"]
    assert found[0]["kept"] < found[0]["recomputed"] < found[1]["kept"]
    off = plan("--longest", "--json", "--memory-limit", 0.04, "--grad-checkpoint", "off").out
    assert json.loads(off)["longest"]["recomputed"] == found[1]["kept"]
    bare = json.loads(plan("--json").out)
    assert bare["longest"] is None
    # The free memory is null if the system does not report it.
    assert bare["free_memory"] is None or bare["free_memory"] > 0
    assert "with --grad-checkpoint on" in plan("--longest", "--memory-limit", 0.006).out


def test_workers_need_data(cli: Cli, model: Path) -> None:
    outcome = cli("plan", "--model-path", model, "--workers", 2)
    assert outcome.code != 0
    assert "--workers needs --data" in outcome.err


def test_json_has_the_same(plan: Cli) -> None:
    found = json.loads(plan("--json", "--epochs", 3, "--max-steps", 7, "--memory-limit", 3).out)
    assert found["data"]["steps"] == 7
    assert found["data"]["steps_per_epoch"] == 4
    parts = ("weights", "optimizer", "activations", "head")
    assert found["memory"]["peak"] == sum(found["memory"][part] for part in parts)
    assert found["memory"]["limit"] == 3_000_000_000


def test_tokens_of_sampled_answers_replace_the_answers_in_the_data(plan: Cli) -> None:
    options = ("--val-split", 0, "--json")
    rewards = ("--objective", "grpo", "--reward", "length", "--group-size", 3)
    read = json.loads(plan(*options).out)["data"]
    sampled = json.loads(plan(*options, *rewards, "--max-new-tokens", 7).out)["data"]
    answers = 3 * 7 * sampled["rows"]
    assert sampled["supervised_tokens"] == answers
    assert sampled["tokens"] - answers == read["tokens"] - read["supervised_tokens"]


def test_without_data_one_example_is_planned_for(cli: Cli, model: Path) -> None:
    outcome = cli("plan", "--model-path", model, "--max-seq-len", 99)
    assert outcome.code == 0
    assert "for one example of 99 tokens" in outcome.out


def test_time_is_known_after_a_run_of_the_same_model(
    plan: Cli, train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxtune.core.run.run_plan._MIN_SECONDS", 0.0)
    cache = ["--cache-dir", tmp_path / "cache"]
    assert "unknown" in plan().out
    assert train(*cache, "--max-steps", 2).code == 0
    assert "unknown" in plan().out
    assert train(*cache).code == 0
    assert re.search(r"about .* tokens/s measured on \d{4}-\d\d-\d\d", plan().out)
    assert "unknown" in plan("--rank", 2).out
    assert "unknown" in plan("--dtype", "bfloat16").out


def test_memory_is_an_estimate_until_a_run_has_measured_it(
    plan: Cli, train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On CUDA, nothing is measured.
    monkeypatch.setattr("mlxtune.backend.memory.shapes.graph_limits", lambda: None)
    cache = ["--cache-dir", tmp_path / "cache"]
    assert re.search(r"estimated peak memory \S+ MB \(\S+ MB to \S+ MB\)", plan().out)
    assert train(*cache, "--max-steps", 1).code == 0
    assert re.search(r"predicted peak memory \S+ MB of", plan().out)
    assert json.loads(plan("--json").out)["measured"]
    assert "estimated" in plan("--rank", 2).out


@pytest.mark.parametrize("command", ["plan", "train"])
def test_run_that_cannot_fit_is_refused_with_what_would_fit(
    cli: Cli, model: Path, chat: Path, tmp_path: Path, command: str
) -> None:
    output = [] if command == "plan" else ["--output", tmp_path / "out" / "a.safetensors"]
    limit = ["--memory-limit", 0.0005, "--quiet"]
    outcome = cli(command, "--model-path", model, "--data", chat, *output, *limit)
    assert outcome.code == 1
    assert "the limit is 500 kB: raise --memory-limit" in outcome.error
    assert not (tmp_path / "out").exists()


def test_run_reports_its_plan_and_actual_use(train: Cli) -> None:
    # 3 GB is less than any machine has.
    outcome = train("--memory-limit", 3, quiet=False)
    assert re.search(r"micro-batches of up to \d+ tokens, \d\.\d a step", outcome.err)
    assert re.search(r"(predicted|estimated) peak memory \S+ MB .*of 3 GB", outcome.err)
    assert re.search(r"peak memory \S+ MB \(predicted \S+ MB\)", outcome.err)


def test_recomputation_follows_the_option_and_learns_the_same(train: Cli, output: Path) -> None:
    adapters = {}
    for choice in ("on", "off"):
        outcome = train("--grad-checkpoint", choice, quiet=False)
        assert outcome.code == 0, outcome.err
        assert ("recomputed" in outcome.err) == (choice == "on")
        adapters[choice] = adapter(output)
    for name, value in adapters["on"].items():
        assert np.allclose(value, adapters["off"][name], rtol=1e-5, atol=1e-5), name


@pytest.mark.slow
def test_oversized_plan_survives_its_limit_and_learns_the_same(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.session.memory_planning import choose_plan

    assert train().code == 0
    expected = adapter(output)

    def huge(config: Any, base: Any, work: Any, _: str) -> Any:
        plan = choose_plan(replace(config, memory_limit=1000), base, work)
        limit = int(config.memory_limit * 10**9)
        execution = replace(plan.execution, micro_batch_tokens=10**6)
        return replace(plan, execution=execution, limit=limit)

    monkeypatch.setattr("mlxtune.session.memory_planning.choose_plan", huge)
    # The plan is found to fit.
    confirm = "mlxtune.session.memory_planning.confirm"
    monkeypatch.setattr(confirm, lambda config, base, pipeline, work, plan, *_: plan)
    outcome = train("--memory-limit", 0.0005)

    assert outcome.code == 0, outcome.err
    (warning,) = outcome.err.splitlines()
    assert re.match(r"warning: \S+ MB were in use, more than the limit of 500 kB", warning)
    found = adapter(output)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert np.allclose(value, expected[name], rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("info", ["max_recommended_working_set_size", slow("total_memory")])
def test_gain_of_a_larger_limit_is_reported_and_recorded(
    plan: Cli, train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, info: str
) -> None:
    from mlxtune.backend.device import allocator

    monkeypatch.setattr(allocator.mx, "device_info", lambda: {info: 8_000_000_000})
    # Each limit has room for one example at a time; the second allows for a GPU's rounding.
    lines: list[str] = []
    cache = ("--cache-dir", tmp_path / "cache")
    for small in (("--memory-limit", 0.0012), ("--memory-limit", 0.002)):
        train("--dry-run", *cache, *small)  # the dry run measures memory for the plan
        lines = [each.strip() for each in plan(*small).out.splitlines() if "device has" in each]
        if lines:
            break
    (line,) = lines
    gain = r"--memory-limit (\d) would run micro-batches of up to (\d+) tokens.*"
    found = re.fullmatch(rf"the device has (\d) GB: {gain}", line)
    assert found, line
    assert found[1] == {"max_recommended_working_set_size": "8", "total_memory": "7"}[info]
    larger = json.loads(plan("--json", "--memory-limit", found[2]).out)
    assert larger["micro_batch_tokens"] == int(found[3])
    assert larger["larger_limit"] is None
    assert json.loads(plan("--json", *small).out)["larger_limit"] == line
    assert line in train("--dry-run", *cache, *small, quiet=False).err
