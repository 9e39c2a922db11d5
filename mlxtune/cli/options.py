"""Turns the fields of a config into click options, and flags and a file into a config."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from mlxtune.config import as_path
from mlxtune.config.fields import (
    CheckedConfig,
    every_option,
    field_types,
    flag,
    flags_of,
    options_of,
)
from mlxtune.config.known_names import COMMAND_HINTS, EQUIVALENTS, as_entry, as_flag, suggestion
from mlxtune.config.option import Option, Section
from mlxtune.errors import ConfigError, shorten

Config = TypeVar("Config", bound=CheckedConfig)
_HELP_ALL = "--help-all"
# The maximum number of unknown options that a message names.
_MAX_NAMED_OPTIONS = 10


def config_options(config: type) -> list[click.Option]:
    """Return a click option for each field of a config.

    Values stay text, or None if not given, because the config converts and checks them together.
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
    kinds = {"int": "N", "int | None": "N", "float": "X", "float | None": "X"}
    return option.metavar or kinds.get(str(getattr(annotation, "__name__", annotation)), "PATH")


def _complete(_: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete paths and choices, which are plain text for click."""
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


class Command(click.Command):
    """A command that recognises options of other tools and of our other commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; report all options of other tools at once, with our equivalents."""
        problems = [] if ctx.resilient_parsing else list(self._unknown_options(args))
        if problems:
            raise click.UsageError("; ".join(problems), ctx)
        try:
            if not ctx.resilient_parsing:
                self._check_given_once(ctx, args)
            return super().parse_args(ctx, [*args])  # which empties its list
        except click.UsageError as error:
            if not error.message.startswith("Got unexpected extra argument"):
                raise
            remedy = f"write an option before each value{self._option_hint(error.message)}"
            if listed := self._comma_hint(args):
                remedy = f"use {listed}"
            raise click.UsageError(f"{error.message}: {remedy}; see --help", ctx) from error

    def _check_given_once(self, ctx: click.Context, args: list[str]) -> None:
        """Raise UsageError for options that take one value and have several, and name them all."""
        _, _, parameters = self.make_parser(ctx).parse_args([*args])
        times = Counter(each for each in parameters if isinstance(each, click.Option))
        problems = [
            f"{each.opts[0]} is given {'twice' if count == 2 else f'{count} times'}: keep one"
            for each, count in times.items()
            if count > 1 and not each.multiple and not each.is_flag
        ]
        if problems:
            raise click.UsageError("; ".join(problems), ctx)

    def _option_hint(self, message: str) -> str:
        """Return a hint at the option that may be missing before an extra argument."""
        kind, _, typed = message.partition(" (")
        value = typed.removesuffix(")")
        value = value.split(" ")[0] if kind.endswith("arguments") else value
        folder = as_path(value).is_dir()
        names = ("--adapter", "--data") if folder else ("--prompt", "--data", "--adapter")
        option_names = {name for param in self.params for name in param.opts}
        option = next((name for name in names if name in option_names), "")
        return f", such as {as_flag(_field_name(option), value)}" if option else ""

    def _comma_hint(self, args: list[str]) -> str:
        """Return the option whose names are arguments of their own, with commas between them."""
        lists = {name for each in self.params if "," in str(each.metavar) for name in each.opts}
        for at, name in enumerate(args):
            values = list(takewhile(lambda value: not value.startswith("-"), args[at + 1 :]))
            if name in lists and len(values) > 1:
                return as_flag(_field_name(name), ",".join(value.strip(",") for value in values))
        return ""

    def _unknown_options(self, args: list[str]) -> Iterator[str]:
        """Yield a suggestion for each unknown option, if any of them has an equivalent in mlxtune.

        An option with choices but no value, as other tools allow, counts as unknown.
        """
        own = {name: each for each in self.params for name in each.opts}
        options = {_field_name(name): each for name, each in own.items() if name.startswith("--")}
        flags = {name for name, each in options.items() if getattr(each, "is_flag", False)}
        left, answered = list(args), False
        unknown: list[str] = []
        while left and left[0] != "--":
            name, equals, value = left.pop(0).partition("=")
            if not name.startswith("--") or name in ("--help", "--debug"):
                continue
            param = own.get(name)
            choices = str(param.metavar) if param else ""
            if "|" in choices and not equals and (not left or left[0].startswith("--")):
                answered, shown = True, "on" if "|on" in choices else choices
                unknown.append(f"{name} needs a value: {name} {shown}")
                continue
            if not equals and left and _takes_next(param, left[0]):
                value = left.pop(0)
            if param is None:
                plain = _field_name(name)
                elsewhere = COMMAND_HINTS.get((str(self.name), plain))
                answered |= plain in EQUIVALENTS or plain in options or elsewhere is not None
                end = suggestion(plain, value or None, options, as_flag, flags)
                unknown.append(f"unknown option {name}{f': {elsewhere}' if elsewhere else end}")
        yield from unknown if answered else ()


def _field_name(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


class ConfigCommand(Command):
    """A command with an option for each field of a config, and help in sections.

    The field `argument` is a positional argument instead of an option, or several arguments if the
    field is a tuple. If `common` names options,
    --help shows only these, and --help-all shows all.
    """

    def __init__(
        self,
        *args: Any,
        config: type,
        argument: str | None = None,
        common: Sequence[str] = (),
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.config, self.common = config, common
        if common:
            show_all = click.Option(
                [_HELP_ALL],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show all options and exit.",
            )
            self.params.append(show_all)
        fields = (
            config_option
            for config_option in config_options(config)
            if config_option.name != argument
        )
        self.params = [*fields, *self.params]
        if argument is not None:
            several = options_of(config)[argument].several
            name = options_of(config)[argument].metavar or "PATH"
            path_argument = click.Argument(
                [argument],
                metavar=f"[{name}]..." if several else name,
                type=click.Path(),
                nargs=-1 if several else 1,
                required=False,
            )
            self.params.insert(0, path_argument)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section; options outside the config are in the section RUN."""
        shown = () if _HELP_ALL in ctx.meta else self.common
        sections: dict[Section, list[tuple[str, str]]] = {section: [] for section in Section}
        fields = options_of(self.config)
        for param in self.get_params(ctx):
            if shown and param.name not in shown and not param.is_eager:
                continue
            section = fields[param.name].section if param.name in fields else Section.RUN
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                sections[section].append(record)
        for section, rows in sections.items():
            if rows:
                with formatter.section(section.value):
                    formatter.write_dl(rows)


def _show_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from mlxtune.views.output import print_line

        ctx.meta[_HELP_ALL] = True
        for line in ctx.get_help().splitlines():
            print_line(line)
        ctx.exit()


def _takes_next(param: click.Parameter | None, following: str) -> bool:
    """Return whether an option, None if unknown, takes the next argument as its value."""
    if isinstance(param, click.Option) and param.is_flag:
        return False
    required = isinstance(param, click.Option) and not isinstance(param.flag_value, str)
    return required or not following.startswith("--")


def build_config(kind: type[Config], config: str | None, flags: dict[str, Any]) -> Config:
    """Build a config from a file and flags; flags win. Raises ConfigError with all problems."""
    options, problems = read_options(kind, config, flags)
    try:
        checked = kind(**options)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return checked


def read_options(
    kind: type, config: str | None, flags: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the unchecked options from a file and flags, and a problem for each unknown option."""
    options: dict[str, Any] = {}
    problems: list[str] = []
    if config is not None:
        say = (lambda title, lines: None) if flags.get("quiet") else _print_notes
        options, problems = load_config_file(as_path(config), kind, say)
    return options | {k: v for k, v in flags.items() if v not in (None, ())}, problems


def _print_notes(title: str, lines: Sequence[str]) -> None:
    from mlxtune.backend.workers.environment import launched_worker
    from mlxtune.views.console import RunConsole

    console = RunConsole(quiet=launched_worker() > 0)
    console.say("Config", title)
    for line in lines:
        console.say("", line)


def load_config_file(
    path: Path,
    config: type,
    say: Callable[[str, Sequence[str]], None] = lambda title, lines: None,
) -> tuple[dict[str, Any], list[str]]:
    """Read options from a YAML or TOML file; keys are field names, with `-` or `_`.

    Returns the options of `config`, and a problem for each unknown option. Options of other
    commands are ignored, so that one file serves all commands. For a file of mlx-lm, `say` gets a
    title and lines that explain its entries.

    Raises ConfigError when the file cannot be read.
    """
    # This import loads yaml, which few commands need.
    from mlxtune.config.config_file import is_mlx_lm_file, read_config_file, translate

    own, every = options_of(config), every_option()
    entries, problems = read_config_file(path), []
    if is_mlx_lm_file(entries, every):
        translated = translate(entries)
        say(f"{path} is for mlx-lm; its entries, and what they become:", translated.lines)
        entries = translated.options
        problems = [f"--config {path}: {problem}" for problem in translated.problems]
    options: dict[str, Any] = {}
    unknown = []
    for key, value in entries.items():
        name = str(key).replace("-", "_")
        if name in own:
            options[name] = value
        elif name not in every:
            unknown.append((str(key), value))
    problems += [
        f"--config {path} has no option {shorten(key)}"
        + suggestion(key, value, own, as_entry, flags_of(config))
        for key, value in unknown[:_MAX_NAMED_OPTIONS]
    ]
    if (more := len(unknown) - _MAX_NAMED_OPTIONS) > 0:
        problems.append(f"--config {path} has {more:,} more unknown options")
    return options, problems
