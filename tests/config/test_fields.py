"""Every option of every config: its help, its effect, its default and its names."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from contextlib import suppress
from typing import Any

import pytest

from mlxtune.cli import COMMANDS
from mlxtune.cli.options import ConfigCommand
from mlxtune.config import OPTIONS, InstructConfig, InstructTrainingConfig, TrainConfig
from mlxtune.config.fields import explicit_options, field_types, flag, flag_words, options_of
from mlxtune.config.option import Effect, Section
from tests.configs import config

CONFIGS = [command.config for command in COMMANDS if isinstance(command, ConfigCommand)]
EVERY = {name: each for kind in CONFIGS for name, each in options_of(kind).items()}


def test_every_option_has_one_line_of_help() -> None:
    for kind in (*CONFIGS, InstructTrainingConfig, InstructConfig):
        for each in options_of(kind).values():
            assert each.help.endswith(".")
            assert "\n" not in each.help


# Effects of options


def test_option_that_does_not_state_what_it_affects_is_refused() -> None:
    with pytest.raises(TypeError, match="affects"):
        Section.RUN.option(1, "Does something.")  # type: ignore[call-arg]


def test_options_of_a_run_are_those_that_affect_one() -> None:
    for name, each in EVERY.items():
        assert (name in OPTIONS) or each.affects is Effect.COMMAND
    assert not any(option.affects is Effect.COMMAND for option in OPTIONS.values())


def test_option_has_one_default_for_a_run_and_its_parts() -> None:
    """The pipeline's and the trainer's configs have no defaults of their own.

    Two options of a run have a default that depends on others, and only the run knows these.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    for part in (InstructConfig, InstructTrainingConfig):
        for field in dataclasses.fields(part):
            name = field.metadata.get("name", field.name)
            assert name in ("lr", "checkpoint_dir") or field.default == defaults[name]
    assert InstructConfig().learning_rate == config().lr
    assert InstructTrainingConfig().checkpoint_dir == str(config().checkpoint_path)


def names_that_affect(affected: Effect) -> set[str]:
    return {name for name, each in OPTIONS.items() if each.affects is affected}


def test_option_roles_match_their_use_in_resume_cache_and_reports() -> None:
    assert names_that_affect(Effect.LENGTH) == {"epochs", "max_steps"}
    assert names_that_affect(Effect.INPUT) == {
        *("model_path", "data", "val_data", "init_adapter", "reward")
    }
    assert names_that_affect(Effect.PLACES) == {
        *("output", "checkpoint_dir", "cache_dir", "no_cache", "quiet", "log_every", "overwrite")
    }
    assert names_that_affect(Effect.EXECUTION) == {
        *("memory_limit", "grad_checkpoint", "trust_remote_code", "on_nonfinite"),
        *("save_every", "save_steps", "save_minutes", "keep", "profile_interval", "track"),
        *("wait", "ignore_ledger", "samples", "parallel", "allow_sleep", "pause_on_battery"),
        "other_base",
    }
    assert {name for name, each in OPTIONS.items() if each.path} == {
        *("model_path", "data", "val_data", "output", "checkpoint_dir", "cache_dir"),
        "init_adapter",
    }
    assert {name for name, each in OPTIONS.items() if each.encodes} == {
        *("format", "field", "split_at", "template", "turns", "thinking", "merge_system"),
        *("trust_remote_code", "objective", "orpo_nll"),
    }
    assert {name for name, each in OPTIONS.items() if not each.inherited} == {
        *("trust_remote_code", "cache_dir", "overwrite", "wait", "ignore_ledger"),
        *("allow_sleep", "pause_on_battery", "other_base", "auto"),
    }


def test_flag_of_an_option_is_its_name_with_hyphens() -> None:
    assert flag("max_seq_len") == "--max-seq-len"
    assert flag("lr") == "--lr"


# Given options


def test_explicit_options_are_positional_and_keyword_arguments() -> None:
    assert explicit_options(TrainConfig("m", ("d",))) == {"model_path", "data"}
    assert explicit_options(config(rank=8)) == {"model_path", "data", "rank"}


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_explicit_options_of_a_stored_config_differ_from_their_defaults(objective: str) -> None:
    first = config(objective=objective, rank=4)
    changed = {"model_path", "data", "rank", *({"objective"} if objective != "sft" else ())}
    assert explicit_options(TrainConfig(**dataclasses.asdict(first))) == changed


@pytest.mark.parametrize("name", ["rank", "lr", "val_steps", "epochs"])
def test_copy_has_the_explicit_options_of_the_original_and_of_the_change(name: str) -> None:
    """An option that was given its default is explicit in every copy, so --auto keeps it."""
    first = config(**{name: getattr(config(), name)})
    chosen = {"model_path", "data", name}
    for original in (first, pickle.loads(pickle.dumps(first)), copy.copy(first)):
        copied = dataclasses.replace(original, output="o")
        assert explicit_options(copied) == {*chosen, "output"}
        again = dataclasses.replace(copied, lr=2e-4, seed=1)
        assert explicit_options(again) == {*chosen, "output", "lr", "seed"}


def test_rate_of_none_is_the_default_of_the_objective() -> None:
    for first in (config(lr=None), dataclasses.replace(config(lr=1.0), lr=None)):
        assert (first.lr, "lr" in explicit_options(first)) == (1e-4, False)
        assert dataclasses.replace(first, objective="dpo").lr == 5e-6


# Options as words of a command


@pytest.mark.parametrize("name", OPTIONS)
def test_words_of_a_command_give_the_value_back(name: str) -> None:
    option, kind = OPTIONS[name], field_types(TrainConfig)[name]
    values: tuple[Any, ...] = (True, 3, 16.0, 0.25, "b-1.0", ("prompt=a", "b-1.0"))
    accepted = []
    for value in filter(None, (*values, *option.choices[-1:], option.choices[:2])):
        with suppress(ValueError):
            accepted += [value] if option.read(value, kind) == value else []
    assert accepted
    for value in accepted:
        words = flag_words(name, value, option)
        assert {*words[::2]} == {flag(name)}
        if texts := words[1::2]:
            assert option.read(texts if option.several else texts[0], kind) == value
        else:
            assert value is True
    assert flag_words(name, 16.0, option) == [flag(name), "16"]
