"""Chat templates rendered by transformers, in a process that the system ends at its limits.

A chat template is a program by a stranger. transformers' sandbox keeps it from files and code, but
not from running forever or filling the memory, and nothing interrupts Python in the middle of an
operation. A separate process can be killed at any time.

Parent and child exchange lines of JSON: a header, a line for each rendering, and one line with all
replies. The child runs this file as a script, which therefore imports nothing of mlxtune, nor mlx.
"""

import importlib.util
import json
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Kinds of replies: the text, a template's refusal of the messages, and a template that is none.
TEXT, REFUSED, INVALID = "text", "refused", "invalid"
# A long conversation has more time and a longer result: so many characters double the time, and
# each may become so many.
_CHARACTERS_AGAIN, _GROWTH = 2**22, 16
_MAX_RESULT = 2**25
# Exit status of a child that ran out of memory.
_OUT_OF_MEMORY = 77
# Seconds between looks at the child's memory on macOS.
_LOOK_EVERY = 0.2

_TOO_LARGE = "produces more text or values than any conversation needs"

Reply = tuple[str, str]


class Harmful(Exception):
    """A template does something that no template needs; the message names it."""


class TemplateProcess:
    """The child process: started on first use, and again after it was ended.

    A rendering may take `seconds` on the CPU, and the child `memory` bytes.
    """

    def __init__(self, seconds: float = 10.0, memory: int = 2**30) -> None:
        self._seconds, self._memory = seconds, memory
        self._child: subprocess.Popen[bytes] | None = None
        self._source: str | None = None
        self._lock = threading.Lock()

    def render(self, source: str, requests: Sequence[str]) -> list[Reply]:
        """Render a template with each of the requests: JSON of render_jinja_template's arguments.

        Raises Harmful.
        """
        seconds = self._seconds * (1 + max(map(len, requests)) / _CHARACTERS_AGAIN)
        with self._lock:
            try:
                child = self._child = self._child or self._start()
                # The child keeps the last source.
                changed = json.dumps(None if source == self._source else source)
                self._source = source
                header = f"[{seconds}, {len(requests)}, {changed}]"
                reply = self._ask(child, "\n".join([header, *requests, ""]).encode())
                if not reply.endswith(b"\n"):
                    raise Harmful(_why_ended(child.wait(), seconds))
                return [(str(kind), str(text)) for kind, text in json.loads(reply)]
            except BaseException:  # also Ctrl-C, after which nobody waits for the reply
                self.close()
                raise

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
        self._child = self._source = None

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: the modules beside this one have common names, and must not be found by them.
        command = [sys.executable, "-P", __file__, str(self._memory)]
        # Its own process group, as Ctrl-C is for the parent.
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )

    def _ask(self, child: subprocess.Popen[bytes], lines: bytes) -> bytes:
        """Return the child's reply, incomplete if it has ended."""
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(lines)
            child.stdin.flush()
        except BrokenPipeError:
            return b""
        while not select.select([child.stdout], [], [], _LOOK_EVERY)[0]:
            if sys.platform == "darwin" and resident_memory(child.pid) > self._memory:
                raise Harmful(_TOO_LARGE)
        longest = _MAX_RESULT + _GROWTH * len(lines)
        reply = child.stdout.readline(longest)
        if len(reply) == longest:
            raise Harmful(_TOO_LARGE)
        return reply


def _why_ended(status: int, seconds: float) -> str:
    if status == -signal.SIGPROF:
        return f"takes more than {seconds:.3g} s for a conversation"
    if status == _OUT_OF_MEMORY:
        return _TOO_LARGE
    return f"ends the process that renders it (exit status {status})"


def resident_memory(pid: int) -> int:
    """Return the bytes of memory that a process has in use, without what macOS has compressed."""
    command = ["ps", "-o", "rss=", "-p", str(pid)]
    return int(subprocess.run(command, capture_output=True).stdout or 0) * 1024


# The child


def _import_renderer() -> Callable[..., Any]:
    # Running the __init__ of these packages takes more than a second, to list all of the models.
    for name in ("transformers", "transformers.utils"):
        spec = importlib.util.find_spec(name)
        if spec is not None:
            sys.modules[name] = importlib.util.module_from_spec(spec)
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _limit_memory(size: int) -> None:
    """Make allocations beyond `size` bytes from now on raise MemoryError."""
    if sys.platform != "linux":
        return  # macOS has no such limit, so the parent watches
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _replies(
    render: Callable[..., Any], source: str, requests: Sequence[bytes], seconds: float
) -> Iterator[Reply]:
    for request in requests:
        # After so much time on the CPU, the system ends this process by SIGPROF.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        kind = INVALID
        try:
            # Without conversations it only compiles the template, and keeps it.
            render([], chat_template=source)
            kind = REFUSED
            yield TEXT, render(chat_template=source, **json.loads(request))[0][0]
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  a template may fail in any way
            line = getattr(error, "lineno", None) if kind == INVALID else None
            message = str(error) or type(error).__name__
            yield kind, message if line is None else f"line {line}: {message}"


def main() -> None:
    """Render until stdin is closed, as it is when the parent ends."""
    render = _import_renderer()
    _limit_memory(int(sys.argv[1]))
    source = ""
    try:
        for header in sys.stdin.buffer:
            seconds, count, changed = json.loads(header)
            requests = [sys.stdin.buffer.readline() for _ in range(count)]
            source = source if changed is None else changed
            print(json.dumps(list(_replies(render, source, requests, seconds))), flush=True)
    except MemoryError:
        sys.exit(_OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
