"""Configs, whose fields are options: flags, files and Python go through the same conversion."""

import dataclasses
import functools
import inspect
import operator
import os
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from mlxtune.config.known_names import EQUIVALENTS, unknown_keyword
from mlxtune.config.known_names import flag as flag
from mlxtune.config.option import Option
from mlxtune.errors import ConfigError

# The heading of the fields in a config's docstring.
FIELDS = "Fields:"


def flag_value(value: Any) -> str:
    """Return an option's value, of a flag that is given once, as the command line takes it."""
    if isinstance(value, tuple):
        return ",".join(map(flag_value, value))
    # A whole number needs no decimals; a name may end in them.
    return str(value).removesuffix(".0" * isinstance(value, float))


def flag_words(name: str, value: Any, option: Option) -> list[str]:
    """Return the words of a command that set an option to a value."""
    if value is True:
        return [flag(name)]
    values = value if option.several and isinstance(value, tuple) else (value,)
    return [word for each in values for word in (flag(name), flag_value(each))]


def as_path(text: str) -> Path:
    """Return the path that an option names, with `~` and `~name` expanded."""
    # Unlike Path.expanduser, this leaves unknown user names unchanged.
    return Path(os.path.expanduser(text))  # noqa: PTH111


def reuse_option(
    config: type, name: str, default: Any = dataclasses.MISSING, help: str = "", **changes: Any
) -> Any:
    """Reuse an option of another config as a field, with another default or help, if given.

    `changes` replace other fields of Option.
    """
    field = next(each for each in dataclasses.fields(config) if each.name == name)
    option = field.metadata["option"]
    option = dataclasses.replace(option, help=help or option.help, **changes)
    default = field.default if default is dataclasses.MISSING else default
    return dataclasses.field(default=default, metadata={"option": option})


def document(config: type) -> None:
    """Add the help text of each field to the docstring of a config, for help()."""
    lines = [
        f"    {field.name}: {field.metadata['option'].help}"
        + (f" Default: {field.default!r}." if field.default not in (None, "", ()) else "")
        for field in dataclasses.fields(config)
    ]
    config.__doc__ = "\n".join([inspect.cleandoc(config.__doc__ or ""), "", FIELDS, *lines])


def options_of(config: type) -> dict[str, Option]:
    return {field.name: field.metadata["option"] for field in dataclasses.fields(config)}


def field_types(config: type) -> dict[str, Any]:
    return typing.get_type_hints(config)


def flags_of(config: type) -> frozenset[str]:
    """Return the names of the options that need no value on the command line."""
    return frozenset(name for name, kind in field_types(config).items() if kind is bool)


def check_names(config: type, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if any of the named options is not in the config."""
    own, flags = options_of(config), flags_of(config)
    problems = [
        unknown_keyword(name, value, own, flags) + _other_config_hint(name, own)
        for name, value in options.items()
        if name not in own
    ]
    if problems:
        raise ConfigError(problems)


def read_option(config: type, name: str, value: Any) -> Any:
    """Return the value of an option in its type. Raises ConfigError."""
    try:
        return options_of(config)[name].read(value, field_types(config)[name])
    except ValueError as problem:
        raise ConfigError([f"{flag(name)} {problem}"]) from problem


def _other_config_hint(name: str, own: Mapping[str, Option]) -> str:
    """Return the end of a message on another tool's option: which config has our equivalent."""
    equivalent = EQUIVALENTS.get(name)
    ours = [our.partition("=")[0] for our in equivalent.ours] if equivalent else []
    if any(option in own for option in ours):
        return ""
    places = [
        (kind.__name__, option)
        for option in ours
        for kind in _configs()
        if option in options_of(kind)
    ]
    # Most options are options of training.
    place = next((each for each in places if each[0] == "TrainConfig"), next(iter(places), None))
    return f", but {place[0]} has {place[1]}" if place else ""


_Part = TypeVar("_Part")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedConfig:
    """A dataclass that converts and checks its fields, and reports every problem in one error."""

    # The options that nobody chose, with their values. No field, so no option and in no record;
    # but `dataclasses.replace` passes it to the copy, beside every option.
    _unset: dataclasses.InitVar[Mapping[str, Any] | None] = None

    # Names that the constructor still accepts for programs that pass them: of options that no
    # longer exist, and of options by their new names.
    ignored: typing.ClassVar[tuple[str, ...]] = ()
    former: typing.ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *values: Any, **options: Any) -> Self:
        """Report unknown options before Python does. Raises ConfigError."""
        cls._check_former(options)
        options = {cls.former.get(name, name): value for name, value in options.items()}
        others = (*cls.ignored, "_unset")
        check_names(cls, {k: value for k, value in options.items() if k not in others})
        config = super().__new__(cls)
        positional = [field.name for field in dataclasses.fields(cls) if not field.kw_only]
        passed = frozenset([*positional[: len(values)], *options])
        vars(config)["_passed"] = passed
        return config

    @classmethod
    def _check_former(cls, options: Mapping[str, Any]) -> None:
        """Raise ConfigError if an option is given by both of its names."""
        # `dataclasses.replace` passes every field, beside the changes.
        if "_unset" not in options:
            both = [(old, new) for old, new in cls.former.items() if {old, new} <= options.keys()]
            if both:
                raise ConfigError(
                    [f"{old} is the former name of {new}: pass only one" for old, new in both]
                )

    def __post_init__(self, unset: Mapping[str, Any] | None, *_: object) -> None:
        names = self._names_without_choice(unset)
        for name in names:
            object.__setattr__(self, name, self.default_of(name))
        self._convert()
        object.__setattr__(self, "_unset", {name: getattr(self, name) for name in names})

    def _names_without_choice(self, unset: Mapping[str, Any] | None) -> list[str]:
        """Return the names of the options that nobody chose, here or, as `unset`, for a copy."""
        every = options_of(type(self))
        explicit = vars(self).pop("_passed")
        if unset is None and explicit >= every.keys():  # as from a stored config
            unset = {name: self.default_of(name) for name in every}
        if unset is not None:
            explicit = {n for n in every if n not in unset or getattr(self, n) != unset[n]}
        return [name for name in every if name not in explicit or self._is_left_out(name)]

    def _is_left_out(self, name: str) -> bool:
        """Return whether an option is None instead of the default that other options decide."""
        declared = getattr(type(self), name)
        return getattr(self, name) is declared is None and self.default_of(name) is not None

    def _convert(self) -> None:
        """Convert and check the options. Raises ConfigError."""
        problems: list[str] = []
        types = field_types(type(self))
        for field in dataclasses.fields(self):
            option: Option = field.metadata["option"]
            if (value := getattr(self, field.name)) == "" and self.is_resolved_later(field.name):
                continue
            try:
                if value is None and option.required:
                    raise ValueError(option.missing)
                if value is None and field.default not in (None, "", ()):
                    raise ValueError(f"is empty: leave it out for its default, {field.default}")
                value = option.read(value, types[field.name])
            except ValueError as problem:
                missing = option.argument and str(problem) == option.missing
                named = f"name {option.argument}" if missing else f"{flag(field.name)} {problem}"
                problems.append(named)
            else:
                object.__setattr__(self, field.name, value)
        if not problems:
            own = (vars(kind).get("contradictions") for kind in reversed(type(self).__mro__))
            problems = [problem for check in own if check for problem in check(self)]
        if problems:
            raise ConfigError(problems)

    def contradictions(self) -> Iterator[str]:
        """Yield conflicts between values that are valid alone; each class yields its options'."""
        yield from ()

    def is_resolved_later(self, name: str) -> bool:
        """Return whether another option leads to the value of a required one."""
        return False

    def default_of(self, name: str) -> Any:
        """Return the value of an option that nobody chose."""
        return getattr(type(self), name)

    def part(self, kind: type[_Part], **changes: Any) -> _Part:
        """Return a `kind` with the options that it shares with this config, and with `changes`.

        For a value of None, `kind` keeps its default.
        """
        return part_of(vars(self), kind, **changes)


def part_of(options: Mapping[str, Any], kind: type[_Part], **changes: Any) -> _Part:
    """Return a `kind` with the options that it has too; see `CheckedConfig.part`."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    shared = {name: options[name] for name in names if options.get(name) is not None}
    return kind(**shared | changes)


_Config = TypeVar("_Config", bound="CheckedConfig")


def former_names(**names: str) -> Callable[[type[_Config]], type[_Config]]:
    """Accept and expose options under their former names; `names` maps old to new."""

    def accept(config: type[_Config]) -> type[_Config]:
        init = config.__init__

        @functools.wraps(init)
        def translating(self: _Config, *values: Any, **options: Any) -> None:
            # After the other options: `dataclasses.replace` adds each field by its new name.
            former = {names[name]: options.pop(name) for name in names if name in options}
            init(self, *values, **options | former)

        config.__init__ = translating  # type: ignore[assignment]
        for name, new in names.items():
            getter = operator.attrgetter(new)
            setattr(config, name, property(getter, doc=f"The former name of `{new}`."))
        config.former = names
        return config

    return accept


def explicit_options(config: CheckedConfig) -> frozenset[str]:
    """Return the names of the options that the caller gave to a config, or changed in a copy."""
    return frozenset(options_of(type(config)).keys() - vars(config)["_unset"].keys())


def every_option() -> set[str]:
    """Return the names of the options of all configs."""
    return {name for config in _configs() for name in options_of(config)}


def _configs(parent: type = CheckedConfig) -> Iterator[type]:
    config: type
    for config in parent.__subclasses__():
        yield config
        yield from _configs(config)
