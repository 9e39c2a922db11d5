"""Script that scoring.py runs to call users' reward functions and to apply JSON schemas.

It imports nothing from mlxtune. core/files/limited_helper.py runs it under a memory limit.
Functions may print, read stdin, fork, close files, handle signals, change folders or end the
process. So the pipes to the parent are kept apart from the streams that functions see, and every
call starts with the same state of these.
"""

import difflib
import inspect
import json
import math
import os
import random
import signal
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

_MAX_ERROR_CHARS = 500
CLOSED = 78  # exit status
# Starts the problem of a function that raised an error, and the keys of a row that lacks one.
RAISED, ROW_KEYS = "raised ", "the row's keys: "
# The function of a file, unless the option names another.
USUAL = "reward"

Function = Callable[..., Any]


class _FunctionError(Exception):
    """A function returned something else."""


class _MissingKeyError(KeyError):
    """A function asked a row for a key that it lacks; `keys` lists the row's keys."""

    keys = ""


class _Row(dict[str, Any]):
    """A row, whose missing keys are errors that list its keys; its copies are plain."""

    def __missing__(self, key: Any) -> Any:
        error = _MissingKeyError(key)
        error.keys = ", ".join(map(repr, self))[:_MAX_ERROR_CHARS]
        raise error

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(key, *default) if key in self or default else self[key]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({**self},)


class Channel:
    """The parent's requests and this process's replies, which are JSON lines."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._requests, self._replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")

    def request(self) -> Any:
        """Return the next request; None once the parent has closed the pipe."""
        line = self._requests.readline()
        return json.loads(line) if line else None

    def reply(self, content: dict[str, Any]) -> None:
        """Send a reply. A process that a function has forked ends here."""
        if os.getpid() != self._process:
            os._exit(0)
        try:
            self._replies.write(json.dumps(content).encode() + b"\n")
            self._replies.flush()
        except OSError:
            os._exit(CLOSED)


class State:
    """The state of the process at the start of every call: streams, folder, signals."""

    def __init__(self) -> None:
        self._streams = os.open(os.devnull, os.O_RDONLY), os.dup(2), os.dup(2)
        self._folder = os.open(".", os.O_RDONLY)
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self.restore()

    def restore(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        os.fchdir(self._folder)
        for descriptor, stream in enumerate(self._streams):
            os.dup2(stream, descriptor)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            open(number, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )


# The pipes, the state, and each function with the path of its file, by the name of its reward.
Prepared = tuple[Channel, State, dict[str, tuple[str, Function]]]


def _number(value: Any) -> float:
    if value is None or isinstance(value, str | bytes | bytearray):
        raise _FunctionError(f"returned {'None' if value is None else 'text'}, not a number")
    if inspect.iscoroutine(value):
        value.close()  # otherwise, Python warns that nothing awaits it
        raise _FunctionError("returned a coroutine, not a number: define it without async")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise _FunctionError(f"returned {type(value).__name__}, not a number") from None
    if not math.isfinite(number):
        raise _FunctionError(f"returned {number}, not a finite number")
    return number


def prepare() -> Prepared:
    """Import the functions, before memory is limited.

    The first request lists them as [name, path, source, function]. A schema has no function, and
    its name as the path.
    """
    channel, state, path = Channel(), State(), ""
    modules, functions = dict[str, types.ModuleType](), dict[str, tuple[str, Function]]()
    try:
        for name, path, source, function in channel.request():
            if function is None:
                functions[name] = path, _schema(source)
                continue
            if path not in modules:
                modules[path] = _import(path, source, len(modules))
            functions[name] = path, _function(modules[path], function)
    except BaseException as error:  # noqa: BLE001  a file may fail in any way
        channel.reply({"path": path, "error": _describe(error, path)})
        os._exit(1)
    return channel, state, functions


def serve(prepared: Prepared) -> None:
    """Answer requests until the parent closes the pipe."""
    channel, state, functions = prepared
    state.restore()
    channel.reply({})
    while (request := channel.request()) is not None:
        (path, function), arguments = functions[request["name"]], request["given"]
        if "row" in arguments:
            arguments["row"] = _Row(arguments["row"])
        state.restore()
        random.seed(request["seed"])
        np.random.seed(request["seed"] % 2**32)
        try:
            reply: dict[str, Any] = {"value": _number(function(**arguments))}
        except MemoryError:  # the next process starts with free memory
            raise
        except BaseException as error:  # noqa: BLE001  a function may fail in any way
            reply = {"error": _describe(error, path)}
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        channel.reply({"id": request["id"], **reply})


def _import(path: str, source: str, number: int) -> types.ModuleType:
    """Run a file as a module, which can import the modules in its folder."""
    # At the end: a file such as json.py must not take the place of the library's.
    if (folder := str(Path(path).parent)) not in sys.path:
        sys.path.append(folder)
    module = types.ModuleType(f"mlxtune_reward_{number}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    # Latin-1 stands for the bytes of the file, which may declare its encoding.
    exec(compile(source.encode("latin-1"), path, "exec"), module.__dict__)
    return module


def _schema(source: str) -> Function:
    """Return the reward of an answer's JSON value by a schema, which may be written to run forever.

    A search for a pattern keeps other threads from running, so the process could not see its parent
    end: SIGPROF ends it after twice the `seconds` that the parent waits.
    """
    from jsonschema import Draft202012Validator, validators
    from referencing import Registry

    schema = json.loads(source)
    # No reference is downloaded.
    validator = validators.validator_for(schema, Draft202012Validator)(schema, registry=Registry())

    def score(value: Any, seconds: float) -> float:
        signal.setitimer(signal.ITIMER_PROF, 2 * seconds)
        try:
            return float(validator.is_valid(value))
        except MemoryError:
            raise
        except Exception as error:  # an unknown or endless reference
            raise _FunctionError(f"the schema cannot be applied: {error}") from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    return score


def _function(module: types.ModuleType, name: str) -> Function:
    """Return a function that takes our arguments by their names."""
    call, remedy = getattr(module, name, None), f"define {name}(prompt, completion, row)"
    if not callable(call):
        missing = f"has no function {name}"
        if name in vars(module):
            missing = f"has a {name} that is not a function"
        raise _FunctionError(f"{missing}{_suggestion(module, name)}: {remedy}")
    if not _takes_arguments(call):
        signature = inspect.signature(call)
        raise _FunctionError(f"has the function {name}{signature}: {remedy}")
    return call  # type: ignore[no-any-return]


def _takes_arguments(call: Function) -> bool:
    try:
        inspect.signature(call).bind(prompt="", completion="", row={})
    except TypeError:
        return False
    return True


def _suggestion(module: types.ModuleType, name: str) -> str:
    """Return a question that names a function which the file has instead; empty if none is likely.

    It has a similar name, or is the only one, and the option named none.
    """
    names = [
        each
        for each, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__
        if not each.startswith("_") and _takes_arguments(function)
    ]
    is_only = name == USUAL and len(names) == 1
    likely = names if is_only else difflib.get_close_matches(name, names, 1)
    file = Path(str(module.__file__)).name
    return "".join(f" (did you mean {file}:{each}?)" for each in likely)


def _describe(error: BaseException, path: str) -> str:
    """Return the end of a sentence on an error, with its line in the file."""
    try:
        message = " ".join(str(error).split())[:_MAX_ERROR_CHARS]
    except BaseException:  # noqa: BLE001  a user's class
        message = ""
    if isinstance(error, _FunctionError):
        return message
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == path
    ]
    details = [f"line {lines[-1]}"] if lines else []
    kind = type(error).__name__
    if isinstance(error, _MissingKeyError):
        kind = KeyError.__name__
        details.append(ROW_KEYS + error.keys)
    raised = RAISED + kind + f": {message}" * bool(message)
    return raised + f" ({'; '.join(details)})" * bool(details)
