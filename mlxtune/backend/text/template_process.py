"""Renders chat templates with transformers, in a process with limited time and memory.

A chat template is an untrusted program. transformers' sandbox keeps it from accessing files and
other code, but not from running forever or filling the memory, so it runs in a limited process.

Parent and child exchange lines of JSON. The parent sends one header, then a line for each request;
the child answers with one line of all replies.
"""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from mlxtune.backend.text import template_child
from mlxtune.backend.text.template_child import REFUSED, TEXT, Reply
from mlxtune.core.files.processes import LimitedProcess, TooMuchMemory

# Longer conversations get more time and longer results: the time grows by `seconds` for every
# `_CHARACTERS_AGAIN` characters, and a result may have `_GROWTH` characters for each character of
# its request.
_CHARACTERS_AGAIN, _GROWTH = 2**22, 16
# How many characters a result may have for any request, and how many all results of an exchange may
# have together.
_ALWAYS, _MAX_RESULT = 2**20, 2**25

_TOO_LARGE = "produces more text or values than any conversation needs"


class Harmful(Exception):
    """A template exceeds the limits or ends its process; the message says how."""


class TemplateProcess:
    """The child process, which is started on first use, and again after it has ended.

    A rendering may take `seconds` of CPU time, or more for a long request. The child may use
    `memory` bytes.
    """

    def __init__(self, seconds: float = 10.0, memory: int = 2**30) -> None:
        self._seconds, self._memory = seconds, memory
        self._child: LimitedProcess | None = None
        self._source: str | None = None
        self._lock = threading.Lock()

    def submit(self, source: str, requests: Sequence[str]) -> Future[list[Reply]]:
        """Start `render` in the background; return a future of its result or exception."""
        future: Future[list[Reply]] = Future()

        def work() -> None:
            try:
                future.set_result(self.render(source, requests))
            except BaseException as error:  # noqa: BLE001  the future raises it
                future.set_exception(error)

        # Python's exit does not wait for a daemon thread.
        threading.Thread(target=work, daemon=True).start()
        return future

    def render(self, source: str, requests: Sequence[str]) -> list[Reply]:
        """Render a template for each request, which is JSON with render_jinja_template's arguments.

        Raises Harmful if the template exceeds the limits or ends its process.
        """
        with self._lock:
            try:
                return self._exchange(source, requests)
            except TooMuchMemory:
                self.close()
                raise Harmful(_TOO_LARGE) from None
            except BaseException:  # also Ctrl-C, after which no caller reads the reply
                self.close()
                raise

    def _exchange(self, source: str, requests: Sequence[str]) -> list[Reply]:
        child = self._child = self._child or self._new()
        seconds = self._seconds * (1 + max(map(len, requests)) / _CHARACTERS_AGAIN)
        # The child keeps the last source.
        changed = json.dumps(None if source == self._source else source)
        self._source = source
        header = f"[{seconds}, {len(requests)}, {changed}]"
        lines = "\n".join([header, *requests, ""]).encode()
        child.write(lines)
        longest = _MAX_RESULT + _GROWTH * len(lines)
        reply = child.read_line(longest)
        if not reply.endswith(b"\n"):
            full = len(reply) == longest
            raise Harmful(_TOO_LARGE if full else _why(child.why_ended(), seconds))
        replies = [_whole(str(kind), str(text)) for kind, text in json.loads(reply)]
        for request, (_, text) in zip(requests, replies, strict=True):
            if len(text) > _ALWAYS + _GROWTH * len(request):
                raise Harmful(_TOO_LARGE)
        return replies

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
        self._child = self._source = None

    def start(self) -> None:
        """Start the child if there is none, without waiting for it."""
        with self._lock:
            self._child = self._child or self._new()

    def _new(self) -> LimitedProcess:
        return LimitedProcess(Path(template_child.__file__), self._memory)


def _whole(kind: str, text: str) -> Reply:
    """Return a reply; text that UTF-8, and so a tokenizer, cannot encode becomes a refusal."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"it writes half of a surrogate pair, U+{ord(text[error.start]):04X}"
        return (REFUSED if kind == TEXT else kind), half
    return kind, text


def _why(ended: str, seconds: float) -> str:
    if ended == "time":
        return f"takes more than {seconds:.3g} s for a conversation"
    if ended == "memory":
        return _TOO_LARGE
    return f"ends the process that renders it ({ended})"
