"""`mlxtune inspect`: shows the data as the model will see it, without loading weights."""

import json
from collections.abc import Iterator

from mlxtune.backend.models.model_folder import find_folder
from mlxtune.config import InspectConfig, as_path
from mlxtune.core.data import findings, inspection
from mlxtune.core.data.conversation import ROLE_NAMES
from mlxtune.core.data.problems import where
from mlxtune.core.files.writing import check_outputs, make_folder, write_file
from mlxtune.errors import DataError
from mlxtune.session.arguments import takes_options
from mlxtune.session.dataset import Dataset
from mlxtune.session.reader import Reader
from mlxtune.session.session import Session
from mlxtune.views import run_text
from mlxtune.views.console import RunConsole
from mlxtune.views.inspection_view import PAGE, render_inspection, show_inspection
from mlxtune.views.output import print_json, print_line
from mlxtune.views.terminal import result_console

# The largest numbers of examples: on a page, and elsewhere (in JSON, or on a terminal, which may
# show fewer).
MAX_PAGE_EXAMPLES, MAX_OTHER_EXAMPLES = 200, 12


@takes_options(InspectConfig)
def inspect(config: InspectConfig) -> inspection.Inspection:
    """Read the data as `train` with the same options would, and return an inspection of it.

    Also writes the files that --html and --dump name.

    Raises DataError, ModelError or OutputError.
    """
    folder = find_folder(config.model_path, weights=False)
    session = Session(config, RunConsole(quiet=config.quiet), folder)
    html = None if config.html is None else as_path(config.html)
    dump = None if config.dump is None else as_path(config.dump)
    written = [path for path in (html, dump) if path is not None]
    check_outputs(written, session.inputs, "--html or --dump")
    if html is not None:
        PAGE.check_replaceable(html, "--html")
    dataset = session.dataset
    result = build(session.config, session.reader, dataset)
    for path in written:
        make_folder(path.parent)
    if html is not None:
        write_file(html, [render_inspection(result).encode()])
    if dump is not None:
        write_file(dump, dump_lines(dataset))
    return result


def main(config: InspectConfig) -> None:
    """Print the inspection. Raises DataError for data that `train` refuses."""
    result = inspect(config)
    if config.json:
        print_json(result.as_dict())
    elif config.quiet:
        console = RunConsole(quiet=True)
        for finding in result.findings:
            console.warn(run_text.finding_line(finding))
    else:
        every = result.shown if config.row is not None else None
        show_inspection(result, result_console(), examples=every)
        if config.html is not None:
            print_line(f"page: {as_path(config.html)}")
    if result.errors:
        kinds = ", ".join(finding.kind for finding in result.errors)
        raise DataError(f"train refuses this data: {kinds}")


def build(config: InspectConfig, reader: Reader, dataset: Dataset) -> inspection.Inspection:
    corpora = dataset.rows.corpora
    first = sum(corpus.num_rows for corpus in corpora[:-1])
    validates = [first + index for index in dataset.rows.validation.indices]
    examples = inspection.InspectedExamples(corpora, validates)
    skipped = findings.skip_findings(dataset.files)
    every_finding = tuple(findings.by_loss([*dataset.findings, *skipped]))
    if config.row is None:
        selected = examples.choose(
            every_finding, MAX_PAGE_EXAMPLES if config.html else MAX_OTHER_EXAMPLES
        )
    elif not (selected := examples.of_row(config.row)):
        raise DataError(why_not_shown(config.row, reader, dataset))
    return inspection.Inspection(
        model=config.model_path,
        template=dataset.template,
        thinking=config.thinking,
        turns=config.turns,
        max_seq_len=config.max_seq_len,
        batch_size=config.batch_size,
        files=tuple(ledger.as_dict() for ledger in dataset.ledgers),
        examples=len(examples.lengths),
        tokens=inspection.Distribution.of(examples.lengths),
        supervised=inspection.Distribution.of(examples.supervised),
        limits=inspection.limits(dataset.files, config.max_seq_len, config.cut),
        cost=examples.cost(config.batch_size),
        findings=every_finding,
        shown=examples.show(selected, reader.tokenizer, every_finding),
    )


def why_not_shown(row: int, reader: Reader, dataset: Dataset) -> str:
    for file in dataset.files:
        problem = reader.why_skipped(file.skipped.path, row)
        if problem is not None:
            return f"{where(file.skipped.path, row)}: {problem}; row skipped"
    paths = ", ".join(str(file.skipped.path) for file in dataset.files)
    return f"{paths} has no row {row}: --row takes the number of a row that is not blank"


def dump_lines(dataset: Dataset) -> Iterator[bytes]:
    """Yield each example that `train` would use with the same options, as a JSON line."""
    for corpus in dataset.rows.corpora:
        for example in map(corpus.shown, range(len(corpus))):
            line = {
                "path": corpus.paths[example.file],
                "row": example.row,
                "role": ROLE_NAMES[example.role],
                "tokens": example.tokens.tolist(),
                "assistant_mask": example.assistant_mask.tolist(),
            }
            yield json.dumps(line).encode() + b"\n"
