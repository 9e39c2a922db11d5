"""One step of preference training in TRL's trainers and in this package."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.data.conversation import (
    CHOSEN,
    DESIRABLE,
    MISMATCHED,
    REJECTED,
    UNDESIRABLE,
    WHOLE,
)
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import Example
from mlxtune.core.objectives.objective import SFT, Objective, with_references
from mlxtune.core.objectives.preference_rows import PreferenceRows
from tests.backend.step.executions import model_folder
from tests.interop.test_family_peft import give, parameters, tensor_of

TARGETS = ("q_proj", "v_proj", "down_proj")
RATE = 1e-3
CONFIG = InstructConfig(
    rank=4, alpha=8.0, targets=TARGETS, max_grad_norm=0.0, lr=RATE, weight_decay=0.0
)
# Seeds of the LoRA matrices, for the reference and for the policy.
REFERENCE, POLICY = 11, 12
_TRAINERS = {"dpo": "DPO", "orpo": "ORPO", "cpo": "CPO", "simpo": "CPO", "kto": "KTO"}
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Numbers:
    """The results of a step: log-probabilities by role and row, gradients by parameter."""

    loss: float
    logps: Arrays
    references: Arrays
    metrics: Mapping[str, float]
    gradients: Arrays


def pipeline(family: str, seed: int, objective: Objective = SFT) -> InstructPipeline:
    """Return a pipeline whose LoRA matrices A and B are both random."""
    made = InstructPipeline(
        load_base(model_folder(family), "float32").model, CONFIG, objective=objective
    )
    rng = np.random.default_rng(seed)
    filled = [
        (name, mx.array(0.2 * rng.standard_normal(value.shape), dtype=mx.float32))
        for name, value in tree_flatten(made.model.trainable_parameters())
    ]
    made.model.update(tree_unflatten(filled))
    return made


@cache
def sft_pipeline(family: str, seed: int) -> InstructPipeline:
    """Return a cached pipeline, which must not be trained."""
    return pipeline(family, seed)


def pairs(count: int) -> list[dict[str, Any]]:
    """Return pairs of texts of different lengths."""
    rng = np.random.default_rng(7)

    def text(words: int) -> str:
        return " ".join("".join(map(chr, rng.integers(97, 123, 3))) for _ in range(words))

    return [
        {
            "prompt": text(2 + i % 4) + ":",
            "chosen": " " + text(1 + i % 3),
            "rejected": " " + text(1 + (i + 1) % 4),
        }
        for i in range(count)
    ]


def labeled_rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 3 != 1}
        for i, row in enumerate(pairs(count))
    ]


@cache
def trainer_of(family: str, objective: str, rows: int = 6, loss: str = "") -> Any:
    """Return TRL's trainer for an objective, with the LoRA matrices of mlxtune's reference.

    TRL's own reference is a copy of these matrices. A step takes all rows as one batch.
    """
    import datasets
    import peft
    import torch
    import transformers
    import trl

    kind, folder = _TRAINERS[objective], model_folder(family)
    package = trl if hasattr(trl, f"{kind}Trainer") else None
    package = package or importlib.import_module(f"trl.experimental.{kind.lower()}")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(TARGETS), task_type="CAUSAL_LM", lora_dropout=0.0
    )
    model = peft.get_peft_model(base, lora)
    give(model, sft_pipeline(family, REFERENCE))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    args = getattr(package, f"{kind}Config")(
        str(folder / "trl"),
        per_device_train_batch_size=rows,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        remove_unused_columns=False,
        **({"loss_type": loss} if loss else {}),
    )
    return getattr(package, f"{kind}Trainer")(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(
            labeled_rows(rows) if kind == "KTO" else pairs(rows)
        ),
        processing_class=tokenizer,
    )


def batch_of(trainer: Any, rows: Iterable[int] | None = None) -> dict[str, Any]:
    """Return a batch of the given rows, or of all, from TRL's collator."""
    data = trainer.train_dataset
    batch = trainer.data_collator([data[i] for i in (range(len(data)) if rows is None else rows)])
    return dict(batch)


def examples_of(batch: Mapping[str, Any], objective: Objective) -> list[Example]:
    """Return a TRL batch as mlxtune's examples, without reference log-probabilities."""
    if "label" in batch:
        roles = [DESIRABLE if label else UNDESIRABLE for label in batch["label"].tolist()]
        answers = _examples(batch, "", batch["completion_mask"], roles)
        rows = PreferenceRows.of(Corpus.of(answers).select(), objective)
        return [example for row in rows for example in row]
    sides = []
    if "completion_mask" in batch:
        half = len(batch["input_ids"]) // 2
        for role, part in ((CHOSEN, slice(half)), (REJECTED, slice(half, None))):
            side = {key: value[part] for key, value in batch.items()}
            sides.append(_examples(side, "", side["completion_mask"], [role] * half))
    else:
        for role, side in ((CHOSEN, "chosen_"), (REJECTED, "rejected_")):
            mask = batch[f"{side}labels"] != -100
            sides.append(_examples(batch, side, mask, [role] * len(mask)))
    if objective.options.orpo_nll == "prompt":
        everything = batch["chosen_attention_mask"]
        sides.append(_examples(batch, "chosen_", everything, [WHOLE] * len(everything)))
    return [example for row in zip(*sides, strict=True) for example in row]


def _examples(
    batch: Mapping[str, Any], side: str, masks: Any, roles: Sequence[int]
) -> list[Example]:
    made, lengths = [], batch[f"{side}attention_mask"].sum(dim=1).tolist()
    for i, (length, role) in enumerate(zip(lengths, roles, strict=True)):
        tokens = batch[f"{side}input_ids"][i, :length].numpy().astype(np.int32)
        mask = masks[i, :length].numpy().astype(np.uint8)
        mask[0] = 0
        made.append(Example(i + 1, tokens, mask, role=role))
    return made


_NAMES = {
    CHOSEN: "chosen",
    REJECTED: "rejected",
    WHOLE: "whole",
    DESIRABLE: "answer",
    UNDESIRABLE: "answer",
    MISMATCHED: "mismatched",
}


def by_role(examples: Sequence[Example], values: Sequence[float]) -> Arrays:
    """Return the examples' values by role, in the order of rows."""
    found: dict[str, list[float]] = {}
    for example, value in zip(examples, values, strict=True):
        found.setdefault(_NAMES[example.role], []).append(float(value))
    return {name: np.array(each) for name, each in found.items()}


def our_step(family: str, objective: Objective, batch: Mapping[str, Any]) -> Numbers:
    examples = examples_of(batch, objective)
    references = sft_pipeline(family, REFERENCE).logps(examples)
    if objective.needs_reference:
        examples = with_references(examples, references.tolist())
    policy = pipeline(family, POLICY, objective)
    found = policy.loss_and_gradients(examples, step=3)

    metrics = found.step_loss.metrics(found.values)
    evaluated = policy.evaluate(examples)
    # Evaluation must agree with the step.
    assert abs(evaluated.avg_loss - found.loss) <= 1e-5 * max(1.0, abs(found.loss))
    assert metrics.keys() == evaluated.metrics.keys()
    gradients = {name: np.array(value) for name, value in tree_flatten(found.gradients)}
    logps = by_role(examples, policy.logps(examples).tolist())
    return Numbers(found.loss, logps, by_role(examples, references.tolist()), metrics, gradients)


def their_step(
    trainer: Any, family: str, batch: Mapping[str, Any], settings: Mapping[str, Any]
) -> Numbers:
    """Set the attributes `settings` of TRL's trainer; return the results of a step."""
    model, policy = trainer.model, sft_pipeline(family, POLICY)
    give(model, policy)
    model.train()
    model.zero_grad()
    for name, value in settings.items():
        setattr(trainer, name, value)
    for log in (getattr(trainer, "_metrics", {}), getattr(trainer, "_stored_metrics", {})):
        log.get("train", {}).clear()
    with _recorded(trainer) as passes:
        loss = trainer.compute_loss(model, dict(batch))
    loss.backward()
    gradients = {name: tensor_of(model, name).grad.numpy().T for name in parameters(policy)}
    log = trainer._metrics if hasattr(trainer, "_metrics") else trainer._stored_metrics
    metrics = {name: each[-1] for name, each in log["train"].items()}
    logps, references = _named(batch, passes)
    return Numbers(float(loss.detach()), logps, references, metrics, gradients)


@contextmanager
def _recorded(trainer: Any) -> Iterator[list[npt.NDArray[Any]]]:
    """Yield a list that collects the log-probabilities (B,) of each forward pass."""
    passes: list[npt.NDArray[Any]] = []
    if hasattr(trainer, "get_batch_logps"):  # it returns sums, or averages on request
        plain = trainer.get_batch_logps

        def logps_of(logits: Any, labels: Any, average_log_prob: bool = False, **rest: Any) -> Any:
            passes.append(plain(logits, labels, **rest).detach().numpy())
            return plain(logits, labels, average_log_prob, **rest)

        trainer.get_batch_logps = logps_of
        try:
            yield passes
        finally:
            del trainer.get_batch_logps
        return

    def record(module: Any, given: Any, output: Any) -> None:
        passes.append(output.log_probs.sum(dim=1).detach().numpy())

    handle = trainer.model.register_forward_hook(record)
    try:
        yield passes
    finally:
        handle.remove()


def _named(batch: Mapping[str, Any], passes: Sequence[npt.NDArray[Any]]) -> tuple[Arrays, Arrays]:
    """Return the policy's and the reference's log-probabilities by role."""
    if "label" in batch:  # if needed, mismatched answers run first
        half = len(passes) // 2
        names = ("mismatched", "answer")[-half:]
        policy, reference = (
            dict(zip(names, p, strict=True)) for p in (passes[:half], passes[half:])
        )
        return policy, reference
    sides = [dict(zip(("chosen", "rejected"), np.split(each, 2), strict=True)) for each in passes]
    return sides[0], sides[1] if len(sides) > 1 else {}
