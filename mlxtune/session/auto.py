"""Options that --auto chooses from facts about the data, the model and the machine."""

from collections.abc import Collection
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mlxtune.backend.models import loading
from mlxtune.config import DataConfig, TrainConfig
from mlxtune.core.data.inspection import cut_loss
from mlxtune.core.formatting import count, short_number
from mlxtune.core.steps import order
from mlxtune.core.training.auto import Facts, choose, command_line
from mlxtune.session.dataset import Reader, load_dataset
from mlxtune.session.memory import longest_example
from mlxtune.views.console import RunConsole

C = TypeVar("C", bound=TrainConfig)
# A number of tokens that no example exceeds.
_UNCUT = 10**9


def with_auto(
    config: C, given: Collection[str], folder: Path, console: RunConsole
) -> tuple[C, str]:
    """Return the options with --auto's choices, and the equivalent command.

    `given` names the options that the user chose. Encodes and caches the data in order to choose
    the other options. Without --auto, the command is empty.
    """
    if not config.auto:
        return config, ""
    with closing(console):
        reader = Reader(config, folder, console.on_encoding)
        dataset = load_dataset(config.part(DataConfig, max_seq_len=_UNCUT), reader)
    base = loading.open_base(folder, config.dtype, config.loading())
    own = TrainConfig.max_seq_len
    loss = cut_loss(dataset.files, own, config.cut)
    facts = Facts(
        rows=len(order.rows_of_epoch(dataset.rows.train, config.seed, 1)),
        validates=bool(dataset.rows.validation),
        parameters=base.parameters,
        needed=own if loss is None else loss.enough,
        fitting=_UNCUT,
    )
    chosen = choose(facts, config, given)
    settled = replace(config, auto=False, **chosen)
    # The longest example that fits depends on the chosen LoRA options.
    facts = replace(facts, fitting=longest_example(settled, base).recomputed)
    if (fitting := choose(facts, config, given)) != chosen:
        settled = replace(config, auto=False, **fitting)
    line = command_line(settled)
    console.say("Auto", line, copyable=True)
    reasons = (
        f"for {count(facts.rows, 'training row')}, a model of "
        f"{short_number(facts.parameters)} parameters, and supervised tokens of which 99% lie "
        f"within the first {facts.needed:,} of an example"
    )
    console.say("", reasons)
    return settled, line
