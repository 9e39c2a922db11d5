"""The table of commands: the options, function, help and example of each."""

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any

import click

from mlxtune import config as configs
from mlxtune.cli.options import Command, ConfigCommand, build_config, read_options
from mlxtune.config import DemoConfig, TrainConfig, as_path
from mlxtune.errors import ConfigError


def _command(
    name: str,
    function: str | Callable[..., Any],
    help: str,
    example: str,
    *params: click.Parameter,
    config: type | None = None,
    argument: str | None = None,
    common: Sequence[str] = (),
) -> click.Command:
    """Return a command that calls a function, whose result False means exit status 1.

    A function that loads mlx is given by name, because --help must not load mlx. A function given
    by name gets the config built from flags and a file, if the command has a config; a callable
    gets the flags and the path of the file. The config's field `argument` becomes a positional
    argument. `common` names the options that --help shows, if it leaves others to --help-all.
    """

    def run(**values: Any) -> Any:
        named = resolve_name(str(function))
        if config is None:
            return named(**values)
        return named(build_config(config, values.pop("config"), values))

    callback = function if callable(function) else run
    every: dict[str, Any] = {"callback": callback, "help": help, "epilog": f"Example: {example}"}
    # main() reads --debug from the arguments.
    debug = click.Option(
        ["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error."
    )
    if config is None:
        return Command(name, params=[*params, debug], **every)
    file = _option("--config -c", "YAML or TOML file of options; flags win.", type=click.Path())
    every |= {"config": config, "argument": argument, "common": common}
    return ConfigCommand(name, params=[*params, file, debug], **every)


def _option(names: str, help: str, **settings: Any) -> click.Option:
    return click.Option(names.split(), help=help, **settings)


def _flag(names: str, help: str) -> click.Option:
    return _option(names, help, is_flag=True)


def _train(
    config: str | None, dry_run: bool, resume: str | None, open_page: bool, **flags: Any
) -> None:
    """Start a run, or resume one with its recorded options, changed by the given options."""
    if resume is None:
        from mlxtune.session.arguments import resolve_options

        options = resolve_options(build_config(TrainConfig, config, flags))
    else:
        from mlxtune.session.resuming import find_run

        changes, problems = read_options(TrainConfig, config, flags)
        if problems:
            raise ConfigError(problems)
        options = find_run(resume, changes)

    from mlxtune.commands.train import RunMode, run_training

    observers = []
    if open_page:
        from mlxtune.watch.server import PageOpener

        observers = [PageOpener(options.config.checkpoint_path)]
    run_training(options, RunMode(dry_run=dry_run, observers=observers, live=open_page))


def _doctor(prove: bool, share: str | None, as_json: bool, **under_launch: Any) -> bool:
    """Check this machine or, with `prove`, training on it; return whether no check failed."""
    if share is not None and not prove:
        raise ConfigError(["--share writes the result of --prove: pass both"])
    if prove:
        from mlxtune.diagnosis.prove import main as prove_main

        return prove_main(as_json=as_json, anonymous=None if share is None else as_path(share))
    from mlxtune.diagnosis.doctor import main

    return main(as_json=as_json, **under_launch)


_JSON = _flag("--json as_json", "Print JSON for programs.")
_RUN = click.Argument(["run"], metavar="RUN", type=click.Path())
_MOVED_MODEL = _option(
    "--model-path", "Folder of the base model, if it has moved.", default="", type=click.Path()
)
# The options of training that most people need first.
_COMMON = (
    *("model_path", "data", "val_data", "output", "max_seq_len", "rank", "epochs", "lr"),
    *("batch_size", "quantize", "auto", "resume"),
)
# In the order of --help.
COMMANDS: tuple[click.Command, ...] = (
    _command(
        "demo",
        "mlxtune.commands.demo:main",
        "Watch a small model learn, in a minute.\n\n"
        "The model and its data come with mlxtune: a guest's message becomes a booking as JSON.",
        "mlxtune demo --output try/adapters.safetensors",
        config=DemoConfig,
    ),
    _command(
        "doctor",
        _doctor,
        "Check whether training works on this machine, and how fast.\n\n"
        "Under mlx.launch, check all machines and the network between them. Each problem comes "
        "with its remedy. The exit code is 1 if training is impossible or, with --prove, if a "
        "result is wrong.",
        "mlxtune doctor; mlxtune doctor --prove",
        _flag(
            "--prove",
            "Train small models here for a minute or two, and check that the results are right.",
        ),
        _option(
            "--share",
            "With --prove: write the result, without names or paths, to a file for others to see.",
            metavar="FILE",
            is_flag=False,
            flag_value="mlxtune-proof.json",
        ),
        _option(
            "--model-path",
            "Under mlx.launch: check that all machines have this model.",
            metavar="PATH",
        ),
        _option(
            "--data",
            "Under mlx.launch: check that all machines have this data; may be repeated.",
            metavar="PATH",
            multiple=True,
        ),
        _JSON,
    ),
    _command(
        "inspect",
        "mlxtune.commands.inspect:main",
        "Show the data as the model will see it, and problems in it.",
        "mlxtune inspect --model-path data/demo-qwen3 --data data/bookings.jsonl",
        config=configs.InspectConfig,
    ),
    _command(
        "plan",
        "mlxtune.commands.plan:main",
        "Predict the memory, steps and time of a run.\n\nNo weights are read.",
        "mlxtune plan --model-path data/demo-qwen3 --data data/bookings.jsonl",
        config=configs.PlanConfig,
    ),
    _command(
        "train",
        _train,
        "Train a LoRA adapter on chat data.",
        "mlxtune train --model-path data/demo-qwen3 --data data/bookings.jsonl",
        _option(
            "--resume",
            "Resume the run in a folder with its saved options; default: the checkpoint folder.",
            is_flag=False,
            flag_value="",
            metavar="[DIR]",
            type=click.Path(),
        ),
        _flag("--dry-run", "Stop before the first step, and print the plan."),
        _flag("--open open_page", "Open the live page of mlxtune watch in the browser."),
        config=TrainConfig,
        common=_COMMON,
    ),
    _command(
        "reward",
        "mlxtune.commands.reward:main",
        "Try rewards on rows and answers before training with them.\n\n"
        "A reward is a function reward(prompt, completion, row) in a Python file, which runs in a "
        "separate process with limits, or a built-in comparison with the row's answer. The exit "
        "code is 1 if an answer has no reward.",
        "mlxtune reward json contains=0.5 --data data/bookings.jsonl",
        config=configs.RewardConfig,
        argument="reward",
    ),
    _command(
        "watch",
        "mlxtune.watch.server:main",
        "Watch runs on a live page in the browser.\n\n"
        "Shows a run, in progress or finished, or the runs of a folder side by side: curves, "
        "memory, time left, where every row went, and a button that stops and saves. After a run, "
        "ask its model questions, with and without the adapter. The page is served on this machine "
        "alone, until it has been closed for ten minutes and no run is in progress.",
        "mlxtune watch out",
        click.Argument(["folder"], metavar="FOLDER", type=click.Path()),
    ),
    _command(
        "eval",
        "mlxtune.commands.evaluate:main",
        "Measure whether an adapter helped on held-out data.\n\n"
        "Compares the loss with and without the adapter on the same rows, with a confidence "
        "interval.",
        "mlxtune eval --model-path data/demo-qwen3 --adapter . --data data/bookings_test.jsonl",
        config=configs.EvalConfig,
    ),
    _command(
        "generate",
        "mlxtune.commands.generate:main",
        "Answer a prompt or a conversation.\n\n"
        "The model sees the input exactly as in training. Without --prompt or --messages, "
        "standard input is read.",
        "mlxtune generate --model-path data/demo-qwen3 --adapter . "
        "--prompt 'A table for two, Sunday at noon. Ida Park'",
        config=configs.GenerateConfig,
    ),
    _command(
        "chat",
        "mlxtune.commands.chat:chat",
        "Chat with a model in the terminal.\n\n"
        "/base and /adapter switch between models; /save keeps the conversation as training data.",
        "mlxtune chat --model-path data/demo-qwen3 --adapter .",
        config=configs.ChatConfig,
    ),
    _command(
        "serve",
        "mlxtune.serve.serving:main",
        "Serve a base model and its adapters over HTTP.\n\n"
        "Programs ask in the protocol of the OpenAI API, and name an adapter or `base` as the "
        "model; prompts are those of training. Ctrl-C finishes the answers that have begun.",
        "mlxtune serve out; mlxtune serve out/a out/b --name best=out/c/checkpoints/best",
        config=configs.ServeConfig,
        argument="adapters",
    ),
    _command(
        "report",
        "mlxtune.commands.report:main",
        "Write an HTML page that shows a run or compares several.\n\n"
        "The page shows curves, the plan, the data, sample answers and options.",
        "mlxtune report out; mlxtune report out/a out/b --html both.html",
        click.Argument(
            ["runs"], metavar="RUN [RUN]...", type=click.Path(), nargs=-1, required=True
        ),
        _option(
            "--html",
            "Page to write; default: report.html in the run's folder, or comparison.html for "
            "several runs.",
            type=click.Path(),
        ),
        _flag("--json as_json", "Print JSON; write a page only with --html."),
    ),
    _command(
        "runs",
        "mlxtune.commands.runs:main",
        "List the runs below a folder with their results.\n\n"
        "By default, lists the runs below the current folder.",
        "mlxtune runs; mlxtune runs ~/adapters --sort val",
        click.Argument(["folders"], metavar="[DIR]...", type=click.Path(), nargs=-1),
        _option(
            "--sort",
            "Order of the runs: newest, name, lowest loss (val, train), fastest or longest first.",
            type=click.Choice(["when", "name", "val", "train", "speed", "steps"]),
            default="when",
            show_default=True,
        ),
        _flag(
            "--remove",
            "Remove the runs in these folders with their checkpoints; keep their adapters.",
        ),
        _flag("--yes", "Remove without asking."),
        _JSON,
    ),
    _command(
        "verify",
        "mlxtune.commands.verify:main",
        "Check the files of a run, and its adapters against the model.\n\n"
        "The exit code is 1 if a check fails.",
        "mlxtune verify out --replay",
        _RUN,
        _flag("--replay", "Train again from the first checkpoint, and compare the results."),
        _MOVED_MODEL,
        _option(
            "--reward",
            "With --replay: reward of a run that another user made; may be repeated.",
            multiple=True,
            metavar="REWARD",
        ),
        _JSON,
    ),
    _command(
        "fuse",
        "mlxtune.commands.fuse:main",
        "Merge an adapter into its base model.\n\n"
        "Writes a model folder that needs no adapter, and checks that the merged model gives the "
        "same logits as the model with the adapter.",
        "mlxtune fuse --adapter out --output fused-model",
        config=configs.FuseConfig,
    ),
    _command(
        "export",
        "mlxtune.commands.export:main",
        "Convert an adapter for mlx-lm, PEFT, llama.cpp or Ollama.\n\n"
        "The result is loaded again and must give the same logits as the trained model.",
        "mlxtune export --format gguf --adapter out --output for-ollama",
        config=configs.ExportConfig,
    ),
    _command(
        "import",
        "mlxtune.commands.import_adapter:main",
        "Convert an adapter of mlx-lm or PEFT, to use or train it here.",
        "mlxtune import their-peft-adapter --model-path data/demo-qwen3 --output ours",
        config=configs.ImportConfig,
        argument="adapter",
    ),
    _command(
        "push",
        "mlxtune.commands.push:main",
        "Upload a run's adapter with a model card to Hugging Face.\n\n"
        "Shows the card and the files, and asks before uploading. Uploads neither data nor paths.",
        "mlxtune push out me/bookings --dry-run",
        _RUN,
        click.Argument(["repository"], metavar="OWNER/NAME"),
        _flag("--public", "Make the repository public; default: private."),
        _option(
            "--base-model",
            "The base model's name on Hugging Face, if the adapter was trained from a local "
            "folder.",
            default="",
            metavar="OWNER/NAME",
        ),
        _MOVED_MODEL,
        _flag("--yes", "Upload without asking."),
        _flag("--dry-run", "Show the card and the files, and stop."),
    ),
    _command(
        "bench",
        "mlxtune.benchmark.bench:main",
        "Time training steps and measure their memory on your data.\n\n"
        "--against times another trainer on the same steps, in separate processes.",
        "mlxtune bench --model-path data/demo-qwen3 --data data/bookings.jsonl --against mlx-lm",
        config=configs.BenchConfig,
    ),
)
