"""Options that --auto chooses from facts about the data, the model and the machine."""

import dataclasses
import math
import shlex
from collections.abc import Collection
from dataclasses import replace
from typing import Any, TypeVar

from mlxtune.config import OPTIONS, DataConfig, TrainConfig
from mlxtune.config.fields import flag_words
from mlxtune.config.objective_config import DEFAULT_RATE, default_learning_rate
from mlxtune.core.data.inspection import truncation_report
from mlxtune.core.formatting import pluralize, short_number
from mlxtune.core.steps import order
from mlxtune.core.training.schedule import count_steps
from mlxtune.session.dataset import load_rows
from mlxtune.session.memory_planning import longest_example
from mlxtune.session.session import TrainingSession

S = TypeVar("S", bound=TrainingSession[Any])

# A number of tokens that no example exceeds.
_UNLIMITED_TOKENS = 10**9
# One or two epochs hardly overfit; on small data sets, further epochs do.
_MAX_EPOCHS, _MIN_STEPS = 3, 100
_VALIDATIONS = 10
# Half of the validations: many runs improve again at the end, when the rate falls.
_PATIENCE = 5
_RANK, _ALPHA = 16, 32.0
# The rate for a model of 4 billion parameters, the power by which it rises for smaller models, and
# its bounds. The demo's model of 0.7 million parameters learns fastest at the upper bound.
_RATE, _RATE_PARAMETERS, _RATE_POWER = 2e-4, 4e9, 0.35
_MIN_RATE, _MAX_RATE = 5e-5, 5e-3


def with_auto_options(session: S) -> S:
    """Return a session with --auto's choices of options, and print the equivalent command.

    Reads the data in order to choose the other options.
    """
    config, console = session.config, session.console
    uncut = config.part(DataConfig, max_seq_len=_UNLIMITED_TOKENS)
    with session.reading():
        files, rows, _ = load_rows(uncut, session.reader, session.source)
    base = session.base
    default_length = TrainConfig.max_seq_len
    loss = truncation_report(files, default_length, config.cut)
    facts = AutoFacts(
        rows=len(order.rows_of_epoch(rows.train, config.seed, 1)),
        validates=bool(rows.validation),
        parameters=base.parameters,
        needed=default_length if loss is None else loss.enough,
        fitting=_UNLIMITED_TOKENS,
    )
    selected = choose_options(facts, config, session.explicit_options)
    # The longest example that fits depends on the selected LoRA options.
    lora = {name: selected[name] for name in ("rank", "alpha", "targets") if name in selected}
    longest = longest_example(config, base, replace(config.pipeline_config(), **lora))
    selected = choose_options(
        replace(facts, fitting=longest.recomputed), config, session.explicit_options
    )
    config = replace(config, auto=False, **selected)
    command = command_line(config)
    console.say("Auto", command, copyable=True)
    reasons = (
        f"for {pluralize(facts.rows, 'training row')}, a model of "
        f"{short_number(facts.parameters)} parameters, and 99% of the supervised tokens "
        f"within the first {facts.needed:,} of an example"
    )
    console.say("", reasons)
    return session.with_options(config, command)


@dataclasses.dataclass(frozen=True)
class AutoFacts:
    """The facts that the choice of options depends on.

    `rows` counts the training rows, and `validates` says whether there are validation rows.
    `parameters` counts the model's parameters. `needed` is the smallest round --max-seq-len that
    keeps 99% of the supervised tokens, `fitting` the length of the longest example that fits into
    memory and the model's context.
    """

    rows: int
    validates: bool
    parameters: int
    needed: int
    fitting: int


def choose_options(
    facts: AutoFacts, config: TrainConfig, explicit_options: Collection[str]
) -> dict[str, Any]:
    """Return values for the options that were not given.

    All linear projections are targets, with a higher rank than the default, which is for two
    targets. The rate falls with the size of the model. --max-seq-len keeps the answers. There are
    enough epochs to learn, but not to overfit, and ten validations choose the best adapter.
    """
    training = config.trainer_config()
    per_epoch, _ = count_steps(training, facts.rows)
    epochs = min(max(math.ceil(_MIN_STEPS / per_epoch), 1), _MAX_EPOCHS)
    if "epochs" not in explicit_options:
        training = replace(training, epochs=epochs)
    _, steps = count_steps(training, facts.rows)
    selected: dict[str, Any] = {
        "targets": ("all",),
        "rank": _RANK,
        "alpha": _ALPHA if "rank" not in explicit_options else 2.0 * config.rank,
        "lr": _rate(facts.parameters, default_learning_rate(config.objective) / DEFAULT_RATE),
        "max_seq_len": max(min(facts.needed, facts.fitting), 2),
        "epochs": epochs,
    }
    if facts.validates:
        selected |= {"val_steps": math.ceil(steps / _VALIDATIONS), "patience": _PATIENCE}
    return {name: value for name, value in selected.items() if name not in explicit_options}


def _rate(parameters: int, fraction: float) -> float:
    """Return a `fraction` of the peak rate for a model's size, to one significant digit."""
    rate = _RATE * (_RATE_PARAMETERS / max(parameters, 1)) ** _RATE_POWER
    return float(f"{fraction * min(max(rate, _MIN_RATE), _MAX_RATE):.0e}")


def command_line(config: TrainConfig) -> str:
    """Return the `train` command with these options."""
    words = ["mlxtune", "train"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in OPTIONS and value != field.default and value is not None:
            words += flag_words(field.name, value, OPTIONS[field.name])
    return shlex.join(words)
