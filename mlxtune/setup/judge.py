"""Whether an adapter helped: losses and answers of one model, without and with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxtune.config import TrainConfig, UseConfig
from mlxtune.errors import MlxTuneError
from mlxtune.setup.dataset import Reader
from mlxtune.setup.model import LoadedModel, load_adapted_model

if TYPE_CHECKING:
    from mlxtune.core.data.corpus import Rows
    from mlxtune.core.training.evaluation import Evaluation, Sums
    from mlxtune.terminal.console import RunConsole


from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxtune.backend.text.tokenizer import ModelTokenizer
    from mlxtune.core.data.corpus import Rows
    from mlxtune.core.training.evaluation import Evaluation, Generated
    from mlxtune.terminal.console import RunConsole


def compare(
    used: LoadedModel, rows: Rows, paths: Sequence[str], seed: int, console: RunConsole
) -> Evaluation:
    """Compute the losses of rows, whose files have these paths, without and with the adapter."""
    from mlxtune.backend.step.evaluator import Evaluator
    from mlxtune.core.training.evaluation import evaluation_of, sums_of

    evaluator = Evaluator(used.model, used.base.parameters, console.warn)

    def sums(on: bool) -> Sums:
        used.use_adapter(on)
        return sums_of(rows, evaluator.losses, progress(console, "evaluating", on))

    base = sums(False)
    adapted = None if used.adapted is None else sums(True)
    console.close()
    return evaluation_of(rows, paths, base, adapted, seed)


def judge(
    config: TrainConfig, folder: Path, rows: Rows, paths: Sequence[str], console: RunConsole
) -> Evaluation | None:
    """Say whether the adapter of a run, read back as it was written, helped on validation rows.

    It is written into the run's folder. The run has ended: what goes wrong here is a warning.
    """
    from mlxtune.core.machine.files import write_json
    from mlxtune.core.training.evaluation import verdict_line
    from mlxtune.core.training.run_folder import EVALUATION

    use = UseConfig(
        model_path=config.model_path,
        adapter=str(config.output_path),
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    try:
        found = compare(load_adapted_model(use, folder), rows, paths, config.seed, console)
        write_json(config.checkpoint_path / EVALUATION, found.as_dict())
    except MlxTuneError as problem:
        console.warn(f"the adapter is written, but not evaluated: {problem}")
        return None
    except KeyboardInterrupt:
        console.warn("the adapter is written, but not evaluated: mlxtune eval does that")
        raise
    console.say("Verdict", verdict_line(found))
    # What only shows what was found comes last: nobody has to wait for it.
    return add_samples(found, config, use, folder, rows, paths, console)


_BASE, _ADAPTED = "the base model", "the adapter"
# The longest answer at the end of a run, in tokens.
_LONGEST = 128


def answer_rows(
    used: LoadedModel,
    tokenizer: ModelTokenizer,
    rows: Rows,
    paths: Sequence[str],
    max_new_tokens: int,
    console: RunConsole,
) -> Generated:
    """Have both models answer the last turn of each row, greedily; its files have these paths."""
    from mlxtune.backend.text.generate import Sampling, answers
    from mlxtune.core.data.prompt import asked_of
    from mlxtune.core.data.text_stream import text_of
    from mlxtune.core.training.evaluation import Sample, generated_of

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
    from mlxtune.backend.model import memory
    from mlxtune.core.machine.files import write_json
    from mlxtune.core.training.run_folder import EVALUATION

    if not config.samples:
        return found
    memory.release()
    try:
        tokenizer = Reader(config, folder).tokenizer
        chosen = _some(rows, config.samples, config.seed, tokenizer)
        if not chosen:
            return found
        # Anew: for the losses, the model may have been made to compute otherwise.
        answered = answer_rows(
            load_adapted_model(use, folder), tokenizer, chosen, paths, _LONGEST, console
        )
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

    from mlxtune.core.data.corpus import Rows
    from mlxtune.core.data.prompt import asked_of

    ends = tokenizer.control_ids | tokenizer.eos_ids
    drawn = np.random.default_rng(seed).permutation(len(rows)).tolist()
    asked = (place for place in drawn if asked_of(rows[place], ends) is not None)
    return Rows(rows.corpus, [rows.indices[place] for place in sorted(islice(asked, count))])


def progress(console: RunConsole, doing: str, on: bool) -> Callable[[int, int], None]:
    """Return what shows how much is done, with the adapter or without."""
    name = _ADAPTED if on else _BASE
    return lambda done, total: console.show(f"{doing} with {name}: {done:,} of {total:,}")
