"""Answers of a model without and with its adapter, side by side with those of the data.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxtune.config import TrainConfig, UseConfig
from mlxtune.dataset import Reader
from mlxtune.errors import MlxTuneError
from mlxtune.using import Used, load_used

if TYPE_CHECKING:
    from mlxtune.backend.tokenizer import ModelTokenizer
    from mlxtune.console import RunConsole
    from mlxtune.core.corpus import Rows
    from mlxtune.core.evaluation import Evaluation, Generated

_BASE, _ADAPTED = "the base model", "the adapter"
# The longest answer at the end of a run, in tokens.
_LONGEST = 128


def answer_rows(
    used: Used,
    tokenizer: ModelTokenizer,
    rows: Rows,
    paths: Sequence[str],
    max_new_tokens: int,
    console: RunConsole,
) -> Generated:
    """Have both models answer the last turn of each row, greedily; its files have these paths."""
    from mlxtune.backend.generate import Sampling, answers
    from mlxtune.core.evaluation import Sample, generated_of
    from mlxtune.core.prompt import asked_of
    from mlxtune.core.text_stream import text_of

    ends = tokenizer.control_ids | tokenizer.eos_ids
    found = [(place, asked_of(row, ends)) for place, row in enumerate(rows)]
    asked = [(place, each) for place, each in found if each is not None]
    if not asked:
        console.warn("no row has a prompt and a whole answer: nothing is generated")
    prompts = [each.prompt for _, each in asked]
    sampling = Sampling(max_new_tokens=max_new_tokens)

    def generated(on: bool) -> list[str]:
        used.use_adapter(on)
        tell = progress(console, "answering", on)
        return answers(used.model, tokenizer, prompts, sampling, used.base.vocab_size, tell)

    base = generated(False)
    adapted = None if used.adapted is None else generated(True)
    samples = []
    for i, (place, each) in enumerate(asked):
        file, row = rows.corpus.place_of(rows.indices[place])
        samples.append(
            Sample(
                path=paths[file],
                row=row,
                prompt=text_of(tokenizer.spell(each.prompt.ids)),
                expected=text_of(tokenizer.spell(each.answer)),
                base=base[i],
                adapted=None if adapted is None else adapted[i],
            )
        )
    return generated_of(samples, adapted=adapted is not None)


def add_samples(
    found: Evaluation,
    config: TrainConfig,
    use: UseConfig,
    folder: Path,
    rows: Rows,
    paths: Sequence[str],
    console: RunConsole,
) -> Evaluation:
    """Return an evaluation with answers to a few of its rows, which is written for the run's page.

    What goes wrong here is a warning, and Ctrl-C leaves them out: the run has its verdict.
    """
    from mlxtune.backend import memory
    from mlxtune.core.files import write_json
    from mlxtune.core.run_folder import EVALUATION

    if not config.samples:
        return found
    memory.release()
    try:
        tokenizer = Reader(config, folder).tokenizer
        chosen = _some(rows, config.samples, config.seed, tokenizer)
        if not chosen:
            return found
        # Anew: for the losses, the model may have been made to compute otherwise.
        answered = answer_rows(load_used(use, folder), tokenizer, chosen, paths, _LONGEST, console)
        found = replace(found, generated=answered)
        write_json(config.checkpoint_path / EVALUATION, found.as_dict())
        console.say("Samples", answered.describe())
    except MlxTuneError as problem:
        console.warn(f"no samples of answers: {problem}")
    except KeyboardInterrupt:
        console.warn("interrupted: no samples of answers; mlxtune eval --generate gives them")
    finally:
        console.close()
    return found


def _some(rows: Rows, count: int, seed: int, tokenizer: ModelTokenizer) -> Rows:
    """Return so many rows that have a prompt and a whole answer, drawn by the seed, in order."""
    from itertools import islice

    import numpy as np

    from mlxtune.core.corpus import Rows
    from mlxtune.core.prompt import asked_of

    ends = tokenizer.control_ids | tokenizer.eos_ids
    drawn = np.random.default_rng(seed).permutation(len(rows)).tolist()
    asked = (place for place in drawn if asked_of(rows[place], ends) is not None)
    return Rows(rows.corpus, [rows.indices[place] for place in sorted(islice(asked, count))])


def progress(console: RunConsole, doing: str, on: bool) -> Callable[[int, int], None]:
    """Return what shows how much is done, with the adapter or without."""
    name = _ADAPTED if on else _BASE
    return lambda done, total: console.show(f"{doing} with {name}: {done:,} of {total:,}")
