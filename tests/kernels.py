"""A notebook kernel for tests, which runs code and returns its output."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

Message = dict[str, Any]
# Far longer than any cell runs, so that an endless cell fails.
_SECONDS = 120


@dataclass
class Shown:
    """The output of a cell: its text, the states of each display, its result and its error."""

    cell: str
    text: str = ""
    displays: dict[str, list[Message]] = field(default_factory=dict)
    result: Message = field(default_factory=dict)
    error: list[str] = field(default_factory=list)


@dataclass
class Kernel:
    manager: KernelManager
    client: BlockingKernelClient

    def run(self, code: str, until: Callable[[Shown], bool] = lambda _: False) -> Shown:
        """Run a cell until it ends or `until` is true."""
        return self.read(Shown(self.client.execute(code)), until)

    def read(self, shown: Shown, until: Callable[[Shown], bool] = lambda _: False) -> Shown:
        """Continue to read a cell's output."""
        give_up = time.monotonic() + _SECONDS
        while time.monotonic() < give_up:
            message = self.client.get_iopub_msg(timeout=_SECONDS)
            if message["parent_header"].get("msg_id") != shown.cell:
                continue  # a message from the kernel's start
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown.text += content["text"]
            elif kind in ("display_data", "update_display_data"):
                states = shown.displays.setdefault(content["transient"]["display_id"], [])
                assert bool(states) is (kind == "update_display_data")
                states.append(content["data"])
            elif kind == "execute_result":
                shown.result = content["data"]
            elif kind == "error":
                shown.error = content["traceback"]
            if until(shown) or (kind == "status" and content["execution_state"] == "idle"):
                return shown
        raise TimeoutError(f"the cell has shown only {shown}")


@contextmanager
def kernel(**options: Any) -> Iterator[Kernel]:
    """Yield a kernel that runs in this environment."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    manager, client = start_new_kernel(kernel_name="python3", **pipes, **options)
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
