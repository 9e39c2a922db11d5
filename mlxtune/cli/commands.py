"""The table of commands: the options, function, help and example of each."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, config_option, debug_option, given, merged
from mlxtune.config import (
    BenchConfig,
    ChatConfig,
    DemoConfig,
    EvalConfig,
    ExportConfig,
    FuseConfig,
    GenerateConfig,
    ImportConfig,
    InspectConfig,
    PlanConfig,
    TrainConfig,
    as_path,
)
from mlxtune.core.files.reading import read_text
from mlxtune.errors import ConfigError


def _from_config(
    name: str,
    kind: type,
    function: str | Callable[..., None],
    help: str,
    example: str,
    *own: click.Option,
    argument: str | None = None,
) -> ConfigCommand:
    """Return a command that calls a function with a config, built from flags and a file.

    A function is named, because most load mlx and --help must not. A callable gets the flags, the
    command's `own` too, and the path of the file. The field `argument` is not a flag.
    """

    def run(config: str | None, **flags: Any) -> None:
        resolve_name(str(function))(merged(kind, config, flags))

    return ConfigCommand(
        name,
        config=kind,
        argument=argument,
        callback=function if callable(function) else run,
        help=help,
        epilog=f"Example: {example}",
        params=[*own, config_option, debug_option],
    )


def _from_params(
    name: str,
    function: str | Callable[..., bool],
    help: str,
    example: str,
    *params: click.Parameter,
) -> click.Command:
    """Return a command that calls a function with its params, and exits with 1 on False."""

    def run(**values: Any) -> None:
        called = function if callable(function) else resolve_name(function)
        if called(**values) is False:
            raise click.exceptions.Exit(1)

    return click.Command(
        name,
        callback=run,
        help=help,
        epilog=f"Example: {example}",
        params=[*params, debug_option],
    )


def _demo(config: str | None, **flags: Any) -> None:
    """Train on the demo's data, and print the answers before and after."""
    from mlxtune.commands.train import train
    from mlxtune.views.console import RunConsole
    from mlxtune.views.run_text import before_and_after, next_lines

    options = merged(DemoConfig, config, flags)
    run = options.training()
    result = train(run)
    console = RunConsole(quiet=options.quiet)
    generated = result.evaluation and result.evaluation.generated
    for sample in generated.samples[:1] if generated else ():
        row = read_text(Path(sample.path)).splitlines()[sample.row - 1]
        for stage, line in before_and_after(row, sample):
            console.say(stage, line)
    for number, line in enumerate(next_lines(run)):
        console.say("" if number else "Next", line, copyable=True)


def _train(config: str | None, dry_run: bool, resume: str | None, **flags: Any) -> None:
    """Start a run, or resume one with its own options and those given."""
    if resume is None:
        checked, point = merged(TrainConfig, config, flags), None
    else:
        from mlxtune.commands.prepare.resuming import find_run

        changes, problems = given(TrainConfig, config, flags)
        if problems:
            raise ConfigError(problems)
        checked, point = find_run(resume, changes)

    from mlxtune.commands.train import train

    train(checked, dry_run=dry_run, resume=point)


def _doctor(prove: bool, share: str | None, as_json: bool, **under_launch: Any) -> bool:
    """Check this machine or, with `prove`, what it computes; return whether all is fine."""
    if share is not None and not prove:
        raise ConfigError(["--share is the result of --prove: give both"])
    if prove:
        from mlxtune.diagnosis.prove import show as show_proofs

        return show_proofs(as_json=as_json, share=None if share is None else as_path(share))
    from mlxtune.diagnosis.doctor import show

    return show(as_json=as_json, **under_launch)


_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON for programs.")
_RUN = click.Argument(["run"], metavar="RUN", type=click.Path())
_MOVED_MODEL = click.Option(
    ["--model-path"],
    default="",
    type=click.Path(),
    help="Folder of the base model, if it has moved.",
)
# In the order of --help.
COMMANDS: tuple[click.Command, ...] = (
    _from_config(
        "demo",
        DemoConfig,
        _demo,
        "Watch a small model learn, in a minute.\n\n"
        "The model and its data come with mlxtune: a guest's message becomes a booking as JSON.",
        "mlxtune demo --output try/adapters.safetensors",
    ),
    _from_params(
        "doctor",
        _doctor,
        "Check whether training works on this machine, and how fast.\n\n"
        "Under mlx.launch, check all machines and the network between them. Each problem comes "
        "with its remedy. The exit code is 1 if training is impossible or, with --prove, if "
        "something is not as it should be.",
        "mlxtune doctor; mlxtune doctor --prove",
        click.Option(
            ["--prove"],
            is_flag=True,
            help="Train small models here for a minute or two, and compare with what should come "
            "out.",
        ),
        click.Option(
            ["--share"],
            metavar="FILE",
            is_flag=False,
            flag_value="mlxtune-proof.json",
            help="With --prove: write the result to a file without names or paths, for others to "
            "see.",
        ),
        click.Option(
            ["--model-path"],
            metavar="PATH",
            help="Under mlx.launch: check that all machines have this model.",
        ),
        click.Option(
            ["--data"],
            metavar="PATH",
            multiple=True,
            help="Under mlx.launch: check that all machines have this data; may be repeated.",
        ),
        _JSON,
    ),
    _from_config(
        "inspect",
        InspectConfig,
        "mlxtune.commands.inspect:show",
        "Show the data as the model will see it, and its problems.",
        "mlxtune inspect --model-path data/demo-qwen3 --data data/bookings.jsonl",
    ),
    _from_config(
        "plan",
        PlanConfig,
        "mlxtune.commands.plan:show",
        "Predict the memory, steps and time of a run.\n\nNo weights are read.",
        "mlxtune plan --model-path data/demo-qwen3 --data data/bookings.jsonl",
    ),
    _from_config(
        "train",
        TrainConfig,
        _train,
        "Train a LoRA adapter on chat data.",
        "mlxtune train --model-path data/demo-qwen3 --data data/bookings.jsonl",
        click.Option(
            ["--resume"],
            is_flag=False,
            flag_value="",
            metavar="[DIR]",
            type=click.Path(),
            help="Resume the run in a folder with its saved options; default: the checkpoint "
            "folder.",
        ),
        click.Option(
            ["--dry-run"], is_flag=True, help="Stop before the first step, and print the plan."
        ),
    ),
    _from_config(
        "eval",
        EvalConfig,
        "mlxtune.commands.evaluate:show",
        "Measure whether an adapter helped on held-out data.\n\n"
        "Compares the loss with and without it on the same rows, with a confidence interval.",
        "mlxtune eval --model-path data/demo-qwen3 --adapter . --data data/bookings_test.jsonl",
    ),
    _from_config(
        "generate",
        GenerateConfig,
        "mlxtune.commands.generate:show",
        "Answer a prompt or a conversation.\n\n"
        "The model sees it exactly as training shows it. Without --prompt or --messages, standard "
        "input is read.",
        "mlxtune generate --model-path data/demo-qwen3 --adapter . "
        "--prompt 'A table for two, Sunday at noon. Ida Park'",
    ),
    _from_config(
        "chat",
        ChatConfig,
        "mlxtune.commands.chat:chat",
        "Chat with a model in the terminal.\n\n"
        "/base and /adapter switch between models; /save keeps the conversation as training data.",
        "mlxtune chat --model-path data/demo-qwen3 --adapter .",
    ),
    _from_params(
        "report",
        "mlxtune.commands.report:show",
        "Write an HTML page about a run, or comparing several.\n\n"
        "It shows curves, the plan, the data, sample answers and options.",
        "mlxtune report out; mlxtune report out/a out/b --html both.html",
        click.Argument(
            ["runs"], metavar="RUN [RUN]...", type=click.Path(), nargs=-1, required=True
        ),
        click.Option(
            ["--html"],
            type=click.Path(),
            help="Page to write; default: report.html in the run's folder, comparison.html for "
            "several.",
        ),
        click.Option(
            ["--json", "as_json"], is_flag=True, help="Print JSON; the page only with --html."
        ),
    ),
    _from_params(
        "runs",
        "mlxtune.commands.runs:show",
        "List the runs below a folder with their results.\n\n"
        "Without a folder, those below the current one.",
        "mlxtune runs; mlxtune runs ~/adapters --sort val",
        click.Argument(["folders"], metavar="[DIR]...", type=click.Path(), nargs=-1),
        click.Option(
            ["--sort"],
            type=click.Choice(["when", "name", "val", "train", "speed", "steps"]),
            default="when",
            show_default=True,
            help="Order of the runs: newest, name, lowest loss (val, train), fastest or longest "
            "first.",
        ),
        click.Option(
            ["--remove"],
            is_flag=True,
            help="Remove the runs in these folders with their checkpoints, but for their adapters.",
        ),
        click.Option(["--yes"], is_flag=True, help="Remove without asking."),
        _JSON,
    ),
    _from_params(
        "verify",
        "mlxtune.commands.verify:show",
        "Check the files of a run, and its adapters against the model.\n\n"
        "The exit code is 1 if a check fails.",
        "mlxtune verify out --replay",
        _RUN,
        click.Option(
            ["--replay"],
            is_flag=True,
            help="Train again from the first checkpoint, and compare.",
        ),
        _MOVED_MODEL,
        _JSON,
    ),
    _from_config(
        "fuse",
        FuseConfig,
        "mlxtune.commands.fuse:show",
        "Merge an adapter into its base model.\n\n"
        "Writes a model folder that needs no adapter, and checks that it gives the same logits.",
        "mlxtune fuse --adapter out --output fused-model",
    ),
    _from_config(
        "export",
        ExportConfig,
        "mlxtune.commands.export:show",
        "Convert an adapter for mlx-lm, PEFT, llama.cpp or Ollama.\n\n"
        "The result is loaded again and must give the same logits as the trained model.",
        "mlxtune export --format gguf --adapter out --output for-ollama",
    ),
    _from_config(
        "import",
        ImportConfig,
        "mlxtune.commands.import_adapter:show",
        "Convert an adapter of mlx-lm or PEFT, to use or train it here.",
        "mlxtune import their-peft-adapter --model-path data/demo-qwen3 --output ours",
        argument="adapter",
    ),
    _from_params(
        "push",
        "mlxtune.commands.push:show",
        "Upload a run's adapter with a model card to Hugging Face.\n\n"
        "It shows both first, and asks. Neither data nor paths are uploaded.",
        "mlxtune push out me/bookings --dry-run",
        _RUN,
        click.Argument(["repository"], metavar="OWNER/NAME"),
        click.Option(
            ["--public"], is_flag=True, help="Make the repository public; default: private."
        ),
        click.Option(
            ["--base-model"],
            default="",
            metavar="OWNER/NAME",
            help="The base model on Hugging Face, if it was trained from another folder.",
        ),
        _MOVED_MODEL,
        click.Option(["--yes"], is_flag=True, help="Upload without asking."),
        click.Option(["--dry-run"], is_flag=True, help="Show the card and the files, and stop."),
    ),
    _from_config(
        "bench",
        BenchConfig,
        "mlxtune.benchmark.bench:show",
        "Time training steps and measure their memory on your data.\n\n"
        "--against times another trainer on the same steps, in separate processes.",
        "mlxtune bench --model-path data/demo-qwen3 --data data/bookings.jsonl --against mlx-lm",
    ),
)
