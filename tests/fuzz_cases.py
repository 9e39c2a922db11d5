"""One case of tests/fuzz.py: what is given to the command, and whether it ended as it should."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shutil
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

from tests.models import THINKING, sums, write_chat, write_model
from tests.mutated_folders import mutate_model, mutate_run
from tests.mutations import ROWS, config_file, data_file

# What a case may take.
SECONDS = 10.0
FOLDERS = ("model", "config", "run")
_ERROR = "mlxtune: error: "
_EXIT_CODES = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the cases are. What is in `guarded` must stay as it is, beside the cases in it."""

    root: Path

    @property
    def guarded(self) -> Path:
        return self.root / "guarded"

    @property
    def model(self) -> Path:
        return self.guarded / "model"

    @property
    def plain_model(self) -> Path:
        return self.guarded / "plain-model"

    @property
    def chat(self) -> Path:
        return self.guarded / "chat.jsonl"

    @property
    def run(self) -> Path:
        return self.guarded / "run"

    @property
    def cases(self) -> Path:
        return self.guarded / "cases"

    def case(self, name: str) -> Path:
        return self.cases / name.replace(":", "-")


def prepare(place: Place) -> None:
    """Write what cases are made of: a model with a template and one without, data, a run."""
    place.guarded.mkdir(parents=True)
    place.cases.mkdir()
    write_model(place.model, "qwen3")
    (place.model / "chat_template.jinja").write_text(THINKING)
    write_model(place.plain_model, "llama")
    write_chat(place.chat, sums(12))
    os.chdir(place.cases)
    paths = [
        "--model-path",
        place.model,
        "--data",
        place.chat,
        "--output",
        place.run / "a.safetensors",
    ]
    code, _, said = command(
        "train", *paths, "--epochs", 2, "--save-steps", 1, "--quiet", "--no-cache"
    )
    assert code == 0, said
    (place.run / "checkpoints" / "result.json").unlink()


# A case


def command(*arguments: object) -> tuple[Any, str, str]:
    """Run the command in this process; return its exit code, stdout and stderr."""
    from mlxtune.cli import main

    out, err = io.StringIO(), io.StringIO()
    formatting = warnings.formatwarning
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as done:
            return done.code, out.getvalue(), err.getvalue()
        except BaseException:  # noqa: BLE001  a bug, which is what is looked for
            return "an exception", out.getvalue(), err.getvalue() + traceback.format_exc()
        finally:
            warnings.formatwarning = formatting
    raise AssertionError("main exits")


def arguments_of(place: Place, kind: str, rng: Random, folder: Path) -> list[object]:
    """Write the files of a case into its folder, and return what the command is given."""
    model, data = rng.choice((place.model, place.model, place.plain_model)), place.chat
    out = ["--output", folder / "out" / "a.safetensors", "--quiet", "--no-cache"]
    if kind == "data":
        name, content = data_file(rng)
        (folder / name).write_bytes(content)
        arguments = _data_options(rng, folder / name)
        if rng.random() < 0.2:
            return ["train", "--dry-run", "--model-path", model, *arguments, *out]
        return ["inspect", "--quiet", "--no-cache", "--model-path", model, *arguments]
    if kind == "model":
        shutil.copytree(model, folder / "model")
        mutate_model(rng, folder / "model")
        given = ["--model-path", folder / "model", "--data", data]
        look = ["inspect", *given, "--quiet", "--no-cache"]
        plan = ["plan", *given, "--quiet", "--no-cache"]
        train = ["train", *given, *out]
        return rng.choice((look, plan, [*train, "--dry-run"], [*train, "--max-steps", 1]))
    if kind == "config":
        name, content = config_file(rng)
        (folder / name).write_bytes(content)
        given = ["--config", folder / name, "--model-path", model, "--data", data, *out]
        # Which a rank of a million, which is no mistake by itself, would otherwise be given.
        return ["train", "--dry-run", "--memory-limit", 0.5, *given]
    shutil.copytree(place.run, folder / "run")
    mutate_run(rng, folder / "run")
    return ["train", "--resume", folder / "run", "--quiet", "--no-cache"]


def _data_options(rng: Random, path: Path) -> list[object]:
    options: list[object] = ["--data", path]
    for chance, option in (
        (0.3, ["--val-split", 0]),
        (0.1, ["--strict"]),
        (0.1, ["--format", rng.choice(list(ROWS))]),
        (0.1, ["--turns", "last"]),
        (0.1, ["--thinking", rng.choice(("on", "off"))]),
        (0.1, ["--merge-system"]),
        (0.1, ["--template", rng.choice(("qwen3", "gemma"))]),
        (0.1, ["--max-seq-len", rng.choice((2, 16, 64))]),
        (0.1, ["--field", rng.choice(("messages=conversations", "content=value", "text=output"))]),
    ):
        if rng.random() < chance:
            options += option
    return options


def run_case(place: Place, seed: int, name: str, *, show: bool = False) -> dict[str, Any]:
    """Run a case; return its exit code and seconds, and what is wrong, if anything is.

    One that takes long is run again: the machine may have been doing something else.
    """
    found = run_once(place, seed, name, show=show)
    return run_once(place, seed, name, show=show) if found["seconds"] > SECONDS else found


def run_once(place: Place, seed: int, name: str, *, show: bool) -> dict[str, Any]:
    """Run a case, once."""
    kind = name.partition(":")[0]
    around, folder = place.case(name), place.case(name) / "here"
    shutil.rmtree(around, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = Random(f"{seed}:{name}")
    arguments = arguments_of(place, kind, rng, folder)
    os.chdir(folder)
    before, own = snapshot(place.guarded, place.cases), snapshot(folder)
    started = time.perf_counter()
    code, out, said = command(*arguments)
    seconds = time.perf_counter() - started
    problem = problem_of(code, out, said)
    if not problem and seconds > SECONDS:
        problem = f"took {seconds:.1f} s"
    outside = snapshot(place.guarded, place.cases) != before or len(list(around.iterdir())) > 1
    if not problem and outside:
        problem = "changed files outside of its folder"
    if not problem and arguments[0] != "train" and snapshot(folder) != own:
        problem = f"{arguments[0]} changed files in its folder"
    if show:
        print(f"mlxtune {' '.join(map(str, arguments))}\nexit {code}\n{out}{said}")
    # One that a case has made unreadable stays.
    os.chdir(place.cases)
    if not problem and not show:
        shutil.rmtree(around, ignore_errors=True)
    error = next((line for line in said.splitlines() if line.startswith(_ERROR)), "")
    return {
        "code": code,
        "seconds": seconds,
        "problem": problem,
        "said": said[-3000:],
        "error": error,
    }


def problem_of(code: Any, out: str, said: str) -> str:
    """Say what is wrong with how a command ended; nothing where it is as it should be."""
    if code not in _EXIT_CODES:
        return f"ended with {code}"
    if "Traceback" in said + out:
        return "showed a traceback"
    errors = [line for line in said.splitlines() if line.startswith(_ERROR)]
    if len(errors) != (code != 0):
        return f"ended with {code} and {len(errors)} lines of error"
    if others := [
        line
        for line in said.splitlines()
        if not line.startswith((_ERROR, "warning: ", "[transformers] "))
    ]:
        return f"said {others[0]!r:.200}"
    if any(not (c == "\n" or c.isprintable()) for c in said):
        return "sent control characters to the terminal"
    return ""


def snapshot(folder: Path, but: Path | None = None) -> dict[str, tuple[int, ...]]:
    """Return what tells whether anything in a folder has changed, but in one folder within."""
    found: dict[str, tuple[int, ...]] = {}
    left = [str(folder)]
    while left:
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                at = entry.stat(follow_symlinks=False)
                found[entry.path] = (at.st_mode, at.st_ino)
                if not entry.is_dir(follow_symlinks=False):
                    found[entry.path] += (at.st_size, at.st_mtime_ns)
                elif entry.path != str(but):
                    left.append(entry.path)
    return found
