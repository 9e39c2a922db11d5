"""The parts of `gpu`, each with a time limit, and the report that they fill."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxtune.core.files.writing import write_json


class Skip(Exception):
    """Raised by a part that cannot run on this machine."""


@dataclass
class Parts:
    """The parts of the report, run in turn until the time is over.

    `only` names the parts to run; by default, all are run.
    """

    path: Path
    report: dict[str, Any]
    total_s: float = float("inf")
    only: Sequence[str] = ()
    started: float = field(default_factory=time.monotonic)

    def run(self, name: str, limit_s: float, part: Callable[[float], dict[str, Any]]) -> None:
        """Run a part within its time; record its result, or the reason why it has none."""
        if self.only and name not in self.only:
            return
        begun = time.monotonic()
        seconds = min(limit_s, self.total_s - (begun - self.started))
        if seconds < limit_s / 4:
            found: dict[str, Any] = {"skipped": f"{max(seconds, 0):.0f} s are left"}
        else:
            try:
                found = part(seconds)
            except Skip as reason:
                found = {"skipped": str(reason)}
            except subprocess.TimeoutExpired:
                found = {"failed": f"took longer than {seconds:.0f} s"}
            # Any error: the other parts still run.
            except Exception as error:  # noqa: BLE001
                found = {"failed": f"{type(error).__name__}: {error}"}
        found["seconds"] = round(time.monotonic() - begun, 1)
        self.report["parts"][name] = found
        self.write()
        print(f"{name}: {json.dumps(found)[:300]}", flush=True)

    def write(self) -> None:
        """Write the report as it is now."""
        write_json(self.path, self.report)

    @property
    def failed(self) -> list[str]:
        """The names of the parts that failed."""
        return [name for name, part in self.report["parts"].items() if "failed" in part]
