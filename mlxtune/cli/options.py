"""Click options from the fields of a config, and a config from flags and a file."""

import dataclasses
import difflib
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from mlxtune.config import as_path
from mlxtune.config.fields import (
    Checked,
    Option,
    Section,
    every_option,
    field_types,
    flag,
    options_of,
)
from mlxtune.errors import ConfigError, shorten

Config = TypeVar("Config", bound=Checked)
# A message names no more unknown options.
_MAX_NAMED = 10


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
            shell_complete=_complete,
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


def _complete(_: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete paths and choices, which are mere text to click because the config checks them."""
    metavar = param.metavar or ""
    if metavar in ("PATH", "FILE", "DIR"):
        return [CompletionItem(incomplete, type="file")]
    words = metavar.split("|") if "|" in metavar else []
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.metadata["option"].required:
        return "  [required]"
    if field.default is None or field.default is False or field.default == ():
        return ""
    default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"  [default: {default:g}]" if isinstance(default, float) else f"  [default: {default}]"


class ConfigCommand(click.Command):
    """A command with an option for each field of a config, and help in sections.

    The field `argument` is an argument instead of an option.
    """

    def __init__(self, *args: Any, config: type, argument: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.config = config
        fields = (each for each in config_options(config) if each.name != argument)
        self.params = [*fields, *self.params]
        if argument is not None:
            place = click.Argument([argument], metavar="PATH", type=click.Path(), required=False)
            self.params.insert(0, place)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options section by section; the command's own close the last."""
        sections: dict[Section, list[tuple[str, str]]] = {section: [] for section in Section}
        fields = options_of(self.config)
        for each in self.get_params(ctx):
            section = fields[each.name].section if each.name in fields else Section.RUN
            if isinstance(each, click.Option) and (record := each.get_help_record(ctx)):
                sections[section].append(record)
        for section, rows in sections.items():
            if rows:
                with formatter.section(section.value):
                    formatter.write_dl(rows)


def merged(kind: type[Config], config: str | None, flags: dict[str, Any]) -> Config:
    """Build a config from a file and flags; flags win. Raises ConfigError, all problems in it."""
    options, problems = given(kind, config, flags)
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


def given(
    kind: type, config: str | None, flags: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the options in a file and flags, unchecked, and a problem for each unknown one."""
    options, problems = ({}, []) if config is None else load_config_file(as_path(config), kind)
    return options | {k: v for k, v in flags.items() if v not in (None, ())}, problems


def load_config_file(path: Path, config: type) -> tuple[dict[str, Any], list[str]]:
    """Read options from a YAML or TOML file; keys are field names, with `-` or `_`.

    Returns the options of `config`, and a problem for each unknown option. Options of other
    commands are ignored, so that one file serves all.

    Raises ConfigError when the file cannot be read.
    """
    # Loads yaml, which most commands do without.
    from mlxtune.config.files import read_config_file

    own, every = options_of(config), every_option()
    options, unknown = {}, []
    for key, value in read_config_file(path).items():
        name = str(key).replace("-", "_")
        if name in own:
            options[name] = value
        elif name not in every:
            unknown.append(key)
    problems = [_unknown(path, key, own) for key in unknown[:_MAX_NAMED]]
    if more := len(unknown) - len(problems):
        problems.append(f"--config {path} has {more:,} more that are no options")
    return options, problems


def _unknown(path: Path, key: Any, own: dict[str, Option]) -> str:
    close = difflib.get_close_matches(str(key)[:60].replace("-", "_"), own, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"--config {path} has no option {shorten(str(key))}{hint}"
