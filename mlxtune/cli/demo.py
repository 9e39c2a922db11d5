"""`mlxtune demo`."""

from pathlib import Path

from mlxtune.cli.options import config_command
from mlxtune.config import DemoConfig
from mlxtune.core.files.reading import read_text


@config_command(DemoConfig, example="mlxtune demo --output try/adapters.safetensors")
def demo(config: DemoConfig) -> None:
    """Watch a small model learn, in a minute.

    The model and its data come with mlxtune: a guest's message becomes a booking as JSON.
    """
    from mlxtune.core.reports.run_text import before_and_after, next_lines
    from mlxtune.recipes.train import train
    from mlxtune.terminal.console import RunConsole

    run = config.training()
    result = train(run)
    console = RunConsole(quiet=config.quiet)
    generated = result.evaluation and result.evaluation.generated
    for sample in generated.samples[:1] if generated else ():
        row = read_text(Path(sample.path)).splitlines()[sample.row - 1]
        for stage, line in before_and_after(row, sample):
            console.say(stage, line)
    for number, line in enumerate(next_lines(run)):
        console.say("" if number else "Next", line, copyable=True)
