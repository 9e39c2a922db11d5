"""Script that chat_template.py runs to render chat templates; imports nothing from mlxtune.

core/files/limited_helper.py runs it under a memory limit.
"""

import datetime
import importlib.util
import json
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

# Kinds of replies: the rendered text; the error of a template that rejects the messages; the error
# of an invalid template; and the cause of nondeterministic output (random numbers or the time of
# day).
TEXT, REFUSED, INVALID, UNSTEADY = "text", "refused", "invalid", "unsteady"

Reply = tuple[str, str]

_Moment = datetime.datetime
# Two times that differ in hour, half of the day, minute, second and microsecond.
_TIMES = datetime.time(), datetime.time(13, 37, 11, 123_457)


class _NondeterministicTemplateError(Exception):
    """A template uses a value that changes between renderings."""


def _refuse(*_arguments: Any, **_options: Any) -> NoReturn:
    raise _NondeterministicTemplateError("chooses at random")


class _Today(_Moment):
    """A clock that gives templates the date but refuses the time of day."""

    def strftime(self, format: str) -> str:
        night, later = (_Moment.combine(self.date(), time).strftime(format) for time in _TIMES)
        if night != later:
            raise _NondeterministicTemplateError("writes the time of day")
        return night


def prepare() -> Callable[..., Any]:
    """Return transformers' renderer, patched to detect random numbers and the time of day."""
    # Jinja's filter `random` and function `lipsum` call these functions, some of which Jinja
    # imports by name.
    for name in ("choice", "choices", "randint", "random", "randrange", "sample", "shuffle"):
        setattr(random, name, _refuse)
    # transformers formats `datetime.now()` for the templates' `strftime_now`.
    datetime.datetime = _Today  # type: ignore[misc]
    # Skips the __init__ of these packages: listing all models there takes more than a second.
    for name in ("transformers", "transformers.utils"):
        spec = importlib.util.find_spec(name)
        if spec is not None:
            sys.modules[name] = importlib.util.module_from_spec(spec)
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _replies(
    render: Callable[..., Any], source: str, requests: Sequence[bytes], seconds: float
) -> Iterator[Reply]:
    for request in requests:
        # SIGPROF ends this process after `seconds` of CPU time.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        kind = INVALID
        try:
            # Without conversations, this only compiles the template, which transformers caches.
            render([], chat_template=source)
            kind = REFUSED
            yield TEXT, render(chat_template=source, **json.loads(request))[0][0]
        except MemoryError:
            raise
        except _NondeterministicTemplateError as error:
            yield UNSTEADY, str(error)
        except Exception as error:  # noqa: BLE001  a template may fail in any way
            line = getattr(error, "lineno", None) if kind == INVALID else None
            message = str(error) or type(error).__name__
            yield kind, message if line is None else f"line {line}: {message}"


def serve(render: Callable[..., Any]) -> None:
    """Answer requests, which are JSON lines on stdin, until stdin is closed."""
    source = ""
    for header in sys.stdin.buffer:
        seconds, count, changed = json.loads(header)
        requests = [sys.stdin.buffer.readline() for _ in range(count)]
        source = source if changed is None else changed
        print(json.dumps(list(_replies(render, source, requests, seconds))), flush=True)
