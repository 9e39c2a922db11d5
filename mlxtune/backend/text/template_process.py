"""Chat templates rendered by transformers, in a process that the system ends at its limits.

A chat template is a program by a stranger. transformers' sandbox keeps it from files and code, but
not from running forever or filling the memory, so it runs in a limited process.

Parent and child exchange lines of JSON: a header, a line for each rendering, and one line with all
replies.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxtune.backend.text import template_child
from mlxtune.backend.text.template_child import INVALID, REFUSED, TEXT, UNSTEADY, Reply
from mlxtune.core.files.processes import LimitedProcess, TooMuchMemory

__all__ = ["INVALID", "REFUSED", "TEXT", "UNSTEADY", "Asked", "Harmful", "Reply", "TemplateProcess"]

# A long conversation has more time and a longer result: so many characters double the time, and
# each may become so many.
_CHARACTERS_AGAIN, _GROWTH = 2**22, 16
# Characters that any may become, and what several have together.
_ALWAYS, _MAX_RESULT = 2**20, 2**25

_TOO_LARGE = "produces more text or values than any conversation needs"


class Harmful(Exception):
    """A template does something that no template needs; the message names it."""


@dataclass
class Asked:
    """Renderings that a process was asked for, and its replies once they are read, or why not."""

    source: str
    requests: Sequence[str]
    seconds: float
    longest: int
    replies: Sequence[Reply] | None = None
    problem: Harmful | None = None


class TemplateProcess:
    """The child process: started on first use, and again after it was ended.

    A rendering may take `seconds` on the CPU, and the child `memory` bytes.
    """

    def __init__(self, seconds: float = 10.0, memory: int = 2**30) -> None:
        self._seconds, self._memory = seconds, memory
        self._child: LimitedProcess | None = None
        self._source: str | None = None
        self._unread: Asked | None = None
        self._lock = threading.Lock()

    def render(self, source: str, requests: Sequence[str]) -> Sequence[Reply]:
        """Render a template with each of the requests: JSON of render_jinja_template's arguments.

        Raises Harmful.
        """
        return self.receive(self.send(source, requests))

    def send(self, source: str, requests: Sequence[str]) -> Asked:
        """Ask for renderings, and do not wait for them; `receive` does."""
        seconds = self._seconds * (1 + max(map(len, requests)) / _CHARACTERS_AGAIN)
        with self._lock:
            self._read()
            try:
                child = self._child = self._child or self._new()
                # The child keeps the last source.
                changed = json.dumps(None if source == self._source else source)
                self._source = source
                header = f"[{seconds}, {len(requests)}, {changed}]"
                lines = "\n".join([header, *requests, ""]).encode()
                child.write(lines)
            except BaseException:
                self.close()
                raise
            longest = _MAX_RESULT + _GROWTH * len(lines)
            asked = self._unread = Asked(source, requests, seconds, longest)
            return asked

    def receive(self, asked: Asked) -> Sequence[Reply]:
        """Return a reply to each of the requests, once they are there. Raises Harmful."""
        with self._lock:
            if asked is self._unread:
                self._read()
        if asked.problem is not None:
            raise asked.problem
        if asked.replies is None:
            # The process was closed meanwhile.
            return self.render(asked.source, asked.requests)
        return asked.replies

    def _read(self) -> None:
        """Wait for the replies that nobody has read."""
        if (asked := self._unread) is None:
            return
        self._unread, child = None, self._child
        assert child is not None
        try:
            reply = child.read_line(asked.longest)
            if not reply.endswith(b"\n"):
                full = len(reply) == asked.longest
                raise Harmful(_TOO_LARGE if full else _why(child.why_ended(), asked.seconds))
            replies = [_whole(str(kind), str(text)) for kind, text in json.loads(reply)]
            for request, (_, text) in zip(asked.requests, replies, strict=True):
                if len(text) > _ALWAYS + _GROWTH * len(request):
                    raise Harmful(_TOO_LARGE)
            asked.replies = replies
        except (Harmful, TooMuchMemory) as error:
            self.close()
            asked.problem = error if isinstance(error, Harmful) else Harmful(_TOO_LARGE)
        except BaseException:  # also Ctrl-C, after which nobody waits for the reply
            self.close()
            raise

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
        self._child = self._source = self._unread = None

    def start(self) -> None:
        """Start the child, if there is none, and do not wait for it."""
        with self._lock:
            self._child = self._child or self._new()

    def _new(self) -> LimitedProcess:
        return LimitedProcess(Path(template_child.__file__), self._memory)


def _whole(kind: str, text: str) -> Reply:
    """Return a reply, or a refusal for text that UTF-8, and so a tokenizer, cannot hold."""
    if text.isascii():
        return kind, text
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
