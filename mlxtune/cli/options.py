"""Click options from the fields of a config, and a config from flags and a file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mlxtune.config import load_config_file
from mlxtune.config.fields import Checked, Option, field_types, flag
from mlxtune.config.options import SECTIONS
from mlxtune.errors import ConfigError

Config = TypeVar("Config", bound=Checked)


def config_options(config: type) -> list[click.Option]:
    """Return a click option for each field of a config.

    Values stay text, or None if not given: the config converts and checks all of them at once.
    """
    types = field_types(config)
    return [
        click.Option(
            [flag(field.name)],
            is_flag=types[field.name] is bool,
            multiple=field.metadata["option"].several,
            default=None,
            metavar=_metavar(field.metadata["option"], types[field.name]),
            help=field.metadata["option"].help + _default_text(field),
        )
        for field in dataclasses.fields(config)
    ]


def _metavar(option: Option, annotation: Any) -> str | None:
    if option.choices:
        return "|".join(option.choices)
    if annotation is bool:
        return None
    kinds = {"int": "N", "int | None": "N", "float": "X"}
    return option.metavar or kinds.get(str(getattr(annotation, "__name__", annotation)), "PATH")


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.metadata["option"].required:
        return "  [required]"
    if field.default is None or field.default is False or field.default == ():
        return ""
    default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"  [default: {default:g}]" if isinstance(default, float) else f"  [default: {default}]"


# main() reads --debug from the arguments.
_DEBUG: dict[str, Any] = {
    "is_flag": True,
    "expose_value": False,
    "help": "Show the traceback of an error.",
}
debug_option = click.option("--debug", **_DEBUG)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


class ConfigCommand(click.Command):
    """A command with an option for each field of a config, and help in sections."""

    def __init__(self, *args: Any, config: type, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = config
        shared: list[click.Parameter] = [
            click.Option(
                ["--config"], metavar="PATH", help="YAML or TOML file of options; flags win."
            ),
            click.Option(["--debug"], **_DEBUG),
        ]
        self.params = [*config_options(config), *self.params, *shared]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options section by section; those of the command itself close the last."""
        records = {option.name: option.get_help_record(ctx) for option in self.get_params(ctx)}
        names = {
            section: [name for name in options if name in records]
            for section, options in SECTIONS.items()
        }
        # An option's name in OPTIONS may differ from its flag.
        for field in dataclasses.fields(self.config):
            if (name := field.metadata["name"]) != field.name:
                for section, options in SECTIONS.items():
                    names[section] = [each for each in names[section] if each != field.name]
                    names[section] += [field.name] if name in options else []
        known = {name for members in names.values() for name in members}
        names["Run"].extend(str(name) for name in records if name not in known)
        for section, members in names.items():
            if rows := [row for name in members if (row := records[name])]:
                with formatter.section(section):
                    formatter.write_dl(rows)


def config_command(
    kind: type[Config],
    *,
    example: str,
    name: str | None = None,
    cls: type[ConfigCommand] = ConfigCommand,
) -> Callable[[Callable[[Config], None]], click.Command]:
    """Make a command of a function of a config, which is built from flags and a file."""

    def decorate(run: Callable[[Config], None]) -> click.Command:
        def callback(config: str | None, **flags: Any) -> None:
            run(merged(kind, config, flags))

        return cls(
            name or run.__name__,
            config=kind,
            callback=callback,
            help=run.__doc__,
            epilog=f"Example: {example}",
        )

    return decorate


def merged(kind: type[Config], config: str | None, flags: dict[str, Any]) -> Config:
    """Build a config from a file and flags; flags win. Raises ConfigError, all problems in it."""
    options, problems = _read_options(kind, config, flags)
    if "init_adapter" in options:
        # Loads mlx, which --help must not.
        from mlxtune.backend.adapters.initialise import with_adapter

        options = with_adapter(options)
    try:
        checked = kind(**options)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return checked


def given(kind: type[Config], config: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the options in a file and flags, unchecked. Raises ConfigError for unknown options."""
    options, problems = _read_options(kind, config, flags)
    if problems:
        raise ConfigError(problems)
    return options


def _read_options(
    kind: type[Config], config: str | None, flags: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {}
    problems: list[str] = []
    if config is not None:
        options, problems = load_config_file(Path(os.path.expanduser(config)), kind)  # noqa: PTH111
    return options | {k: v for k, v in flags.items() if v not in (None, ())}, problems
