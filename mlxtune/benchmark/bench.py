"""`mlxtune bench`: both contestants take the same steps, and every run has its own process.

The result is a table and remarks.
"""

import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

from rich.console import Console

from mlxtune.backend.device import default_device
from mlxtune.backend.models import loading
from mlxtune.benchmark import peers
from mlxtune.benchmark.bench_helper import OURS, Job
from mlxtune.benchmark.result import (
    Agreement,
    Benchmark,
    BenchmarkRun,
    ContestantResult,
    Spread,
    TimedStep,
)
from mlxtune.config import BenchConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.files import processes, writing
from mlxtune.core.files.scratch import scratch_file, scratch_folder
from mlxtune.core.files.writing import check_outputs
from mlxtune.core.formatting import byte_size, pluralize, short_duration
from mlxtune.core.machine.conditions import busy
from mlxtune.core.machine.facts import versions
from mlxtune.core.steps.pack import StepLengths
from mlxtune.errors import MlxTuneError
from mlxtune.session.arguments import takes_options
from mlxtune.session.dataset import Dataset
from mlxtune.session.memory_planning import choose_plan, expected_workload, first_epoch
from mlxtune.session.prepared_run import prepare_base
from mlxtune.session.session import Session
from mlxtune.session.trained_model import await_result
from mlxtune.views.console import RunConsole
from mlxtune.views.output import print_json
from mlxtune.views.terminal import plain_table, result_console, styled

# Returns the command line of a process that runs the job in a file.
Command = Callable[[Path], list[str]]


@takes_options(BenchConfig)
def bench(config: BenchConfig) -> Benchmark:
    """Time the first steps of `train` with the same options, in mlxtune and in a peer.

    Writes the file that --json names.

    Raises a subclass of MlxTuneError for errors in options, files or the model, and MlxTuneError if
    mlxtune's own process reports an error or is killed.
    """
    with closing(RunConsole(quiet=config.quiet)) as console, prepared(config, console) as job:
        if problem := busy():
            console.warn(problem)
        result = run_benchmark(config, job, console)
    if config.json_path is not None:
        writing.make_folder(config.json_path.parent)
        writing.write_json(config.json_path, result.as_dict())
    return result


@contextmanager
def prepared(config: BenchConfig, console: RunConsole) -> Iterator[Job]:
    """Read the data, write the adapter that both contestants start from, and yield mlxtune's job.

    A peer's job differs only in `contestant_name`. No weights are read. Raises a subclass of
    MlxTuneError, such as MemoryLimitError if not even one example fits.
    """
    session = Session(config, console)
    config = session.config
    if config.json_path is not None:
        check_outputs([config.json_path], session.inputs, "--json")
    steps, count_rows = benchmark_steps(config, session.load())
    _report_work(config, steps, count_rows, console)
    with scratch_folder("bench") as scratch:
        training, adapter = config.training(config.dtype), scratch / "adapter"
        base = loading.open_base(session.folder, training.dtype, training.base_options())
        base = prepare_base(training, base, console)
        console.say("Model", base.describe())
        lengths = [StepLengths.of(step, keyed=training.dropout > 0) for step in steps]
        choose_plan(training, base, expected_workload(training, lengths), config.execution)
        peers.write_start(base, training.pipeline_config(), adapter)
        training = config.training(base.dtype)
        yield Job(OURS, session.folder, training, adapter, steps, count_rows, config.execution)


def run_benchmark(
    config: BenchConfig, job: Job, console: RunConsole, peer: tuple[str, Command] | None = None
) -> Benchmark:
    """Time the steps in mlxtune, and in the given peer or the peer of --against, if any.

    Raises MlxTuneError if mlxtune's own process reports an error or is killed.
    """
    if peer is None and config.against is not None:
        peer = config.against, helper_command
    ours, theirs = _run_in_turn(config.repeats, job, peer, console)
    return Benchmark(
        model=config.model_path,
        device=default_device.device_name(),
        dtype=job.config.dtype,
        rows=job.rows,
        examples=sum(map(len, job.steps)),
        batch_size=config.batch_size,
        ours=ours,
        theirs=theirs,
        options=asdict(config),
        versions=versions(),
    )


def main(config: BenchConfig) -> None:
    """Run the benchmark and print its table, or JSON if --json is `-`."""
    result = bench(config)
    as_json = config.json == "-"
    if as_json:
        print_json(result.as_dict())
    if not config.quiet:
        show_benchmark(result, result_console(stderr=as_json))


def benchmark_steps(config: BenchConfig, dataset: Dataset) -> tuple[list[list[Example]], int]:
    """Return the first steps of `train`'s first epoch, and the number of their rows."""
    steps = first_epoch(config.training(config.dtype), dataset)[: config.steps]
    return [dataset.rows.train.examples_of(step) for step in steps], sum(map(len, steps))


def _report_work(
    config: BenchConfig, steps: Sequence[Sequence[Example]], rows: int, console: RunConsole
) -> None:
    """Report the number of steps and tokens; warn if the data has too few rows for --steps."""
    each = [example for step in steps for example in step]
    tokens, supervised = sum(map(len, each)), sum(example.supervised for example in each)
    console.say(
        "Steps",
        f"{pluralize(len(steps), 'step')} of {pluralize(config.batch_size, 'row')}: {rows:,} rows, "
        f"{tokens:,} tokens, {supervised:,} supervised",
    )
    if len(steps) < config.steps:
        console.warn(
            f"the data has rows for {len(steps)} of {config.steps} steps: "
            "add rows or lower --batch-size to time more"
        )


def _run_in_turn(
    repeats: int, job: Job, peer: tuple[str, Command] | None, console: RunConsole
) -> tuple[ContestantResult, ContestantResult | None]:
    """Run mlxtune and the peer in turn, one process at a time, `repeats` times each.

    A peer that fails is not run again. Raises MlxTuneError if mlxtune fails.
    """
    commands: list[tuple[ContestantResult, Command]] = [(ContestantResult(OURS), helper_command)]
    if peer is not None:
        commands.append((ContestantResult(peer[0]), peer[1]))
    ours, theirs = commands[0][0], commands[1][0] if peer else None
    steps = len(job.steps)
    for repeat, (contestant, command) in product(range(1, repeats + 1), commands):
        if contestant.failed:
            continue

        def show_step(done: int, run: str = f"{contestant.name}, run {repeat}") -> None:
            console.show(f"{run}: step {done}/{steps}")

        show_step(0)
        await_result(console)
        try:
            run = _run_process(replace(job, contestant_name=contestant.name), command, show_step)
        except MlxTuneError as error:
            if contestant is ours:
                raise
            contestant.failed = str(error)
            console.warn(f"{contestant.name} failed: {error}")
            continue
        contestant.runs.append(run)
        console.say("Run", f"{repeat}/{repeats} {run_line(contestant.name, run)}")
    return ours, theirs


def _run_process(job: Job, command: Command, on_step: Callable[[int], None]) -> BenchmarkRun:
    """Run a job in a new process; `on_step` is called with the number of steps done.

    Raises MlxTuneError with the error that the process reports or, if it reports none, with its
    exit status. Raises RuntimeError if mlxtune's own process exits without a report.
    """
    path = job.adapter.with_name("job.pickle")
    writing.write_file(path, [pickle.dumps(replace(job, started=time.time()))])
    steps: list[TimedStep] = []
    with scratch_file() as errors:
        # stdin stays open without input: the helper ends when this process closes the pipe.
        process = processes.start(
            command(path),
            stdin=processes.PIPE,
            stdout=processes.PIPE,
            stderr=errors,
            environment=processes.own_environment(),
        )
        try:
            for line in process.stdout or ():
                record = json.loads(line)
                if "error" in record:
                    raise MlxTuneError(record["error"])
                if "run" in record:
                    return BenchmarkRun(steps, **record["run"])
                steps.append(TimedStep(**record["step"]))
                on_step(len(steps))
            status = process.wait()
        finally:
            processes.end(process)
        errors.seek(0)
        output = errors.read().decode(errors="replace")
    raise MlxTuneError(_describe_end(job, status, len(steps), output))


def helper_command(job: Path) -> list[str]:
    """Return the command line of the helper that runs the job in a file."""
    run = "from mlxtune.benchmark.bench_helper import main; main()"
    return processes.python("-c", run, str(job))


def _describe_end(job: Job, status: int, steps: int, output: str) -> str:
    where = f"after {steps} steps" if steps else "before its first step"
    if status < 0:
        likely = ", probably for lack of memory" if status == -9 else ""
        remedy = ": lower --batch-size or --max-seq-len" if job.contestant_name == OURS else ""
        return f"killed (signal {-status}) {where}{likely}{remedy}"
    if job.contestant_name == OURS:
        raise RuntimeError(f"the process that measures mlxtune ended {where}:\n{output}")
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    return f"exit {status} {where}: {last.strip()}"


# The result


def show_benchmark(benchmark: Benchmark, console: Console) -> None:
    """Print the title, table and remarks of a benchmark."""
    head, *rows = table(benchmark)
    title = (
        f"{benchmark.model}, {benchmark.dtype} on {benchmark.device}: "
        f"{pluralize(benchmark.steps, 'step')} of {pluralize(benchmark.batch_size, 'row')}, "
        f"{pluralize(len(benchmark.ours.runs), 'run')}"
    )
    console.print(styled(title, "bold"), soft_wrap=True)
    console.print(plain_table(head, rows))
    for line in remarks(benchmark):
        console.print(styled(line), soft_wrap=True)


def run_line(contestant: str, run: BenchmarkRun) -> str:
    """Return a line with the speed, memory and start-up time of a run."""
    step = Spread.of(step.seconds for step in run.steps).median
    return (
        f"{contestant}: {run.real_tokens_per_s:,.0f} tokens/s, {short_duration(step)} a step, "
        f"peak {byte_size(run.peak_memory)}, {short_duration(run.startup_s)} to start"
    )


def table(benchmark: Benchmark) -> list[tuple[str, ...]]:
    """Return the table's rows, the header first; with a peer, the last column has the ratios."""
    contestants = [
        contestant for contestant in (benchmark.ours, benchmark.theirs) if contestant is not None
    ]
    ratios = benchmark.ratios()
    rows = [
        (
            "",
            *(contestant.name for contestant in contestants),
            *(["ratio"] if len(contestants) > 1 else []),
        )
    ]
    for name, key, show in _QUANTITIES:
        cells = [
            show(contestant.spread(key)) if contestant.runs else "failed"
            for contestant in contestants
        ]
        ratio = _range(ratios[key], "{:#.3g}".format) if key in ratios else ""
        rows.append((name, *cells, *([ratio] if len(contestants) > 1 else [])))
    return rows


def remarks(benchmark: Benchmark) -> list[str]:
    """Return remarks on MLX's cache, on whether the losses agree, and on a peer's masked loss or
    failure.
    """
    lines = []
    if (ratio := benchmark.cache_ratio()) is not None:
        lines.append(
            f"with MLX's cache limited as in training: {ratio:.2f}x the speed of a cache that may "
            "fill the memory limit"
        )
    theirs = benchmark.theirs
    if (agreed := benchmark.agreement()) is not None:
        lines.append(agreement_line(agreed))
    if theirs is not None and theirs.runs and theirs.runs[0].loss_function == "masked":
        lines.append(
            f"{theirs.name} ran with a masked loss: its own loss supports one span per row, and "
            "some rows have several spans"
        )
    if theirs is not None and theirs.failed:
        lines.append(f"{theirs.name} failed: {theirs.failed}")
    return lines


def agreement_line(agreed: Agreement) -> str:
    """Return a line on whether the losses agree, and how far they differ."""
    if agreed.first is None or agreed.largest is None:
        return "losses do NOT agree: one is not finite"
    verdict = "agree" if agreed.losses_agree else "do NOT agree: the ratios compare different work"
    return (
        f"losses {verdict} (they differ by {agreed.first:.1e} at the first step, later by up to "
        f"{agreed.largest:.1e}; allowed: {agreed.first_tolerance:g} and {agreed.tolerance:g})"
    )


def _range(values: Spread, show: Callable[[float], str]) -> str:
    """Return the median and range, as in `2.1 s (2 s-2.3 s)`; one number if both ends are equal."""
    middle, low, high = map(show, (values.median, values.min, values.max))
    return middle if low == high else f"{middle} ({low}-{high})"


# The rows of the table: a name, a quantity, and the function that formats its spread over runs.
_QUANTITIES: tuple[tuple[str, str, Callable[[Spread], str]], ...] = (
    ("real tokens/s", "real_tokens_per_s", lambda values: f"{values.median:,.0f}"),
    ("supervised tokens/s", "supervised_tokens_per_s", lambda values: f"{values.median:,.0f}"),
    ("a step", "seconds_per_step", lambda values: _range(values, short_duration)),
    ("padding", "padding_share", lambda values: f"{values.median:.1%}"),
    ("peak memory", "peak_memory", lambda values: byte_size(values.median)),
    ("peak of the process", "peak_rss", lambda values: byte_size(values.median)),
    ("start", "startup_s", lambda values: short_duration(values.median)),
)
