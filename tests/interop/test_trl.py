"""Objectives against TRL's trainers on torch: log-probabilities, losses, metrics and gradients.

Each step is one batch, because TRL's KL and means depend on how a step is split. Tokens and masks
come from TRL's collators. `pytest -s` prints the largest deviations, for docs/preferences.md.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxtune.config import ObjectiveConfig
from mlxtune.core.data.conversation import CHOSEN
from mlxtune.core.objectives.objective import Objective, with_references
from tests.backend.text.turns import TEMPLATES, Folders
from tests.interop.test_family_peft import give, parameters, tensor_of
from tests.interop.trl_rows import compare_logps, compare_rows, compare_texts, generated
from tests.interop.trl_steps import (
    RATE,
    REFERENCE,
    batch_of,
    examples_of,
    our_step,
    pipeline,
    sft_pipeline,
    their_step,
    trainer_of,
)
from tests.models import CHATML, THINKING, write_model
from tests.paths import SHARED
from tests.slow import long, long_except

torch = pytest.importorskip("torch", reason="compares with TRL, which needs torch")
pytest.importorskip("trl", reason="compares with TRL")
transformers = pytest.importorskip("transformers")

# The libraries warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ("llama", "qwen3", "gemma3_text")


@dataclass(frozen=True)
class Case:
    """Options of an objective, and the equivalent attributes of TRL's trainer."""

    ours: dict[str, Any]
    theirs: dict[str, Any] = field(default_factory=dict)
    built_for: str = ""


def dpo(loss: str, beta: float = 0.1, smoothing: float = 0.0) -> Case:
    same = {"label_smoothing": smoothing, "beta": beta}
    theirs = {"loss_types": [loss], "loss_weights": [1.0], **same}
    return Case({"objective": "dpo", "dpo_loss": loss, **same}, theirs)


def cpo(objective: str, loss: str, alpha: float, **same: float) -> Case:
    theirs = {"loss_type": loss, "cpo_alpha": alpha, "beta": 0.1, "label_smoothing": 0.0, **same}
    return Case({"objective": objective, "cpo_alpha": alpha, **same}, theirs)


def kto(loss: str) -> Case:
    same = {"desirable_weight": 1.5, "undesirable_weight": 0.6, "beta": 0.1}
    return Case({"objective": "kto", "kto_loss": loss, **same}, same, built_for=loss)


_PLAIN = ("sigmoid", "hinge", "ipo", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")
CASES: dict[str, Case] = {
    **{loss: dpo(loss) for loss in (*_PLAIN, "sigmoid_norm", "aot", "aot_unpaired")},
    **{
        f"{loss}, smoothed": dpo(loss, 0.2, 0.1)
        for loss in ("exo_pair", "robust", "aot", "aot_unpaired")
    },
    "sigmoid and sft": Case(
        {"objective": "dpo", "sft_weight": 0.7},
        {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7], "beta": 0.1},
    ),
    "orpo": Case({"objective": "orpo"}, {"beta": 0.1}),
    "orpo, prompt": Case({"objective": "orpo", "orpo_nll": "prompt"}, {"beta": 0.1}),
    "cpo": cpo("cpo", "sigmoid", 1.0),
    "cpo, smoothed": cpo("cpo", "sigmoid", 0.4, beta=0.3, label_smoothing=0.1),
    "simpo": Case(
        {"objective": "simpo", "gamma": 0.8},
        cpo("", "simpo", 0.0, beta=2.0, simpo_gamma=0.8).theirs,
    ),
    "kto": kto("kto"),
    "apo_zero_unpaired": kto("apo_zero_unpaired"),
}


def objective_of(case: Case) -> Objective:
    return Objective(ObjectiveConfig(**case.ours))


def nll_of_answers(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make TRL's ORPO compute its NLL on answers only, as its CPO does."""
    forward = trainer.concatenated_forward

    def concatenated_forward(model: Any, batch: Any) -> tuple[Any, ...]:
        chosen, *rest, _ = forward(model, batch)
        counts = (batch["chosen_labels"][:, 1:] != -100).sum(dim=1)
        return chosen, *rest, -(chosen * counts).sum() / counts.sum()

    monkeypatch.setattr(trainer, "concatenated_forward", concatenated_forward)


def deviation(found: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest expected entry."""
    found, expected = np.asarray(found), np.asarray(expected)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def supervised(batch: Any, objective: Objective) -> int:
    examples = examples_of(batch, objective)
    return sum(example.supervised for example in examples if example.role == CHOSEN)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_step_matches_trl(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    objective = objective_of(case)
    trainer = trainer_of(family, objective.name, loss=case.built_for)
    if name == "orpo":
        nll_of_answers(trainer, monkeypatch)
    batch = batch_of(trainer)
    ours = our_step(family, objective, batch)
    theirs = their_step(trainer, family, batch, case.theirs)

    found = {
        "logps": max(deviation(ours.logps[k], v) for k, v in theirs.logps.items()),
        "loss": deviation(ours.loss, theirs.loss),
    }
    assert len(theirs.logps) == (2 if objective.has_pairs or objective.needs_kl else 1)
    assert bool(theirs.references) == objective.needs_reference
    for role, expected in theirs.references.items():
        found[f"reference {role}"] = deviation(ours.references[role], expected)
        assert deviation(ours.logps[role], expected) > 1e-2
    metrics = dict(theirs.metrics)
    if name == "sigmoid and sft":  # TRL does not report this loss
        metrics["nll_loss"] = -theirs.logps["chosen"].sum() / supervised(batch, objective)
    # TRL reports zero for a KL or NLL that an objective lacks; mlxtune reports nothing.
    absent = {"kl": not objective.needs_kl, "nll_loss": not objective.options.chosen_weight}
    assert {k for k in _REPORTED if k in metrics and not absent.get(k)} == ours.metrics.keys()
    assert ours.metrics.get("kl", 1) > 0 or family == "qwen3"  # qwen3's KL estimate is negative
    for metric, value in ours.metrics.items():
        found[metric] = abs(value - metrics[metric]) / max(1.0, abs(metrics[metric]))
    largest = max(np.abs(value).max() for value in theirs.gradients.values())
    for parameter, expected in theirs.gradients.items():
        wrong = np.abs(ours.gradients[parameter] - expected).max() / largest
        found["gradients"] = max(found.get("gradients", 0.0), wrong)
    print(f"\n{name} {family}: " + ", ".join(f"{k} {v:.1e}" for k, v in found.items()), end="")
    assert largest > 1e-3
    assert ours.gradients.keys() == theirs.gradients.keys()
    assert all(value <= 1e-4 for value in found.values()), found


_REPORTED = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected", "nll_loss", "log_odds_ratio", "log_odds_chosen", "kl"),
)


@pytest.mark.parametrize("family", long_except(FAMILIES, "gemma3_text"))
@pytest.mark.parametrize("name", ["sigmoid", "kto"])
def test_twenty_steps_give_the_adapter_of_trl(family: str, name: str) -> None:
    """Both libraries take the same rows, four per step, and start from the reference's matrices."""
    rows, size = 20, 4
    case = CASES[name]
    objective = objective_of(case)
    trainer = trainer_of(family, objective.name, rows, case.built_for)
    for attribute, value in case.theirs.items():
        setattr(trainer, attribute, value)
    policy, reference = pipeline(family, REFERENCE, objective), sft_pipeline(family, REFERENCE)
    give(trainer.model, policy)
    start = parameters(policy)
    optimizer = torch.optim.AdamW(
        [tensor_of(trainer.model, name) for name in start], lr=RATE, weight_decay=0.0
    )
    examples = examples_of(batch_of(trainer), objective)
    examples = with_references(examples, reference.logps(examples).tolist())

    for step in range(1, 21):
        taken = [(step * size + i) % rows for i in range(size)]
        optimizer.zero_grad()
        loss = trainer.compute_loss(trainer.model, batch_of(trainer, taken))
        loss.backward()
        optimizer.step()
        ours = [example for row in taken for example in examples if example.row == row + 1]
        result = policy.train_batch(ours, step=step)
        assert result.avg_loss == pytest.approx(float(loss.detach()), rel=1e-4)

    found = parameters(policy)
    wrong = {}
    for parameter, value in start.items():
        expected = tensor_of(trainer.model, parameter).detach().numpy().T
        assert np.abs(expected - value).max() > 5 * RATE
        wrong[parameter] = deviation(found[parameter], expected)
    print(f"\n20 steps, {name} {family}: {max(wrong.values()):.1e}", end="")
    assert max(wrong.values()) <= 1e-3


@pytest.mark.parametrize("count", [100, long(3334)])
@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_and_log_probabilities_match_trl(family: str, count: int, tmp_path: Path) -> None:
    folder, rows = write_model(tmp_path / family, family), generated(count, longest=10)
    (folder / "chat_template.jinja").write_text(CHATML if family == "llama" else THINKING)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # The answers have no thinking, so thinking is off.
    thinking = None if family == "llama" else False
    counts, same = compare_rows(folder, tokenizer, rows, tmp_path / "pairs.jsonl", thinking)
    assert counts == {"pairs": count, "same": 2 * count, "tails": 2 * count}
    assert len(same) == count
    assert compare_texts(folder, rows, tmp_path / "pairs.jsonl") > count / 2
    found = compare_logps(family, same if count > 100 else same[:40])
    print(f"\npairs, {family}: log-probabilities {found:.1e}", end="")
    assert found <= 1e-4


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
def test_pairs_of_a_real_vocabulary_match_trl(tmp_path: Path) -> None:
    """In Qwen's vocabulary, an answer's first newline merges with the header's newline."""
    folder = shutil.copytree(SHARED / "tokenizers" / "qwen3", tmp_path / "qwen2.5")
    shutil.copy(SHARED / "templates" / "qwen2_5.jinja", folder / "chat_template.jinja")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    counts, same = compare_rows(folder, tokenizer, generated(200), tmp_path / "pairs.jsonl")
    assert counts["same"] + counts["crossing"] == 400
    assert counts["crossing"] > 50 and len(same) > 100


@pytest.mark.long
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
def test_pairs_match_trl_in_every_real_template_and_thinking_mode(tmp_path: Path) -> None:
    for seed, folder in enumerate(map(Folders(SHARED, tmp_path).__getitem__, TEMPLATES)):
        # Gemma's template accepts no system message.
        rows = generated(1250, seed=seed, system=folder.path.name != "gemma.jinja")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder.path)
        for thinking in (True, False) if folder.template.asks_for_thinking else (None,):
            data = tmp_path / "pairs.jsonl"
            counts, _ = compare_rows(folder.path, tokenizer, rows, data, thinking)
            assert counts["same"] + counts["crossing"] == 2 * len(rows)
