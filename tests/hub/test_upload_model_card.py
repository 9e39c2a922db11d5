"""A model card has all facts that readers need and no private data; the hub reads its metadata."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from mlxtune.config import OPTIONS
from mlxtune.core.run.stored_run import Run, read_run
from mlxtune.core.run.summary import RunView
from mlxtune.hub.upload import command_of, model_card, quoted_samples
from tests.runs import EVALUATION, LEDGER, write_run

COMMIT = "0123456789" * 4
HUB = {
    "name": f"org/sums/default@{COMMIT}",
    "repository": "org/sums",
    "config": "default",
    "titles": {"train": "org/sums:train", "validation": "org/sums:validation"},
    "commit": COMMIT,
    "license": "cc-by-4.0",
    "public": True,
}


def run_with(
    folder: Path, *, ledgers: tuple[str, ...] = ("/home/ann/secret/chat.jsonl",), **options: Any
) -> Run:
    run = write_run(folder, **{"evaluation": EVALUATION, **options})
    (run / "ledger.json").write_text(json.dumps([{**LEDGER, "path": path} for path in ledgers]))
    return read_run(run)


def model_card_of(run: Run, base: str = "org/base", *, peft: bool = True) -> Any:
    """Return a run's card as the hub's own tools read it."""
    return ModelCard(
        model_card(run, RunView.of(run), repository="me/sums-lora", base=base, peft=peft)
    )


def card(run: Run, base: str = "org/base", *, peft: bool = True) -> str:
    return str(model_card_of(run, base, peft=peft).text.lstrip())


def test_card_says_what_the_adapter_does_and_how_it_was_made(tmp_path: Path) -> None:
    text = card(run_with(tmp_path))
    assert text.startswith("# sums-lora\n\nA LoRA adapter for `org/base`")
    assert "| base model | 4.0000 | 54.6 |\n| with the adapter | 1.0000 | 2.718 |" in text
    assert "95% interval 2.7500 to 3.2000" in text
    assert "| `chat.jsonl` | 50 | 40 | 8 | 2 | 5,000 | 2,000 |" in text
    assert "sha256:da7a" in text
    assert "versions: mlxtune 0.1.0, mlx 0.32.4" in text
    assert "mlx_lm.generate --model org/base --adapter-path" in text
    assert 'PeftModel.from_pretrained(base, "me/sums-lora")' in text


PREFERENCE = {
    **{"objective": "dpo", "pairs": True, "before": 0.5, "after": 0.75, "low": 0.1, "high": 0.4},
    **{"confidence": 0.95, "margin_before": 0.0, "margin_after": 0.2, "misjudged": []},
}


def test_card_names_the_objective_and_the_first_adapter_without_its_path(tmp_path: Path) -> None:
    options = {"objective": "dpo", "dpo_loss": "ipo", "beta": 0.2, "init_adapter": "/home/ann/one"}
    about = {"lora": {"description": "rank 8 on 4 modules; starting from /home/ann/one"}}
    evaluation = EVALUATION | {"preference": PREFERENCE}
    text = card(run_with(tmp_path, options=options, about=about, evaluation=evaluation))
    assert "- objective: dpo (ipo), beta 0.2\n" in text
    assert "--objective dpo" in text and "--dpo-loss ipo" in text and "`chat.jsonl`" in text
    assert "it prefers the chosen answer in 75%" in text
    assert "Losses are of the good answers, in nats" in text
    assert "starting from one\n" in text and "/home" not in text


REWARDS = [
    {"name": name, "sampled": sampled, "before": 0.25, "after": 0.75, "low": 0.4, "high": 0.6}
    for name in ("", "check.reward")
    for sampled in (False, True)
]


def test_card_of_rewards_has_their_means_and_no_paths(tmp_path: Path) -> None:
    reward = ("/home/ann/check.py:reward=2", "json:/home/ann/schema.json", "regex=a/b", "exact")
    options = {"objective": "grpo", "reward": reward}
    text = card(run_with(tmp_path, options=options, evaluation=EVALUATION | {"rewards": REWARDS}))
    assert "| greedy answers | 0.250 | 0.750 | +0.400 to +0.600 |" in text
    assert "| sampled answers, `check.reward` | 0.250 | 0.750 | +0.400 to +0.600 |" in text
    assert "perplexity" not in text and "nats" not in text and "/home" not in text
    assert "--reward check.py:reward=2 --reward json:schema.json --reward regex=a/b" in text
    assert text.count("sampled answers") == 2


@pytest.mark.parametrize(
    ("rewards", "title"), [([], "Base model"), (REWARDS, "The model before training")]
)
def test_card_names_the_model_whose_answers_are_compared(
    tmp_path: Path, rewards: list[dict[str, Any]], title: str
) -> None:
    evaluation = EVALUATION | {"rewards": rewards}
    options = {"init_adapter": "first"}
    public = {"about": {"hub": [HUB]}, "ledgers": ("org/sums:train",)}
    text = card(run_with(tmp_path, evaluation=evaluation, options=options, **public))
    assert re.findall("^(.+) 1:\n\n```text\nthe the\n```$", text, re.MULTILINE) == [title]


def test_card_of_answers_names_no_objective(tmp_path: Path) -> None:
    assert "objective" not in card(run_with(tmp_path))


def test_adapter_that_peft_cannot_hold_is_not_offered_for_it(tmp_path: Path) -> None:
    assert "PeftModel" not in card(run_with(tmp_path), peft=False)


def test_run_without_validation_claims_no_result(tmp_path: Path) -> None:
    run = run_with(tmp_path, evaluation=None, validation=False)
    assert "Not evaluated: no rows were held out." in card(run)


def test_data_of_the_hub_has_its_license_and_commit(tmp_path: Path) -> None:
    run = run_with(tmp_path, about={"hub": [HUB]}, ledgers=("org/sums:train",))
    assert f"- `org/sums`: licence `cc-by-4.0`, commit `{COMMIT}`" in card(run)
    assert "| `org/sums:train` |" in card(run)


# Paths


def test_command_has_names_instead_of_paths(tmp_path: Path) -> None:
    options = {
        "model_path": "/home/ann/models/tiny",
        "data": ("/home/ann/secret/a.jsonl", HUB["name"], "../secret/b.jsonl"),
        "val_data": "secret/v.jsonl",
        "init_adapter": "~/secret/first",
        "output": "/home/ann/out/a.safetensors",
        "checkpoint_dir": "/home/ann/out/c",
        "cache_dir": "/home/ann/cache",
        "track": ("wandb",),
        "targets": ("q_proj", "v_proj", "o_proj"),
        "field": ("prompt=question",),
        "rslora": True,
        "lr": 3e-4,
        "alpha": 32.0,
    }
    run = run_with(tmp_path, options=options, about={"hub": [HUB]})
    command = command_of(run, "org/base")
    assert command.startswith("mlxtune train --model-path")
    given = re.findall(r"(--[\w-]+)(?: ((?!--)\S+))?", command)
    assert sorted(given) == sorted(
        [
            ("--model-path", "org/base"),
            ("--data", "a.jsonl"),
            ("--data", HUB["name"]),
            ("--data", "b.jsonl"),
            ("--val-data", "v.jsonl"),
            ("--init-adapter", "first"),
            ("--targets", "q_proj,v_proj,o_proj"),
            ("--field", "prompt=question"),
            ("--rslora", ""),
            ("--lr", "0.0003"),
            ("--alpha", "32"),
            ("--epochs", "2"),
        ]
    )
    assert not re.search("ann|secret", card(run, "org/base"))


# Samples


def test_rows_are_quoted_only_if_all_data_is_public(tmp_path: Path) -> None:
    public, private = {"hub": [HUB]}, {"hub": [{**HUB, "public": False}]}
    both = ("org/sums:train", "org/sums:validation/0001.parquet")
    cases: list[tuple[dict[str, Any], tuple[str, ...], bool]] = [
        (public, both, True),
        (private, both, False),
        (public, (*both, "/home/ann/chat.jsonl"), False),
        ({}, both, False),
        ({"hub": "org/sums"}, both, False),
        ({"hub": [{**HUB, "titles": None}]}, both, False),
        ({"hub": [{**HUB, "public": "yes"}]}, both, False),
        (public, (), False),
    ]
    for number, (about, ledgers, quoted) in enumerate(cases):
        run = run_with(tmp_path / str(number), about=about, ledgers=ledgers)
        assert bool(quoted_samples(run)) is quoted, number
        assert ("3 + 3?" in card(run)) is quoted, number


# Text from files


@pytest.mark.parametrize("text", ["```\n# Owned", "a ````` b", "<script>", "x | y", "`x`"])
def test_text_of_samples_cannot_leave_its_block(tmp_path: Path, text: str) -> None:
    sample = {"path": "x", "row": 1, "prompt": text, "expected": text, "base": text}
    generated = {
        "rows": 1,
        "exact_match": {"base": 0, "adapted": 0},
        "samples": [{**sample, "adapted": text}],
    }
    run = run_with(
        tmp_path,
        about={"hub": [HUB]},
        ledgers=("org/sums:train",),
        evaluation={**EVALUATION, "generated": generated},
    )
    block = re.search(r"^(`{3,})text\n(.*?)\n\1$", card(run), re.DOTALL | re.MULTILINE)
    assert block is not None
    assert block[2] == text


def test_names_from_files_are_code_and_not_markdown(tmp_path: Path) -> None:
    about = {"device": "<img src=x>\n# Owned", "hub": [{**HUB, "license": "a`\n# b | <i>"}]}
    run = run_with(tmp_path, about=about, ledgers=("a|b`<i>\n# Owned.jsonl",))
    text = card(run)
    assert not re.search("^# (Owned|b)", text, re.MULTILINE)
    assert "<img" not in text
    table = [line for line in text.split("\n") if line.startswith("| `")]
    assert [line.count("|") for line in table] == [8]


# Metadata


def test_metadata_names_base_data_and_results(tmp_path: Path) -> None:
    card = model_card_of(run_with(tmp_path, ledgers=("org/sums:train",), about={"hub": [HUB]}))
    assert card.text.strip().startswith("# sums-lora\n")
    assert card.data.base_model == "org/base"
    assert card.data.base_model_relation == "adapter"
    assert card.data.datasets == ["org/sums"]
    assert card.data.library_name == "peft"
    assert [eval_result.metric_value for eval_result in card.data.eval_results] == [4.0, 1.0]
    assert {eval_result.dataset_type for eval_result in card.data.eval_results} == {"org/sums"}


def test_metadata_names_no_base_model_that_is_not_on_the_hub(tmp_path: Path) -> None:
    card = model_card_of(run_with(tmp_path), "tiny", peft=False)
    assert card.data.base_model is None
    assert card.data.library_name == "mlx"


def test_metadata_of_forged_records_stays_metadata(tmp_path: Path) -> None:
    forged = {**HUB, "repository": "org/x\n---\n# Owned"}
    run = read_run(write_run(tmp_path, about={"hub": [forged, 7, None]}))
    card = model_card_of(run)
    assert card.data.datasets is None
    assert card.data.eval_results is None
    assert card.text.strip().startswith("# sums-lora\n")


@pytest.mark.parametrize(
    "name", [*sorted(option for option in OPTIONS if OPTIONS[option].path), "template"]
)
def test_card_has_the_path_of_no_option(tmp_path: Path, name: str) -> None:
    value: Any = "/home/ann/secret/file.jinja"
    if name == "data":
        value = [value]
    assert "ann" not in card(run_with(tmp_path, options={name: value}))


def test_card_names_a_templates_file_and_keeps_a_built_in_one(tmp_path: Path) -> None:
    assert "--template file.jinja" in card(run_with(tmp_path, options={"template": "a/file.jinja"}))
    assert "--template chatml" in card(run_with(tmp_path / "b", options={"template": "chatml"}))
