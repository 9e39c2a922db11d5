"""Compare pairs with TRL's DPOTrainer: tokens, masks and log-probabilities."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlxtune.config import DataConfig
from mlxtune.core.data.conversation import CHOSEN
from mlxtune.core.data.encode import Example
from mlxtune.session.dataset import load_dataset
from mlxtune.session.reader import Reader
from tests.interop.trl_steps import REFERENCE, sft_pipeline, trainer_of

Row = dict[str, Any]
SIDES = ("chosen", "rejected")
_WORDS = (
    *("the", "quick", "user", "assistant", "I'm", "don't", "HTTP", "x", "3.14", "2026", "-1", "{}"),
    *(
        "naïve",
        "straße",
        "Ünï",
        "漢字",
        "かな",
        "한국어",
        "עברית",
        "हिन्दी",
        "🙂",
        "👩‍👩‍👧",
        "é",
        "…",
        "—",
    ),
    *("def f(x):", "return x\n", "a, b;", "https://x.org/?q=1", "$5", "#", "*", "`c`", "\t", "\\n"),
)
_SPACES = (" ",) * 12 + ("\n", "\n\n", "  ", "")
_EDGES = ("",) * 8 + ("\n", "\n\n", " ", "  ", "\t", "...\n")


def generated(count: int, *, seed: int = 0, longest: int = 40, system: bool = True) -> list[Row]:
    """Return random pairs as messages; some texts start or end with spaces or newlines."""
    rng = np.random.default_rng(seed)

    def text() -> Any:
        words = rng.choice(_WORDS, 1 + int(longest * rng.random() ** 3))
        spaces = rng.choice(_SPACES, len(words))
        inner = "".join(map("".join, zip(words, spaces, strict=True))).strip() or "x"
        return str(rng.choice(_EDGES)) + inner + str(rng.choice(_EDGES))

    rows = []
    while len(rows) < count:
        messages = [("user", text())]
        if rng.random() < 0.2:
            messages += [("assistant", text()), ("user", text())]
        if system and rng.random() < 0.3:
            messages = [("system", text()), *messages]
        chosen, rejected = text(), text()
        if chosen.strip() == rejected.strip():
            continue
        rows.append(
            {
                "prompt": [{"role": role, "content": content} for role, content in messages],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
        )
    return rows


def as_texts(row: Row) -> Row | None:
    """Return a pair with one turn as three texts; None if it has more turns."""
    if len(row["prompt"]) > 1:
        return None
    return {key: row[key][0]["content"] for key in ("prompt", *SIDES)}


def our_rows(folder: Path, rows: Sequence[Row], path: Path, **options: Any) -> list[list[Example]]:
    """Return the examples of each row, read from a file as `train` does."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    defaults = {"max_seq_len": 10**9, "val_split": 0, "no_cache": True, "objective": "dpo"}
    config = DataConfig(str(folder), str(path), **defaults | options)
    dataset = load_dataset(config, Reader(config, folder))
    assert not dataset.ledgers[0].rows_skipped, dataset.ledgers[0].rows_skipped
    found: list[list[Example]] = [[] for _ in rows]
    for example in dataset.corpus:
        found[example.row - 1].append(example)
    return found


def their_rows(tokenizer: Any, rows: Sequence[Row], **template: Any) -> list[Row]:
    """Return DPOTrainer's tokenised rows; `template` holds arguments of the chat template."""
    import datasets
    import trl

    data = datasets.Dataset.from_list([{**row, "chat_template_kwargs": template} for row in rows])
    if not template:
        data = data.remove_columns("chat_template_kwargs")
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    return list(trl.DPOTrainer._prepare_dataset(trainer, data, tokenizer, args, "train"))


def compare_rows(
    folder: Path, tokenizer: Any, rows: Sequence[Row], path: Path, thinking: bool | None = None
) -> tuple[Counter[str], list[Row]]:
    """Compare every pair's tokens and masks; raise AssertionError at the first difference.

    Both libraries must agree, unless a token crosses the start of an answer: then TRL's answer
    starts before that token, while mlxtune keeps the inference prompt. TRL also trains on the
    template's text after the end of the turn; mlxtune does not. Return the number of answers by
    kind, and the equal pairs as TRL's rows, without that text.
    """
    template = {} if thinking is None else {"enable_thinking": thinking}
    options = {} if thinking is None else {"thinking": "on" if thinking else "off"}
    ours, theirs = our_rows(folder, rows, path, **options), their_rows(tokenizer, rows, **template)
    counts, same = Counter(pairs=len(rows)), []
    for row, examples, other in zip(rows, ours, theirs, strict=True):
        prompt = _prompt(tokenizer, row, **template)
        assert len(examples) == 2, row
        both = dict(other)
        for side, example in zip(SIDES, examples, strict=True):
            assert (example.role == CHOSEN) == (side == "chosen")
            tokens, mask = example.tokens.tolist(), example.assistant_mask.tolist()
            start, end = mask.index(1), len(mask) - mask[::-1].index(1)
            assert all(mask[start:end]), row
            assert tokens[:start] == prompt, row
            whole = [*other["prompt_ids"], *other[f"{side}_ids"]]
            written, tail = tokenizer.decode(tokens[:end]), tokenizer.decode(whole)
            assert tail.startswith(written), row
            tail = tail[len(written) :]
            assert not tail.strip(), row
            counts["tails"] += bool(tail)
            if crossing := len(other["prompt_ids"]) < start:
                assert other["prompt_ids"] == prompt[: len(other["prompt_ids"])], row
            else:
                assert (tokens, len(other["prompt_ids"])) == (whole, start), row
                both[f"{side}_ids"] = tokens[start:end]
            counts["crossing" if crossing else "same"] += 1
        if len(other["prompt_ids"]) == len(prompt):
            same.append({**both, "ours": examples})
    return counts, same


def compare_texts(folder: Path, rows: Sequence[Row], path: Path, **options: Any) -> int:
    """Check that pairs give equal examples as texts and as messages; return the number of pairs."""
    texts = [(row, text) for row in rows if (text := as_texts(row))]
    messages, plain = zip(*texts, strict=True)
    both = (our_rows(folder, each, path, **options) for each in (messages, plain))
    for one, other in zip(*both, strict=True):
        for first, second in zip(one, other, strict=True):
            assert first.role == second.role
            assert first.tokens.tolist() == second.tokens.tolist()
            assert first.assistant_mask.tolist() == second.assistant_mask.tolist()
    return len(texts)


def compare_logps(family: str, same: Sequence[Row], size: int = 50) -> float:
    """Return the largest relative difference between both libraries' log-probabilities."""
    trainer, worst = trainer_of(family, "dpo"), 0.0
    keys = ("prompt_ids", "chosen_ids", "rejected_ids")
    for start in range(0, len(same), size):
        part = same[start : start + size]
        batch = trainer.data_collator([{key: row[key] for key in keys} for row in part])
        expected = [x.numpy() for x in trainer.compute_ref_log_probs(trainer.model, batch)]
        examples = [example for row in part for example in row["ours"]]
        found = sft_pipeline(family, REFERENCE).logps(examples).reshape(-1, 2).T
        worst = max(worst, float((np.abs(found - expected) / np.abs(expected)).max()))
    return worst


def _prompt(tokenizer: Any, row: Row, **template: Any) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False, **template
        )
    )
