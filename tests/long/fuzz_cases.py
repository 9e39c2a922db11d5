"""One case of tests/test_fuzz.py: its files, its command, and the check of how that ended."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

from tests.long.mutated_folders import (
    mutate_adapter,
    mutate_file,
    mutate_model,
    mutate_peft,
    mutate_run,
)
from tests.long.mutations import ROWS, config_file, data_file, messages_file
from tests.models import THINKING, sums, write_chat, write_model

# The maximum duration of a case, in seconds.
SECONDS = 10.0
FOLDERS = ("model", "config", "run", "adapter", "peft", "messages", "report")
_ERROR = "mlxtune: error: "
_SAID = ("warning: ", "[transformers] ", "no run below ")
_EXIT_CODES = (0, 1, 2)
# The files in a case's folder that each command may write; other commands may write none.
_WRITES = {
    "train": ("",),
    "report": ("run/checkpoints/report.html", "page.html"),
    "chat": ("saved.jsonl",),
    **dict.fromkeys(("export", "fuse", "import"), ("out",)),
}
# The file in a case's folder that has the command's standard input.
_STDIN = "stdin"


@dataclasses.dataclass(frozen=True)
class Place:
    """The folders of the cases. Cases must not change anything in `guarded`."""

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
    def ended(self) -> Path:
        return self.guarded / "ended"

    @property
    def adapter(self) -> Path:
        return self.guarded / "adapter"

    @property
    def dora(self) -> Path:
        return self.guarded / "dora"

    @property
    def peft(self) -> Path:
        return self.guarded / "peft"

    @property
    def cases(self) -> Path:
        return self.guarded / "cases"

    def case(self, name: str) -> Path:
        return self.cases / name.replace(":", "-")


def prepare(place: Place) -> None:
    """Write the models, data, runs and adapters that cases start from."""
    place.guarded.mkdir(parents=True)
    place.cases.mkdir()
    write_model(place.model, "qwen3")
    (place.model / "chat_template.jinja").write_text(THINKING)
    write_model(place.plain_model, "llama")
    write_chat(place.chat, sums(12))
    os.chdir(place.cases)
    paths = ["--model-path", place.model, "--data", place.chat, "--quiet", "--no-cache"]
    paths += ["--output", place.run / "a.safetensors"]
    # Samples would take most of this run's time; the cases that train have samples.
    _do("train", *paths, "--epochs", 2, "--save-steps", 1, "--samples", 0)
    shutil.copytree(place.run, place.ended)
    (place.run / "checkpoints" / "result.json").unlink()
    _copy_adapter(place.run, place.adapter)
    paths[-1] = place.root / "dora" / "a.safetensors"
    few = ["--max-steps", 1, "--val-split", 0]
    _do("train", *paths, *few, "--dora", "--target-rank", "v_proj=2")
    _copy_adapter(place.root / "dora", place.dora)
    shutil.rmtree(place.root / "dora")
    out = ["--output", place.peft, "--model-path", place.model, "--quiet"]
    _do("export", "--adapter", place.adapter, "--format", "peft", *out)
    (place.peft / "certificate.json").unlink()


def _do(*arguments: object) -> None:
    code, _, said = command(*arguments)
    assert code == 0, said


def _copy_adapter(run: Path, folder: Path) -> None:
    folder.mkdir()
    shutil.copyfile(run / "a.safetensors", folder / "adapters.safetensors")
    shutil.copyfile(run / "adapter_config.json", folder / "adapter_config.json")


# A case


def command(*arguments: object, stdin: bytes = b"") -> tuple[Any, str, str]:
    """Run the command in this process; return its exit code, stdout and stderr."""
    from mlxtune.cli import main

    out, err = io.StringIO(), io.StringIO()
    formatting, standard_input = warnings.formatwarning, sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as done:
            return done.code, out.getvalue(), err.getvalue()
        except BaseException:  # noqa: BLE001  a bug, which the fuzzer looks for
            return "an exception", out.getvalue(), err.getvalue() + traceback.format_exc()
        finally:
            warnings.formatwarning, sys.stdin = formatting, standard_input
    raise AssertionError("main exits")


def arguments_of(place: Place, kind: str, rng: Random, folder: Path) -> list[object]:
    """Write a case's files into its folder, and return the command's arguments."""
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
        # Without the limit, a valid rank of a million would use all of the memory.
        return ["train", "--dry-run", "--memory-limit", 0.5, *given]
    if kind in _OTHERS:
        return _OTHERS[kind](place, rng, folder)
    shutil.copytree(place.run, folder / "run")
    mutate_run(rng, folder / "run")
    return ["train", "--resume", folder / "run", "--quiet", "--no-cache"]


def _adapter_case(place: Place, rng: Random, folder: Path) -> list[object]:
    shutil.copytree(rng.choice((place.adapter, place.adapter, place.dora)), folder / "adapter")
    mutate_adapter(rng, folder / "adapter")
    model = ["--model-path", place.model]
    given, out = ["--adapter", folder / "adapter"], ["--output", folder / "out"]
    quick = ["--quiet", "--max-new-tokens", 2]
    what = rng.randrange(8)
    if what == 0:
        more = ["--generate"] if rng.random() < 0.3 else []
        more += ["--json"] if rng.random() < 0.3 else []
        return ["eval", *model, *given, "--data", place.chat, "--no-cache", *quick, *more]
    if what == 1:
        more = ["--json"] if rng.random() < 0.5 else ["--temperature", 1]
        return ["generate", *model, *given, "--prompt", "Hi", *quick, *more]
    if what == 2:
        (folder / _STDIN).write_bytes(b"Hi\n/base\nHi\n")
        return ["chat", *model, *given, *quick]
    model = model if rng.random() < 0.8 else []
    if what == 3:
        return ["fuse", *model, *given, *out, "--quiet"]
    if what == 4:
        shape = rng.choice(("mlx-lm", "peft", "flat", "gguf"))
        return ["export", *model, *given, *out, "--format", shape, "--quiet"]
    if what == 5:
        return ["import", *model, folder / "adapter", *out, "--quiet"]
    begin = ["--init-adapter", folder / "adapter", *(["--dora"] if rng.random() < 0.1 else [])]
    out = ["--output", folder / "out" / "a.safetensors", "--quiet", "--no-cache"]
    how = ["--dry-run"] if what == 6 else ["--max-steps", 1, "--val-split", 0]
    return ["train", "--model-path", place.model, "--data", place.chat, *begin, *out, *how]


def _peft_case(place: Place, rng: Random, folder: Path) -> list[object]:
    shutil.copytree(place.peft, folder / "theirs")
    mutate_peft(rng, folder / "theirs")
    model = ["--model-path", place.model] if rng.random() < 0.8 else []
    return ["import", *model, folder / "theirs", "--output", folder / "out", "--quiet"]


def _messages_case(place: Place, rng: Random, folder: Path) -> list[object]:
    model = ["--model-path", rng.choice((place.model, place.plain_model))]
    quick = ["--quiet", "--max-new-tokens", 2]
    content = messages_file(rng)
    if rng.random() < 0.15:
        (folder / _STDIN).write_bytes(content + b"\n/save saved.jsonl\n")
        return ["chat", *model, *quick]
    quick += ["--json"] if rng.random() < 0.3 else []
    quick += ["--system", "Be brief."] if rng.random() < 0.2 else []
    quick += ["--adapter", place.adapter] if rng.random() < 0.2 else []
    if rng.random() < 0.4:
        (folder / _STDIN).write_bytes(content)
        from_stdin = rng.choice(([], ["--messages", "-"]))
        return ["generate", *model, *from_stdin, *quick]
    (folder / "messages.json").write_bytes(content)
    if rng.random() < 0.1:
        mutate_file(rng, folder / "messages.json")
    return ["generate", *model, "--messages", folder / "messages.json", *quick]


def _report_case(place: Place, rng: Random, folder: Path) -> list[object]:
    shutil.copytree(rng.choice((place.run, place.ended, place.ended)), folder / "run")
    mutate_run(rng, folder / "run", everything=True)
    run, more = folder / "run", ["--json"] if rng.random() < 0.3 else []
    what = rng.randrange(3)
    if what == 0:
        return ["runs", folder, *more]
    html = ["--html", folder / "page.html"]
    if what == 1:
        return ["report", run, place.ended, *html, *more]
    return ["report", run, *more]


_OTHERS = {
    "adapter": _adapter_case,
    "peft": _peft_case,
    "messages": _messages_case,
    "report": _report_case,
}


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


def run_case(place: Place, seed: int, name: str) -> dict[str, Any]:
    """Run a case; return the exit code, the duration and the problem, if any.

    A slow case runs again, because the machine may have been busy.
    """
    found = run_once(place, seed, name)
    return run_once(place, seed, name) if found["seconds"] > SECONDS else found


def run_once(place: Place, seed: int, name: str) -> dict[str, Any]:
    kind = name.partition(":")[0]
    around, folder = place.case(name), place.case(name) / "here"
    shutil.rmtree(around, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = Random(f"{seed}:{name}")
    arguments = arguments_of(place, kind, rng, folder)
    os.chdir(folder)
    before, own = snapshot(place.guarded, place.cases), snapshot(folder)
    stdin = (folder / _STDIN).read_bytes() if (folder / _STDIN).exists() else b""
    started = time.perf_counter()
    code, out, said = command(*arguments, stdin=stdin)
    seconds = time.perf_counter() - started
    problem = problem_of(code, out, said, talks=arguments[0] == "chat")
    if not problem and seconds > SECONDS:
        problem = f"took {seconds:.1f} s"
    outside = snapshot(place.guarded, place.cases) != before or len(list(around.iterdir())) > 1
    if not problem and outside:
        problem = "changed files outside of its folder"
    writes = _WRITES.get(str(arguments[0]), ())
    if not problem and _touched(folder, own, writes):
        problem = f"{arguments[0]} changed files in its folder"
    if not problem and code != 0 and writes == ("out",) and (folder / "out").exists():
        problem = f"{arguments[0]} failed and left something"
    # A folder that the case made unreadable stays.
    os.chdir(place.cases)
    if not problem:
        shutil.rmtree(around, ignore_errors=True)
    how = f"mlxtune {' '.join(map(str, arguments))}\n{said[-3000:]}"
    return {"code": code, "seconds": seconds, "problem": problem, "said": how}


def _touched(folder: Path, before: dict[str, tuple[int, ...]], writes: tuple[str, ...]) -> bool:
    """Return whether anything in a folder has changed except the files that a command may write.

    The parent folders of those files may change too.
    """
    if "" in writes:
        return False
    allowed = [folder / name for name in writes]
    changed = {path for path, _ in before.items() ^ snapshot(folder).items()}
    return any(
        not any(path == Path(each) or path in Path(each).parents for path in allowed)
        for each in changed
    )


def problem_of(code: Any, out: str, said: str, *, talks: bool = False) -> str:
    """Return the problem with how a command ended, or an empty text.

    A command that `talks` may write other lines on stderr.
    """
    if code not in _EXIT_CODES:
        return f"ended with {code}"
    if "Traceback" in said + out:
        return "showed a traceback"
    errors = [line for line in said.splitlines() if line.startswith(_ERROR)]
    if len(errors) != (code != 0):
        return f"ended with {code} and {len(errors)} lines of error"
    if others := [
        line for line in said.splitlines() if not talks and not line.startswith((_ERROR, *_SAID))
    ]:
        return f"said {others[0]!r:.200}"
    # An answer may contain tabs.
    shown = said + out.replace("\t", " ")
    if any(not (c == "\n" or c.isprintable()) for c in shown):
        return "sent control characters to the terminal"
    return ""


def snapshot(folder: Path, but: Path | None = None) -> dict[str, tuple[int, ...]]:
    """Return each path's mode and inode, and each file's size and time, except below `but`."""
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
