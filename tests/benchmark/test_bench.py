"""`mlxtune bench` against mlx-lm, from the command line."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.backend.device.default_device import on_cpu
from mlxtune.benchmark import bench as bench_recipe
from mlxtune.benchmark import bench_helper, peers
from mlxtune.benchmark.bench import bench as run_bench
from mlxtune.benchmark.bench import benchmark_steps
from mlxtune.benchmark.result import BenchmarkRun, TimedStep
from mlxtune.cli import main
from mlxtune.config import BenchConfig, TrainConfig
from mlxtune.core.machine import conditions
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import MlxTuneError
from mlxtune.session.dataset import load_dataset
from mlxtune.session.reader import Reader
from tests.command import Cli, Outcome, finish, read_until, start, unless_given
from tests.core.training.fake_pipeline import FakePipeline
from tests.models import sums, write_chat
from tests.paths import DOCS
from tests.slow import slow
from tests.waiting import SECONDS, wait_until

PAGE = DOCS / "bench.md"


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run meanwhile, which would be warned of."""
    monkeypatch.setattr(conditions, "_BUSY_PERCENT", 101.0)
    monkeypatch.setattr(conditions, "_BUSY_SECONDS", None)


@pytest.fixture
def bench(cli: Cli, model: Path, chat: Path) -> Cli:
    """A function that runs `mlxtune bench` briefly on a valid model and file, or on given ones."""

    def run(*arguments: object) -> Outcome:
        good = unless_given(arguments, model_path=model, data=chat, steps=2, repeats=1)
        return cli("bench", *good, *arguments)

    return run


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the jobs of a benchmark in this process, which has already loaded mlx."""

    def done(job: bench_helper.Job, *_: object) -> BenchmarkRun:
        *steps, run = bench_helper.run_job(job)
        return BenchmarkRun([TimedStep(**step["step"]) for step in steps], **run["run"])

    monkeypatch.setattr(bench_recipe, "_run_process", done)


@pytest.fixture(scope="module")
def compared(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, dict[str, Any]]:
    """A benchmark against mlx-lm: its output, and its JSON."""
    folder = tmp_path_factory.mktemp("bench")
    chat = write_chat(folder / "chat.jsonl", sums(20))
    work = ["--model-path", model, "--data", chat, "--steps", 3, "--max-seq-len", 64, "--lr", 0.01]
    further = ["--against", "mlx-lm", "--repeats", 1, "--json", folder / "new" / "bench.json"]
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as exit_:
        main(["bench", *map(str, [*work, *further])])
    outcome = Outcome(int(exit_.value.code or 0), out.getvalue(), err.getvalue())
    assert outcome.code == 0, outcome.err
    return outcome, json.loads((folder / "new" / "bench.json").read_text())


# Measurements


def test_both_contestants_take_the_same_steps_with_the_same_losses(
    compared: tuple[Outcome, dict[str, Any]],
) -> None:
    _, found = compared
    assert (found["rows"], found["steps"], found["batch_size"]) == (12, 3, 4)
    assert found["losses_agree"] is True
    for ours, theirs in zip(found["ours"]["runs"], found["theirs"]["runs"], strict=True):
        for one, other in zip(ours["steps"], theirs["steps"], strict=True):
            for name in ("tokens", "supervised_tokens"):
                assert one[name] == other[name]
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
            assert 0 <= one["padding"] < other["padding"]
            assert one["tokens_run"] < other["tokens_run"]
    executions = [found[contestant]["execution"] for contestant in ("ours", "theirs")]
    assert executions == ["gpu", "eager" if on_cpu() else "compiled"]
    losses = [step["loss"] for step in found["ours"]["runs"][0]["steps"]]
    assert losses[0] > losses[-1]  # the rate is high enough for a difference to show


@pytest.mark.usefixtures("in_process")
def test_gpu_is_timed_in_a_second_pass_over_the_same_steps(
    compared: tuple[Outcome, dict[str, Any]],
    bench: Cli,
    chat: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[str] = []

    def counted(contestant: type, name: str) -> None:
        real = getattr(contestant, name)

        def step(self: Any, *arguments: Any) -> Any:
            passes.append(contestant.__name__)
            return real(self, *arguments)

        monkeypatch.setattr(contestant, name, step)

    counted(bench_helper.OurTrainer, "_start")
    counted(bench_helper.MlxLm, "step")
    real_warm_up = bench_helper.MlxLm.warm_up

    def warm_up(self: Any, *arguments: Any) -> Any:
        # Set earlier, this would make `start` compile a step, which takes a minute on the CPU.
        monkeypatch.setattr(peers, "on_cpu", lambda: False)
        return real_warm_up(self, *arguments)

    monkeypatch.setattr(bench_helper.MlxLm, "warm_up", warm_up)
    finish = bench_helper.default_device.finish
    limits: list[int] = []
    set_limit = mx.set_cache_limit

    def set_cache_limit(limit: int) -> int:
        if "OurTrainer" in passes:
            limits.append(limit)
        return set_limit(limit)

    monkeypatch.setattr(mx, "set_cache_limit", set_cache_limit)
    gpu = SimpleNamespace(on_cpu=lambda: False, finish=finish)
    monkeypatch.setattr(bench_helper, "default_device", gpu)
    path = tmp_path / "gpu.json"
    work = ["--steps", 3, "--max-seq-len", 64, "--lr", 0.01, "--against", "mlx-lm"]
    write_chat(chat, sums(20))
    assert bench(*work, "--json", path, "--quiet").code == 0
    found, wanted = json.loads(path.read_text()), compared[1]
    # mlxtune's steps are then timed again, with a large cache.
    assert passes == ["OurTrainer"] * 12 + ["MlxLm"] * 6
    large, small = limits[:2]
    assert large == mx.get_memory_limit()
    assert small == (0 if on_cpu() else large // 8)
    assert found["cache_ratio"] == found["ours"]["runs"][0]["large_cache_s"] / sum(
        step["seconds"] for step in found["ours"]["runs"][0]["steps"]
    )
    assert found["theirs"]["runs"][0]["large_cache_s"] is None
    for contestant in ("ours", "theirs"):
        (run,), other = found[contestant]["runs"], wanted[contestant]["runs"][0]
        losses = [step["loss"] for step in run["steps"]]
        assert losses == pytest.approx([step["loss"] for step in other["steps"]], rel=1e-6)
        assert all(step["seconds"] > 0 and step["peak_memory"] > 0 for step in run["steps"])


@pytest.mark.usefixtures("in_process")
def test_all_executions_take_the_same_steps(bench: Cli, tmp_path: Path) -> None:
    found = {}
    for kind in ("gpu", "plain"):
        assert bench("--execution", kind, "--json", tmp_path / kind).code == 0
        report = json.loads((tmp_path / kind).read_text())
        assert report["options"]["execution"] == kind
        found[kind] = report["ours"]["runs"][0]["steps"]
    for one, other in zip(found["gpu"], found["plain"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        # A GPU's lines are rounded.
        assert one["padding"] <= (0 if on_cpu() else 0.03 * one["tokens_run"])
        assert other["padding"] > one["padding"]


def test_ratios_match_the_numbers_next_to_them(
    compared: tuple[Outcome, dict[str, Any]],
) -> None:
    _, found = compared
    ratios = []
    for ours, theirs in zip(found["ours"]["runs"], found["theirs"]["runs"], strict=True):
        seconds = [sum(step["seconds"] for step in run["steps"]) for run in (ours, theirs)]
        ratios.append(seconds[1] / seconds[0])
    assert found["ratio"]["real_tokens_per_s"] == pytest.approx(sum(ratios) / len(ratios))
    peaks = [
        max(step["peak_memory"] for step in found[contestant]["runs"][0]["steps"])
        for contestant in ("ours", "theirs")
    ]
    assert min(peaks) > 100_000  # the weights alone take more
    assert found["ratio"]["peak_memory"] == pytest.approx(peaks[0] / peaks[1], rel=0.2)
    assert all(math.isfinite(value) and value > 0 for value in found["ratio"].values())
    assert 0 <= found["padding_share"] < found["theirs"]["padding_share"]["median"] < 1


def test_peer_would_have_trained_on_padding(compared: tuple[Outcome, dict[str, Any]]) -> None:
    _, found = compared
    run = found["theirs"]["runs"][0]
    assert run["loss_function"] == "default"
    assert run["loss_with_pad_targets"] != pytest.approx(run["steps"][0]["loss"], rel=1e-3)


def test_table_and_stages_are_printed(compared: tuple[Outcome, dict[str, Any]]) -> None:
    outcome, found = compared
    assert re.search(r"^ +mlxtune +mlx-lm +ratio *$", outcome.out, re.MULTILINE)
    for name in ("real tokens/s", "padding", "peak memory", "start"):
        assert re.search(rf"^{name} +\S", outcome.out, re.MULTILINE)
    assert "\nlosses agree (" in outcome.out
    tokens = sum(step["tokens"] for step in found["ours"]["runs"][0]["steps"])
    assert f"3 steps of 4 rows: 12 rows, {tokens:,} tokens" in outcome.err
    assert re.findall(r"^Run +(\d/\d \S+):", outcome.err, re.MULTILINE) == [
        *("1/1 mlxtune", "1/1 mlx-lm"),
    ]
    assert "\x1b" not in outcome.out + outcome.err


def documented() -> dict[str, dict[str, set[str]]]:
    """Return the fields and their possible types in each table of docs/bench.md's schema."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## JSON\n")[2]
    tables: dict[str, dict[str, set[str]]] = {}
    name = "benchmark"
    for line in text.splitlines():
        if bold := re.match(r"\*\*`(\w+)`\*\*", line):
            name = bold[1]
        if line.startswith("| `"):
            names, types = (cell.strip() for cell in line.split("|")[1:3])
            for field in re.findall(r"`(\w+)`", names):
                tables.setdefault(name, {})[field] = set(types.split(" or "))
    return tables


def test_json_has_the_documented_fields(compared: tuple[Outcome, dict[str, Any]]) -> None:
    tables, (_, found) = documented(), compared

    def check(value: dict[str, Any], table: str) -> None:
        assert value.keys() == tables[table].keys(), table
        for name, types in tables[table].items():
            if "spread" in types:
                assert value[name].keys() == {"median", "min", "max"}
            else:
                assert kind_of(value[name]) in types, f"{table}.{name}"

    check(found, "benchmark")
    check(found["ratio"], "ratio")
    check(found["loss_difference"], "loss_difference")
    assert found["ratio_spread"].keys() == found["ratio"].keys()
    for contestant in (found["ours"], found["theirs"]):
        check(contestant, "contestant")
        for run in contestant["runs"]:
            check(run, "run")
            for step in run["steps"]:
                check(step, "step")
    assert found["options"] == json.loads(json.dumps(asdict(BenchConfig(**found["options"]))))


def kind_of(value: Any) -> str:
    kinds = {str: "text", bool: "truth value", int: "integer", float: "number", list: "list"}
    return "null" if value is None else kinds.get(type(value), "object")


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_rows_of_several_turns_are_trained_on_equally(bench: Cli, tmp_path: Path) -> None:
    rows = [
        [("user", "Hi"), ("assistant", "Ho" * (i + 1)), ("user", "And?"), ("assistant", "So.")]
        for i in range(6)
    ]
    file = write_chat(tmp_path / "turns.jsonl", rows)
    given = ["--data", file, "--against", "mlx-lm", "--steps", 6, "--repeats", 2]
    outcome = bench(*given, "--json", "-")
    found = json.loads(outcome.out)
    assert re.findall(r"^Run +(\d/\d \S+):", outcome.err, re.MULTILINE) == [
        *("1/2 mlxtune", "1/2 mlx-lm", "2/2 mlxtune", "2/2 mlx-lm"),
    ]
    assert found["losses_agree"] is True
    assert found["theirs"]["runs"][0]["loss_function"] == "masked"
    assert found["theirs"]["runs"][0]["loss_with_pad_targets"] is None
    assert "losses agree" in outcome.err


@pytest.mark.parametrize("order", ["shuffle", "length"])
@pytest.mark.parametrize("val_split", [0.0, 0.25])
def test_steps_are_the_first_that_train_takes(
    model: Path, chat: Path, tmp_path: Path, order: str, val_split: float
) -> None:
    paths = {"model_path": str(model), "data": str(chat)}
    config = BenchConfig(**paths, order=order, val_split=val_split, steps=3)
    dataset = load_dataset(config, Reader(config, model))
    steps, count = benchmark_steps(config, dataset)
    pipeline = FakePipeline()
    folder = str(tmp_path / "checkpoints")
    training = TrainConfig(**paths, order=order, val_split=val_split, checkpoint_dir=folder)
    InstructTrainer(pipeline, dataset.rows, training.trainer_config()).train()
    taken = [[example.row for example in step] for step in steps]
    assert len(taken) == 3
    assert count == sum(map(len, taken))
    assert taken == pipeline.batches[:3]


# Without a peer, quietly, and with too little data


@pytest.mark.usefixtures("in_process")
def test_without_a_peer_only_mlxtune_is_measured(bench: Cli) -> None:
    outcome = bench("--json", "-", "--quiet", "--steps", 9)
    found = json.loads(outcome.out)
    assert (found["against"], found["ratio"], found["theirs"]) == (None, None, None)
    assert found["steps"] == 5
    (run,) = found["ours"]["runs"]
    assert len(run["steps"]) == 5
    assert outcome.err == (
        "warning: the data has rows for 5 of 9 steps: add rows or lower --batch-size to time more\n"
    )


# Failures


def test_unknown_peer_is_an_error(bench: Cli) -> None:
    outcome = bench("--against", "axolotl")
    assert outcome.code == 2
    assert outcome.error == "--against must be mlx-lm, not 'axolotl'"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--targets", "qq_proj"], "--targets: no projection is named qq_proj"),
        (["--model-path", "nowhere"], "nowhere: no such folder: check --model-path"),
        (["--json", "."], "is a folder: --json takes the name of a file"),
        (["--max-seq-len", 8], "none of its 20 rows can be used"),
        (["--num-layers", 9], "--num-layers 9: the model has 1 layers"),
        (["--memory-limit", 1e-4], "--memory-limit"),
    ],
)
def test_error_is_reported_before_anything_runs(
    bench: Cli, monkeypatch: pytest.MonkeyPatch, arguments: list[object], said: str
) -> None:
    monkeypatch.setattr("mlxtune.benchmark.bench._run_process", None)
    outcome = bench("--quiet", *arguments)
    assert outcome.code == 1
    assert said in outcome.error


def test_model_with_broken_weights_is_an_error(bench: Cli, broken: Path) -> None:
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot be read" in bench("--quiet", "--model-path", broken).error


def command_of_peer(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], code: str) -> None:
    """Make the peer's process run `code`, and mlxtune's process return a recorded result."""
    run = dict(found["ours"]["runs"][0])
    (step, *_) = run.pop("steps")
    told = "\n".join(json.dumps(record) for record in ({"step": step}, {"run": run}))

    def command(job: Path) -> list[str]:
        ours = pickle.loads(job.read_bytes()).contestant_name == bench_helper.OURS
        return [sys.executable, "-S", "-c", f"print({told!r})" if ours else code]

    monkeypatch.setattr(bench_recipe, "helper_command", command)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            "killed (signal 9) before its first step, probably for lack of memory",
        ),
        ("raise ValueError('no such layer')", "exit 1 before its first step: ValueError: no such"),
        ('print(\'{"error": "the loss is nan"}\')', "the loss is nan"),
    ],
)
def test_peer_that_dies_leaves_our_numbers_and_its_reason(
    bench: Cli,
    compared: tuple[Outcome, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    said: str,
) -> None:
    command_of_peer(monkeypatch, compared[1], code)
    outcome = bench("--against", "mlx-lm", "--json", "-", "--repeats", 2, "--steps", 1)
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["theirs"]["failed"].startswith(said)
    assert found["ratio"] is None
    assert len(found["ours"]["runs"]) == 2
    # The failure is reported immediately and again under the table, and the peer is not retried.
    assert outcome.err.count(f"mlx-lm failed: {said}") == 2


def test_our_process_that_is_killed_is_an_error_with_a_remedy(
    bench: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(
        "mlxtune.benchmark.bench.helper_command", lambda job: [sys.executable, "-c", code]
    )
    error = bench("--quiet").error
    assert error.startswith("killed (signal 9) before its first step")
    assert error.endswith("lower --batch-size or --max-seq-len")


def test_bug_in_our_process_keeps_its_traceback(
    model: Path, chat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mlxtune.benchmark.bench.helper_command", lambda job: [sys.executable, "-c", "1 / 0"]
    )
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*ZeroDivisionError"):
        run_bench(BenchConfig(str(model), (str(chat),), quiet=True))


@pytest.mark.usefixtures("in_process")
def test_loss_that_is_not_finite_is_our_own_error(model: Path, chat: Path) -> None:
    with pytest.raises(MlxTuneError, match=r"step .*lower --lr"):
        run_bench(BenchConfig(str(model), (str(chat),), lr=1e38, quiet=True))


# Interrupts


@pytest.fixture
def long_bench(model: Path, chat: Path, tmp_path: Path) -> Iterator[Any]:
    """A benchmark of very many runs, with a temporary folder for its files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o700)
    arguments = ["--model-path", model, "--data", chat, "--repeats", 1000, "--steps", 1]
    with start("bench", *arguments, env=os.environ | {"TMPDIR": str(scratch)}) as process:
        process.scratch = scratch  # type: ignore[attr-defined]
        yield process
        process.kill()


def workers(scratch: Path) -> list[str]:
    """Return the processes whose command line names the folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [line for line in [file.read_text()] if str(scratch) in line]
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see processes")
def test_interrupt_ends_the_command_and_leaves_no_file(long_bench: Any) -> None:
    read = read_until(long_bench, "Steps ")
    wait_until(lambda: bool(workers(long_bench.scratch)))
    long_bench.send_signal(signal.SIGINT)
    outcome = finish(long_bench, read)
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "mlxtune: interrupted"
    assert "Traceback" not in outcome.err
    wait_until(lambda: not workers(long_bench.scratch))
    # MLX keeps compiled code in the folder `mlx`.
    assert [path for path in long_bench.scratch.iterdir() if path.name != "mlx"] == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see processes")
def test_killed_command_leaves_no_process(long_bench: Any) -> None:
    read_until(long_bench, "Steps ")
    wait_until(lambda: bool(workers(long_bench.scratch)))
    long_bench.kill()
    long_bench.wait(SECONDS)
    wait_until(lambda: not workers(long_bench.scratch))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("gpu", [slow(False), True])
def test_preferences_are_timed_with_their_reference(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    finish = bench_helper.default_device.finish
    device = SimpleNamespace(on_cpu=lambda: not gpu, finish=finish)
    monkeypatch.setattr(bench_helper, "default_device", device)
    pairs = tmp_path / "pairs.jsonl"
    row = {"prompt": "2 plus 2", "chosen": "It is 4.", "rejected": "It is 5, I guess."}
    pairs.write_text("\n".join(json.dumps({**row, "prompt": f"{i} plus 2"}) for i in range(8)))
    report = tmp_path / "bench.json"
    given = ("--model-path", model, "--data", pairs, "--objective", "dpo")
    outcome = cli("bench", *given, "--steps", 2, "--repeats", 1, "--json", report)
    assert outcome.code == 0, outcome.err
    (run,) = json.loads(report.read_text())["ours"]["runs"]
    assert run["steps"][0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert run["reference_s"] > 0
    # The prompt that both answers share runs once.
    assert run["steps"][0]["tokens_run"] < run["steps"][0]["tokens"]
    refused = cli("bench", *given, "--against", "mlx-lm")
    assert "--against mlx-lm does not support dpo" in refused.err


def test_busy_machine_is_warned_of(
    bench: Cli, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 63.0)
    assert "warning" not in bench("--quiet").err
    monkeypatch.setattr(conditions, "_BUSY_PERCENT", 25.0)
    assert "warning: other programs use 63% of the processors" in bench("--quiet").err
