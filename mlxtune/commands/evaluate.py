"""`mlxtune eval`: measures whether an adapter helps on rows of data."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from mlxtune.backend.forward import operations
from mlxtune.config import EvalConfig
from mlxtune.core.data.sources.datafiles import held_out_file
from mlxtune.core.evaluation.outcome import Evaluation
from mlxtune.core.evaluation.verdict import JudgedRows
from mlxtune.core.objectives.objective import Objective
from mlxtune.core.run.trained_rows import NO_ROWS, rows_behind
from mlxtune.session.arguments import Resolved, takes_resolved
from mlxtune.session.judge import answer_rows, compare_losses
from mlxtune.session.session import Session
from mlxtune.session.trained_model import UseSession
from mlxtune.views import run_text
from mlxtune.views.console import RunConsole, print_stages
from mlxtune.views.output import print_json
from mlxtune.views.run_text import evaluation_lines


@takes_resolved(EvalConfig)
def evaluate(options: Resolved[EvalConfig]) -> Evaluation:
    """Compare a base model without and with its adapter on the supervised tokens of the data.

    Leaves out rows that the adapter was trained on, if the adapter's run recorded them, unless no
    other rows are left.

    Raises a subclass of MlxTuneError for errors in options, files or the model.
    """
    config, given = options.config, options.given
    with closing(RunConsole(quiet=config.quiet)) as console:
        use = UseSession(config, console, given)
        reading = use.config.reading(data=_data_files(config))
        session = Session(reading, console, use.folder, held_out=True)
        objective = Objective.of(use.config)
        operations.load_ahead(use.folder)
        if not objective.is_sft:
            source = "" if "objective" in given else ", as in training"
            console.say("Objective", f"{objective.description}{source}")
        dataset = session.load()
        for ledger in dataset.ledgers:
            console.say("Data", run_text.evaluated_line(ledger))
        trained = NO_ROWS
        if use.adapter is not None:
            trained = rows_behind(use.adapter.path, console.warn)
        judged = JudgedRows.of(dataset.rows.train, trained)
        if judged.only_trained:
            console.warn("the adapter was trained on these rows: evaluate it on new ones")
        loaded, generated = use.load(), None
        if config.generate:
            longest = config.max_new_tokens
            generated = answer_rows(
                loaded, session.reader.tokenizer, judged.rows, longest, console, config.match
            )
        evaluation = compare_losses(loaded, judged, config.seed, console, objective=objective)
        return replace(evaluation, generated=generated)


def show(config: EvalConfig) -> None:
    evaluation = evaluate(config)
    if config.json:
        print_json(evaluation.as_dict())
        return
    print_stages(evaluation_lines(evaluation))


def _data_files(config: EvalConfig) -> tuple[str, ...]:
    """Return the files to evaluate: for a folder, its test file or else its validation file."""
    files = (Path(data).expanduser() for data in config.data)
    return tuple(str(held_out_file(path) if path.is_dir() else path) for path in files)
