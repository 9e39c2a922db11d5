"""The recipe of `mlxtune eval`, and of the end of `train`: whether the adapter helped.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxtune.config import EvalConfig, TrainConfig, UseConfig
from mlxtune.dataset import Reader, load_dataset
from mlxtune.errors import MlxTuneError, printable
from mlxtune.samples import add_samples, answer_rows, progress
from mlxtune.using import Used, find_model, load_model, load_used

if TYPE_CHECKING:
    from mlxtune.console import RunConsole
    from mlxtune.core.corpus import Corpus, Rows
    from mlxtune.core.evaluation import Evaluation, Sums


def evaluate(config: EvalConfig) -> Evaluation:
    """Compare a base model with its adapter on the supervised tokens of every row of the data.

    Raises a child of MlxTuneError for what options, files or the model cause.
    """
    from mlxtune.backend import forward
    from mlxtune.console import RunConsole
    from mlxtune.core import report
    from mlxtune.train import say_findings

    folder = find_model(config)
    reading = config.reading(data=_data_files(config))
    forward.load_ahead(folder)
    with closing(RunConsole(quiet=config.quiet)) as console:
        reader = Reader(reading, folder, console.on_encoding)
        dataset = load_dataset(reading, reader)
        say_findings(dataset, console)
        for ledger in dataset.ledgers:
            console.say("Data", report.evaluated_line(ledger))
        if _was_trained_on(config, dataset.corpus):
            console.warn("the adapter was trained on these rows: new ones show what it is worth")
        used = load_model(config, folder, console)
        rows, paths = dataset.corpus.select(), [ledger.path for ledger in dataset.ledgers]
        # Before the losses, for which the model may be made to compute otherwise.
        generated = None
        if config.generate:
            longest = config.max_new_tokens
            generated = answer_rows(used, reader.tokenizer, rows, paths, longest, console)
        return replace(compare(used, rows, paths, config.seed, console), generated=generated)


def show(config: EvalConfig) -> None:
    """Print what `evaluate` finds: lines, or JSON."""
    from mlxtune.core.evaluation_report import evaluation_lines

    found = evaluate(config)
    if config.json:
        json.dump(found.as_dict(), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return
    for line in evaluation_lines(found):
        print(printable(line))


def compare(
    used: Used, rows: Rows, paths: Sequence[str], seed: int, console: RunConsole
) -> Evaluation:
    """Compute the losses of rows, whose files have these paths, without and with the adapter."""
    from mlxtune.backend.evaluator import Evaluator
    from mlxtune.core.evaluation import evaluation_of, sums_of

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
    from mlxtune.core.evaluation import verdict_line
    from mlxtune.core.files import write_json
    from mlxtune.core.run_folder import EVALUATION

    use = UseConfig(
        model_path=config.model_path,
        adapter=str(config.output_path),
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    try:
        found = compare(load_used(use, folder), rows, paths, config.seed, console)
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


def _was_trained_on(config: EvalConfig, corpus: Corpus) -> bool:
    """Tell whether the run that gave the adapter, where it is there, had this data."""
    from mlxtune.backend.adapted import find_adapter
    from mlxtune.core.checkpoint import BEST
    from mlxtune.core.files import read_json

    if config.adapter is None:
        return False
    folder = find_adapter(config.adapter).parent
    for path in (folder, folder / "checkpoints" / BEST):
        with suppress(OSError, ValueError):
            return read_json(path / "metadata.json").get("data_hash") == corpus.data_hash()
    return False


def _data_files(config: EvalConfig) -> tuple[str, ...]:
    """Return the files to evaluate: of a folder, its test file, or else its validation file."""
    from mlxtune.core.datafiles import held_out_file

    files = (Path(data).expanduser() for data in config.data)
    return tuple(str(held_out_file(path) if path.is_dir() else path) for path in files)
