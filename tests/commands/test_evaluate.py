"""`mlxtune eval`, and the verdict at the end of `train`: whether the adapter helped."""

from __future__ import annotations

import json
import re
import shutil
import signal
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from mlxtune import EvalConfig, TrainConfig, evaluate, resume, train, verify
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.errors import DataError
from mlxtune.session.trained_model import is_trained_on_text
from tests.command import Cli, Outcome, unless_given
from tests.models import CHATML, sums, write_adapter_config, write_chat, write_model
from tests.slow import slow

ROWS = 40


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, and a run that trained an adapter."""
    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "model", "qwen3")
    (folder / "model" / "chat_template.jinja").write_text(CHATML)
    data = write_chat(folder / "chat.jsonl", sums(ROWS))
    write_chat(folder / "new.jsonl", sums(2 * ROWS)[ROWS:])
    output = str(folder / "out" / "adapters.safetensors")
    options: dict[str, Any] = {"lr": 1e-2, "targets": ("all",), "epochs": 2, "quiet": True}
    train(TrainConfig(str(folder / "model"), str(data), output=output, **options))
    return folder


@pytest.fixture
def judged(cli: Cli, home: Path) -> Cli:
    """A function that runs `mlxtune eval` on the model and its adapter, or on given ones."""

    def run(*arguments: object) -> Outcome:
        good = {"model_path": home / "model", "adapter": home / "out", "data": home / "new.jsonl"}
        return cli("eval", *unless_given(arguments, **good), *arguments)

    return run


def plain_loss(home: Path, adapter: Path | None) -> float:
    """Return the loss over all supervised tokens, from mlx-lm's logits and the model's template."""
    import mlx.core as mx
    from mlx_lm.utils import load

    model, tokenizer = load(
        str(home / "model"), adapter_path=None if adapter is None else str(adapter)
    )
    total, count = 0.0, 0
    for line in (home / "new.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)
        answer = tokenizer.encode(messages[-1]["content"] + "<|im_end|>", add_special_tokens=False)
        logits = np.array(model(mx.array([prompt + answer]))[0], dtype=np.float64)
        logits = logits[len(prompt) - 1 : -1]
        highest = logits.max(axis=1, keepdims=True)
        logs = logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
        total -= logs[np.arange(len(answer)), answer].sum()
        count += len(answer)
    return float(total / count)


def test_losses_match_plain_cross_entropy_over_all_rows(judged: Cli, home: Path) -> None:
    outcome = judged("--json", "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    base, adapted = plain_loss(home, None), plain_loss(home, home / "out")
    assert found["rows"] == ROWS
    assert found["base"]["loss"] == pytest.approx(base, rel=1e-5)
    assert found["adapted"]["loss"] == pytest.approx(adapted, rel=1e-5)
    assert found["adapted"]["perplexity"] == pytest.approx(np.exp(adapted), rel=1e-5)
    difference = found["difference"]
    assert difference["loss"] == pytest.approx(adapted - base, rel=1e-4)
    assert difference["low"] < difference["loss"] < difference["high"] < 0
    assert (difference["confidence"], difference["resamples"]) == (0.95, 10_000)
    assert found["verdict"] == "helped"
    assert found["generated"] is None
    assert {len(found["gained"]), len(found["lost"])} == {5, 0}
    assert found["gained"][0].keys() == {"path", "row", "tokens", "base_loss", "adapted_loss"}


def test_output_has_the_verdict(judged: Cli, home: Path) -> None:
    outcome = judged()
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[2].startswith("Verdict     the adapter helped: ")
    assert f"Gained most {home / 'new.jsonl'}:" in outcome.out
    assert "40 rows read; " in outcome.err


def scaled(home: Path, folder: Path, factor: float) -> Path:
    """Write the run's adapter, with its update scaled by a factor, to `folder`; return `folder`."""
    folder.mkdir()
    shutil.copy(home / "out" / "adapter_config.json", folder)
    tensors = safetensors.numpy.load_file(home / "out" / "adapters.safetensors")
    changed = {n: v * np.float32(factor if n.endswith("_b") else 1) for n, v in tensors.items()}
    safetensors.numpy.save_file(changed, folder / "adapters.safetensors")
    return folder


@pytest.mark.parametrize(("factor", "verdict"), [(0.0, "cannot tell"), (-3.0, "hurt")])
def test_useless_or_harmful_adapter_is_reported(
    judged: Cli, home: Path, tmp_path: Path, factor: float, verdict: str
) -> None:
    adapter = scaled(home, tmp_path / "other", factor)
    assert json.loads(judged("--adapter", adapter, "--json").out)["verdict"] == verdict


@pytest.mark.parametrize("factor", [slow(0.0), 1e-42])
def test_adapter_of_zeros_changes_nothing(
    judged: Cli, home: Path, tmp_path: Path, factor: float
) -> None:
    outcome = judged("--adapter", scaled(home, tmp_path / "other", factor))
    assert "adapters.safetensors: changes nothing: all its updates are zero" in outcome.err
    assert "trained parameters" not in outcome.err
    usual = judged().err
    assert "changes nothing" not in usual
    assert re.search(r"^Adapter +\S+: rank \d+, [\d,]+ trained parameters$", usual, re.MULTILINE)


def test_one_row_cannot_tell(judged: Cli, tmp_path: Path) -> None:
    one = write_chat(tmp_path / "one.jsonl", sums(ROWS + 1)[ROWS:])
    outcome = judged("--data", one, "--quiet")
    assert outcome.err == ""
    assert "cannot tell whether the adapter helped" in outcome.out
    assert outcome.code == 0


def test_rows_of_the_run_are_found_in_any_file_and_left_out(
    judged: Cli, home: Path, tmp_path: Path
) -> None:
    # The run held 8 of its rows out. A different layout of a row gives the same tokens.
    rows = [{"prompt": asked, "completion": answer} for (_, asked), (_, answer) in sums(ROWS + 10)]
    mixed = write_chat(tmp_path / "mixed.jsonl", rows)
    found = json.loads(judged("--data", mixed, "--json").out)
    assert (found["rows"], found["left_out"], found["verdict"]) == (18, 32, "helped")
    for adapter in ("checkpoints/best", "checkpoints/best/adapters.safetensors"):
        given = ["--adapter", home / "out" / adapter, "--data", mixed, "--json"]
        assert json.loads(judged(*given).out)["left_out"] == 32

    alone = scaled(home, tmp_path / "other", 1)  # not the file that the run wrote
    copied = alone / "adapters.safetensors"
    copied.write_bytes((home / "out" / copied.name).read_bytes()[:-4] + b"\0\0\0\0")
    assert json.loads(judged("--adapter", alone, "--data", mixed, "--json").out)["left_out"] == 0


@pytest.mark.slow
def test_near_copies_of_trained_rows_are_left_out_too(
    judged: Cli, train: Cli, home: Path, output: Path, tmp_path: Path
) -> None:
    def near(text: str) -> str:
        return f"  {text.upper().rstrip('.?')} "

    rows = [[(role, near(text)) for role, text in row] for row in sums(ROWS)]
    copies = write_chat(tmp_path / "copies.jsonl", rows)
    found = json.loads(judged("--data", copies, "--json").out)
    # The other 8 rows are near copies of rows that the run held out.
    assert (found["rows"], found["left_out"]) == (8, 32)

    data = ["--data", home / "chat.jsonl", "--val-data", copies]
    outcome = train("--model-path", home / "model", *data, quiet=False)
    assert "cannot tell whether the adapter helped" in outcome.err
    assert " but for white space, case, punctuation" in outcome.err


@pytest.mark.slow
def test_rows_of_the_first_adapter_count_as_trained_on_too(
    judged: Cli, train: Cli, home: Path, output: Path, tmp_path: Path
) -> None:
    more = write_chat(tmp_path / "more.jsonl", sums(ROWS + 20)[ROWS:])
    given = ["--model-path", home / "model", "--init-adapter", home / "out"]
    outcome = train(*given, "--data", more, "--val-data", home / "chat.jsonl", quiet=False)
    verdict, second = [line for line in outcome.err.splitlines() if "% off the loss" in line]
    assert "the loss of the first adapter" in verdict
    assert "8 rows" in verdict and "without 32 rows that training also used" in verdict
    assert second.strip().startswith("compared with the base model, it takes ")

    found = evaluation(output.parent)
    assert found["start"]["loss"] == pytest.approx(
        json.loads(judged("--data", home / "chat.jsonl", "--json").out)["adapted"]["loss"]
    )
    both = json.loads(judged("--adapter", output, "--data", home / "chat.jsonl", "--json").out)
    assert (both["rows"], both["left_out"]) == (8, 32)
    only = judged("--adapter", output, "--data", more, "--json")
    assert json.loads(only.out)["verdict"] == "cannot tell"
    assert "warning: these are training rows of the adapter" in only.err


def test_base_alone_is_evaluated_without_an_adapter(cli: Cli, home: Path) -> None:
    given = ["--model-path", home / "model", "--data", home / "new.jsonl", "--generate"]
    found = json.loads(cli("eval", *given, "--max-new-tokens", 3, "--json").out)
    assert found["base"]["loss"] == pytest.approx(plain_loss(home, None), rel=1e-5)
    assert (found["adapted"], found["difference"], found["verdict"]) == (None, None, None)
    assert found["generated"]["exact_match"] == {"base": 0, "adapted": None}


def test_folder_resolves_to_its_test_or_valid_file(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name, count in (("train", 9), ("valid", 3)):
        write_chat(folder / f"{name}.jsonl", sums(count))
    config = EvalConfig(str(home / "model"), data=str(folder), quiet=True)  # type: ignore[arg-type]
    assert evaluate(config).rows == 3
    write_chat(folder / "test.jsonl", sums(4))
    assert evaluate(config).rows == 4
    for name in ("test", "valid"):
        (folder / f"{name}.jsonl").unlink()
    with pytest.raises(DataError, match=r"has neither test\.jsonl nor validation\.jsonl"):
        evaluate(config)


def test_answers_are_side_by_side_and_exact_matches_are_counted(judged: Cli, home: Path) -> None:
    from mlx_lm import generate
    from mlx_lm.utils import load

    found = json.loads(judged("--generate", "--max-new-tokens", 12, "--json").out)["generated"]
    assert (found["rows"], len(found["samples"])) == (ROWS, ROWS)
    model, tokenizer = load(str(home / "model"), adapter_path=str(home / "out"))
    for sample in found["samples"][::13]:
        line = (home / "new.jsonl").read_text().splitlines()[sample["row"] - 1]
        *asked, answer = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        assert sample["prompt"] == tokenizer.decode(prompt)
        assert sample["expected"] == answer["content"]
        assert sample["adapted"] == generate(model, tokenizer, prompt, max_tokens=12)
    same = sum(sample["adapted"] == sample["expected"] for sample in found["samples"])
    assert found["exact_match"]["adapted"] == same


def test_pattern_matches_are_counted_with_and_without_adapter(
    judged: Cli,
) -> None:
    outcome = judged("--generate", "--max-new-tokens", 12, "--match", "regex=^")
    every = f"base {ROWS} (100.0%), adapted {ROWS} (100.0%), of {ROWS} answers"
    assert f"Match       {every}, match by regex=^" in outcome.out
    assert "Exact match base" in outcome.out
    assert f"100% of {ROWS} answers match by regex=^, 100% without it" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--match", "json"], "--match counts answers: add --generate"),
        (["--generate", "--match", "regex=("], "--match 'regex=(' is not a pattern: missing )"),
        (["--generate", "--match", "near"], "must be exact, json, contains or regex=PATTERN"),
        (["--adapter", "nowhere"], "nowhere: no such file or folder: check --adapter"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--max-new-tokens", 0], "--max-new-tokens must be at least 1"),
    ],
)
def test_error_is_one_line(judged: Cli, arguments: list[object], said: str) -> None:
    assert said in judged(*arguments).error


# The end of a run


def evaluation(run: Path) -> Any:
    return json.loads((run / "checkpoints" / "evaluation.json").read_text())


def test_run_ends_with_the_verdict_on_its_validation_rows(home: Path) -> None:
    found = evaluation(home / "out")
    assert len(found["generated"]["samples"]) == 3
    records = (home / "out" / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    losses = [each["val_loss"] for each in map(json.loads, records) if each["kind"] == "epoch"]
    result = json.loads((home / "out" / "checkpoints" / "result.json").read_text())
    assert (found["rows"], found["verdict"]) == (8, "helped")
    # These are the trainer's losses before the first step and at the best epoch.
    assert found["base"]["loss"] == pytest.approx(result["initial_val_loss"], rel=1e-5)
    assert found["adapted"]["loss"] == pytest.approx(min(losses), rel=1e-5)
    assert {each["path"] for each in found["gained"]} == {str(home / "chat.jsonl")}
    checks = {check.name: check for check in verify(home / "out").checks}
    assert checks["evaluation.json"].detail == "helped on 8 rows"
    assert verify(home / "out").ok


def test_eval_of_the_validation_file_gives_the_same_result(
    cli: Cli, train: Cli, home: Path, output: Path, tmp_path: Path
) -> None:
    rows = write_chat(tmp_path / "valid.jsonl", sums(12)[3:])
    outcome = train("--val-data", rows, "--lr", 1e-2, "--model-path", home / "model", quiet=False)
    lines = outcome.err.splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["Verdict", "Report", "Next", "Try"]
    given = ["--model-path", home / "model", "--adapter", output, "--data", rows, "--json"]
    assert json.loads(cli("eval", *given).out) == evaluation(output.parent)


def test_run_without_validation_has_no_verdict(train: Cli, output: Path) -> None:
    outcome = train("--val-split", 0, quiet=False)
    assert "Verdict" not in outcome.err
    assert not (output.parent / "checkpoints" / "evaluation.json").exists()


@pytest.mark.slow
def test_resumed_run_writes_the_same_evaluation(home: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(home / "out", tmp_path / "out"))
    before = evaluation(folder)
    checkpoints = folder / "checkpoints"
    for name in ("result.json", "evaluation.json"):
        (checkpoints / name).unlink()
    shutil.rmtree(checkpoints / "epoch-2")
    if json.loads((checkpoints / "best" / "metadata.json").read_text())["epoch"] == 2:
        shutil.rmtree(checkpoints / "best")
        shutil.copytree(checkpoints / "epoch-1", checkpoints / "best")
    (folder / "adapters.safetensors").unlink()
    assert resume(folder, quiet=True).evaluation is not None
    assert evaluation(folder) == before


def test_interrupt_while_it_is_evaluated_loses_neither_adapter_nor_result(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.step.evaluator import Evaluator

    monkeypatch.setattr(Evaluator, "losses", lambda *_: signal.raise_signal(signal.SIGINT))
    outcome = train()
    assert outcome.code == 130
    warning, last = outcome.err.splitlines()
    assert warning == (
        "warning: the adapter was written, but not evaluated: run mlxtune eval for a verdict"
    )
    assert last == "mlxtune: interrupted"
    assert output.exists()
    for name in ("result.json", "report.html"):
        assert (output.parent / "checkpoints" / name).exists()
    assert verify(output.parent).ok


def test_evaluation_that_fails_is_a_warning(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.step.evaluator import Evaluator

    monkeypatch.setattr(Evaluator, "losses", lambda _, rows, *__: np.full(len(rows), np.nan))
    outcome = train()
    assert outcome.code == 0
    assert "could not be evaluated: " in outcome.err
    assert "is not finite" in outcome.err
    assert output.exists()


@pytest.mark.slow
def test_samples_match_mlx_lm_without_and_with_the_adapter(home: Path) -> None:
    from mlx_lm import generate
    from mlx_lm.utils import load

    found = evaluation(home / "out")["generated"]
    assert (found["rows"], len({sample["row"] for sample in found["samples"]})) == (3, 3)
    lines = (home / "chat.jsonl").read_text().splitlines()
    for side, adapter in (("base", None), ("adapted", str(home / "out"))):
        model, tokenizer = load(str(home / "model"), adapter_path=adapter)
        for sample in found["samples"]:
            *asked, answer = json.loads(lines[sample["row"] - 1])["messages"]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
            assert sample["expected"] == answer["content"]
            # Further on, mlx-lm spells a control character of this model's answer differently.
            theirs = generate(model, tokenizer, prompt, max_tokens=128)
            assert sample[side][:12] == theirs[:12]
    page = (home / "out" / "checkpoints" / "report.html").read_text()
    assert "of 3 answers exact after" in page


def test_run_loads_weights_twice_and_never_holds_two_models(
    train: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.models import loading

    loaded: list[weakref.ref[Any]] = []
    read_weights = loading.read_weights

    def read(base: loading.BaseModel) -> None:
        # An opened model has no weights until they are read.
        assert [earlier() for earlier in loaded] == [None] * len(loaded)
        loaded.append(weakref.ref(base.model))
        read_weights(base)

    monkeypatch.setattr(loading, "read_weights", read)
    outcome = train("--samples", 3, quiet=False)
    assert outcome.code == 0
    stages = [line.split()[0] for line in outcome.err.splitlines()]
    assert stages.index("Verdict") < stages.index("Samples")
    assert len(loaded) == 2


@pytest.mark.slow
def test_samples_are_as_many_as_are_asked_for_and_change_nothing_else(
    train: Cli, home: Path, output: Path
) -> None:
    asked = ["--model-path", home / "model", "--lr", 1e-2, "--overwrite"]
    outcome = train(*asked, "--samples", 2, quiet=False)
    line = next(line for line in outcome.err.splitlines() if line.startswith("Samples"))
    assert line == "Samples     2 rows answered, for the report"
    found, adapter = evaluation(output.parent), output.read_bytes()
    assert len(found["generated"]["samples"]) == 2
    assert "Samples" not in train(*asked, quiet=False).err
    assert evaluation(output.parent) == found | {"generated": None}
    assert output.read_bytes() == adapter
    assert "--samples must be at least 0" in train("--samples", -1).error


def test_texts_have_no_samples_and_are_to_be_completed(
    train: Cli, home: Path, tmp_path: Path, output: Path
) -> None:
    rows = [{"text": f"the fox jumps over the dog {i} times"} for i in range(30)]
    data = write_chat(tmp_path / "text.jsonl", rows)
    outcome = train("--data", data, "--samples", 3, quiet=False)
    assert outcome.code == 0
    assert (
        "Samples     none: no row has a prompt and a whole answer (plain text has neither)"
        in outcome.err
    )
    assert f"mlxtune generate --adapter {output.parent} --prompt" in outcome.err
    assert evaluation(output.parent)["generated"] is None
    trained = [is_trained_on_text(AdapterFile.find(str(each))) for each in (output, home / "out")]
    assert trained == [True, False]


def test_interrupt_while_samples_are_answered_is_harmless(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.session import judge

    monkeypatch.setattr(judge, "answer_prompts", lambda *_: signal.raise_signal(signal.SIGINT))
    outcome = train("--samples", 3)
    assert outcome.code == 0
    (warning,) = outcome.err.splitlines()
    assert warning.startswith("warning: interrupted: no sample answers")
    found = evaluation(output.parent)
    assert (found["generated"], found["rows"] > 0) == (None, True)
    assert (output.parent / "checkpoints" / "report.html").exists()
    assert verify(output.parent).ok


def test_continuing_run_has_no_old_verdict(home: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(home / "out", tmp_path / "out"))
    from mlxtune.core.run import run_folder

    run_folder.reopen(folder / "checkpoints")
    assert not (folder / "checkpoints" / "evaluation.json").exists()


# What was trained, and on what


def test_adapter_without_its_run_knows_its_own_training_rows(
    judged: Cli, home: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("adapters.safetensors", "adapter_config.json"):
        shutil.copy(home / "out" / name, alone)
    found = json.loads(judged("--adapter", alone, "--data", home / "chat.jsonl", "--json").out)
    assert (found["rows"], found["left_out"]) == (8, 32)

    rows = (home / "chat.jsonl").read_text().splitlines(keepends=True)
    part = tmp_path / "part.jsonl"
    part.write_text("".join(rows[:20]))
    outcome = judged("--adapter", alone, "--data", part)
    assert "which 32 rows it was trained on is unknown" in outcome.err
    assert "whether these rows were trained on is unknown" in outcome.out
    record = AdapterFile(alone / "adapters.safetensors").info.mlxtune["trained_rows"]
    assert record["rows"] == 32
    # The rows that are left without the held-out ones are found by the same hash.
    own = json.loads((home / "out" / "checkpoints" / "run.json").read_text())["plan"]
    assert own["rows_train"] == record["rows"]


def test_evaluation_reads_rows_as_training_did_by_default(
    cli: Cli, home: Path, tmp_path: Path
) -> None:
    rows = [{"question": asked, "answer": answer} for (_, asked), (_, answer) in sums(60)]
    data = write_chat(tmp_path / "rows.jsonl", rows[:30])
    new = write_chat(tmp_path / "new.jsonl", rows[30:])
    out = tmp_path / "out"
    given = ["--model-path", home / "model", "--data", data, "--output", out, "--samples", 0]
    fields = ["--field", "prompt=question", "--field", "completion=answer"]
    own = [*fields, "--max-seq-len", 28, "--template", "chatml"]
    assert cli("train", *given, *own, "--max-steps", 2, "--quiet").code == 0

    outcome = cli("eval", "--adapter", out, "--data", new, "--json")
    assert "--max-seq-len 28" in outcome.err and "as in training" in outcome.err
    found = json.loads(outcome.out)
    same = json.loads(cli("eval", "--adapter", out, "--data", new, *own, "--json").out)
    assert (found["tokens"], found["base"]) == (same["tokens"], same["base"])
    longer = cli("eval", "--adapter", out, "--data", new, "--max-seq-len", 500, "--json")
    assert json.loads(longer.out)["tokens"] > found["tokens"]


def test_two_adapters_are_compared_on_the_same_rows(
    judged: Cli, home: Path, tmp_path: Path
) -> None:
    weak = scaled(home, tmp_path / "weak", 0.0)
    given = ["--against", weak, "--generate", "--max-new-tokens", 4]
    outcome = judged(*given, "--json")
    found, alone = json.loads(outcome.out), json.loads(judged("--json").out)
    # The other adapter changes nothing, so its loss is the base model's.
    assert found["start"]["loss"] == pytest.approx(found["base"]["loss"])
    assert found["difference"]["loss"] == pytest.approx(alone["difference"]["loss"])
    assert (found["against"], found["verdict"]) == (str(weak), "helped")
    samples = found["generated"]["samples"]
    assert all(sample["against"] == sample["base"] for sample in samples)
    assert found["generated"]["exact_match"]["against"] == found["generated"]["exact_match"]["base"]

    given = ["--against", home / "out", "--generate", "--match", "contains"]
    back = judged("--adapter", weak, *given, "--max-new-tokens", 4)
    assert f"the adapter is worse than {home / 'out'}: it adds " in back.out
    assert "\nAgainst     " in back.out
    assert "\nDiffer      " in back.out
    error = judged("--against", tmp_path / "none").error
    assert "no such file or folder: check --against" in error


@pytest.mark.parametrize("name", ["--adapter", "--against"])
def test_adapter_of_another_base_is_refused_by_name(
    judged: Cli, home: Path, tmp_path: Path, name: str
) -> None:
    other = write_model(tmp_path / "gemma", "gemma3_text")
    (other / "chat_template.jinja").write_text(CHATML)
    output = str(tmp_path / "other")
    options: dict[str, Any] = {"max_steps": 1, "val_split": 0.0, "quiet": True}
    train(TrainConfig(str(other), str(home / "chat.jsonl"), output=output, **options))
    error = judged(name, output, "--quiet").error
    problem = f"was trained on another base model, '{other}', not on {home / 'model'}"
    assert f"{problem}, whose weights differ: pass the right --model-path" in error
    # Another tool writes no fingerprint of the base.
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    del config["mlxtune"]["base"]
    write_adapter_config(tmp_path / "other", config)
    assert problem in judged(name, output).err
