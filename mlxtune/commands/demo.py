"""`mlxtune demo`: trains mlxtune's own small model, and shows what it has learned."""

from pathlib import Path

from mlxtune.commands.train import TrainResult, train
from mlxtune.config import DemoConfig
from mlxtune.core.files.reading import read_text
from mlxtune.session.arguments import takes_options
from mlxtune.views import run_text
from mlxtune.views.console import RunConsole


@takes_options(DemoConfig)
def demo(config: DemoConfig) -> TrainResult:
    """Train mlxtune's own small model to answer a guest's message with JSON.

    Raises the errors of `train`.
    """
    return train(config.training())


def main(config: DemoConfig) -> None:
    """Train on the demo's data, and print the answers to one question before and after training."""
    result = demo(config)
    console = RunConsole(quiet=config.quiet)
    generated = result.evaluation and result.evaluation.generated
    for sample in generated.samples[:1] if generated else ():
        row = read_text(Path(sample.path)).splitlines()[sample.row - 1]
        for stage, line in run_text.before_and_after(row, sample):
            console.say(stage, line)
    for number, line in enumerate(run_text.next_lines(config.training())):
        console.say("" if number else "Next", line, copyable=True)
