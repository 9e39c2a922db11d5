"""`mlxtune eval`: measures whether an adapter helps on rows of data."""

import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial

import numpy as np

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.forward import operations
from mlxtune.config import DataConfig, EvalConfig
from mlxtune.config.objective_config import REWARD_OBJECTIVES, ObjectiveConfig, RewardedConfig
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.evaluation.outcome import Evaluation
from mlxtune.core.evaluation.verdict import JudgedRows
from mlxtune.core.objectives.objective import Objective
from mlxtune.core.run.stored_run import get_mapping
from mlxtune.core.run.trained_rows import NO_ROWS
from mlxtune.session.arguments import ResolvedOptions, takes_resolved
from mlxtune.session.judge import (
    answer_sample,
    compare_losses,
    losses_and_answers,
    measure_adapter,
)
from mlxtune.session.session import Session
from mlxtune.session.trained_model import (
    READING_OPTIONS,
    UseSession,
    initial_adapter,
    trained_rows_of,
)
from mlxtune.views import run_text
from mlxtune.views.console import RunConsole, print_stages
from mlxtune.views.output import print_json
from mlxtune.views.run_text import evaluation_lines


@takes_resolved(EvalConfig)
def evaluate(options: ResolvedOptions[EvalConfig]) -> Evaluation:
    """Compare a base model without and with its adapter on the supervised tokens of the data.

    With `against`, compares the adapter with another one instead; without it, with the adapter
    that its training started from, if any, as at the end of a run. With `reward`, compares
    rewards of answers instead of losses. Leaves out rows that an adapter was trained on,
    and with `reward` also rows whose prompts it was trained on, if they are known, unless no other
    rows are left. Of rows that say the same, only the first counts.

    Raises a subclass of MlxTuneError for errors in options, files or the model.
    """
    config, names = options.config, options.explicit_options
    if config.reward:
        # The adapter's own objective does not matter.
        config = replace(config, objective=REWARD_OBJECTIVES[0])
        names |= {field.name for field in fields(ObjectiveConfig)}
    with closing(RunConsole(quiet=config.quiet)) as console:
        use = UseSession(config, console, names)
        objective = Objective.of(use.config)
        others = other_adapters(use)
        reading = use.config.data_config()
        session = Session(reading, console, use.folder, held_out=True)
        operations.load_ahead(use.folder)
        if config.reward:
            console.say("Rewards", ", ".join(config.reward))
        elif trained := _rewards_behind(use.adapter):
            flags = " ".join(f"--reward {shlex.quote(each)}" for each in trained)
            console.say("Rewards", f"trained with {flags}: give them for a verdict by rewards")
        elif not objective.is_sft:
            source = "" if "objective" in names else ", as in training"
            console.say("Objective", f"{objective.description}{source}")
        if changed := run_text.changed_options(config, use.config, READING_OPTIONS):
            console.say("Reading", f"{changed}, as in training")
        dataset = session.load()
        for ledger in dataset.ledgers:
            console.say("Data", run_text.evaluated_line(ledger))
        judged = judged_rows(use, session, dataset.rows.train, others)
        if judged.only_trained:
            console.warn("these are training rows of the adapter: evaluate it on new ones")
        if config.reward:
            return _by_rewards(use, session, judged, others)
        start = None
        for other in others:
            console.say("Against", str(other.path))
            measure = partial(losses_and_answers, use, judged.rows, session.reader, objective)
            start = measure_adapter(use.config, other, use.folder, measure)
        loaded = use.load()
        generated = None
        if config.generate:
            longest, texts = config.max_new_tokens, start.answers if start else None
            generated = answer_sample(
                loaded, session.reader, judged.rows, longest, console, config.match, texts
            )
        sums = start.sums if start else None
        evaluation = compare_losses(
            loaded, judged, config.seed, console, start=sums, objective=objective
        )
        return replace(evaluation, generated=generated)


def _by_rewards(
    use: UseSession[EvalConfig],
    session: Session[DataConfig],
    judged: JudgedRows,
    others: Sequence[AdapterFile],
) -> Evaluation:
    """Compare the rewards of the adapter's answers with another one's, or the base model's."""
    # Only these evaluations import the rewards.
    from mlxtune.session.rewarding import RewardSession

    start = None
    with RewardSession(session, use.config.part(RewardedConfig)) as rewards:
        for other in others:
            use.console.say("Against", str(other.path))
            measure = partial(rewards.measure, judged.rows)
            start = measure_adapter(use.config, other, use.folder, measure)
        return rewards.compare(use.load(), judged, start, len(judged.rows))


def _rewards_behind(adapter: AdapterFile | None) -> Sequence[str]:
    """Return the rewards that an adapter was trained by. They may name code, so none is run."""
    config = {} if adapter is None else get_mapping(adapter.origin.metadata, "config")
    rewards = config.get("reward")
    return [*map(str, rewards)] if isinstance(rewards, list) else []


def other_adapters(use: UseSession[EvalConfig]) -> list[AdapterFile]:
    """Return the adapter to compare with, if any: --against, or the one that training started from.

    Raises ModelError.
    """
    if use.adapter is None:
        return []
    if use.config.against is not None:
        return [AdapterFile.find(use.config.against, "--against")]
    initial = initial_adapter(use.adapter, use.console.warn)
    return [] if initial is None else [initial]


def judged_rows(
    use: UseSession[EvalConfig],
    session: Session[DataConfig],
    rows: CorpusRows,
    others: Sequence[AdapterFile],
) -> JudgedRows:
    """Return the rows to evaluate, without those that the adapters were trained on."""
    adapters = [other for other in (use.adapter, *others) if other is not None]
    trained = [trained_rows_of(adapter, rows, use.console.warn) for adapter in adapters]
    trained_rows = np.unique(np.concatenate([NO_ROWS, *trained]))
    text_hash, by_prompt = session.reader.text_hash, bool(use.config.reward)
    judged = JudgedRows.of(rows, trained_rows, text_hash=text_hash, by_prompt=by_prompt)
    unknown = not all(map(len, trained))
    return replace(judged, unknown_rows=unknown, against=use.config.against)


def main(config: EvalConfig) -> None:
    evaluation = evaluate(config)
    if config.json:
        print_json(evaluation.as_dict())
        return
    print_stages(evaluation_lines(evaluation), evaluation)
