"""Write docs/reference.md, and the list of modules in docs/architecture.md, from the code.

    python docs/make_reference.py

`tests/test_reference.py` fails if either is out of date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click

import mlxtune
from mlxtune.cli import COMMANDS, EXIT_CODES
from mlxtune.cli.options import ConfigCommand
from mlxtune.config.fields import FIELDS, CheckedConfig, field_types, flag
from mlxtune.config.option import Option, Section

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "mlxtune"
REFERENCE, ARCHITECTURE = DOCS / "reference.md", DOCS / "architecture.md"
MODULES_BEGIN, MODULES_END = "<!-- modules: docs/make_reference.py -->", "<!-- end of modules -->"
# The folders of checkpoints; N is an epoch or a step.
CHECKPOINT = "checkpoints/{best,epoch-N,step-N}"
# Every file that a run leaves, and its contents. Paths are relative to the folder of --output, with
# the default --checkpoint-dir. tests/core/run/test_run_folder_files.py compares them with a run.
RUN_FILES: dict[str, str] = {
    "checkpoints/.mlxtune": "marks the folder as a run's, so that the next run may move its files",
    "checkpoints/run.json": "the run's options, model, plan and data",
    "adapters.safetensors": "the adapter in mlx-lm's format, from the step with the lowest "
    "validation loss or, without validation, from the last step; --output sets the file's name",
    "adapter_config.json": "what mlx-lm needs to load the adapter: rank, scale, dropout and layers",
    "checkpoints/metrics.jsonl": "a JSON line for every step, skipped step, validation and epoch "
    "so far",
    "checkpoints/ledger.json": "where every row and every token of each data file went",
    "checkpoints/trained_rows.bin": "hashes of the training rows, also of those that "
    "--max-steps did not reach; eval leaves all of them out",
    "checkpoints/result.json": "the result of a finished run: steps, losses, the adapter's SHA-256",
    "checkpoints/evaluation.json": "how much the adapter helped on the validation rows, if there "
    "are any",
    "checkpoints/report.html": "a page about the run; mlxtune report rewrites it",
    "checkpoints/profile.jsonl": "how long each phase of a profiled step took; with "
    "--profile-interval",
    "checkpoints/.mlxtune.stop": "for a moment: a request that the run finish its step, save and "
    "stop; with --open or mlxtune watch",
    "checkpoints/samples.json": "answers to validation rows after the last validation; with --open",
    "checkpoints/reference.json": "the reference's log-probabilities of the answers; with "
    "--objective dpo or kto",
    "checkpoints/initial.safetensors": "LoRA's values before the first step, for --resume; with "
    "--kl",
    "checkpoints/samples.jsonl.gz": "the sampled answers with their rewards, a line for each "
    "prompt; with --reward",
    "checkpoints/worker-N.log": "the messages of worker N, on its own machine; with --hosts or -n "
    "of mlx.launch",
    "checkpoints/tracking.json": "the run's ids in its trackers; with --track",
    "checkpoints/{tensorboard,wandb}/…": "files of the trackers; with --track",
    f"{CHECKPOINT}/adapters.safetensors": "the adapter at that step",
    f"{CHECKPOINT}/adapter_config.json": "the same as the file next to the adapter",
    f"{CHECKPOINT}/optimizer.safetensors": "AdamW's moments and step, for --resume",
    f"{CHECKPOINT}/parameters.safetensors": "the trained parameters, for --resume, if the adapter "
    "file holds an equivalent LoRA instead: with --init pissa or unequal ranks",
    f"{CHECKPOINT}/metrics.jsonl": "the records up to that step",
    f"{CHECKPOINT}/metadata.json": "every option, seeds, versions, hashes of the data and base "
    "model",
    f"{CHECKPOINT}/manifest.json": "size and SHA-256 of each file of the checkpoint, written last",
    "checkpoints/previous-N/…": "the files of each earlier run in this folder; the newest of these "
    "runs has the highest number, and `mlxtune runs --remove` removes them",
}
KINDS = {"int": "whole number", "float": "number", "bool": "flag"}


def reference() -> str:
    """Return the text of docs/reference.md."""
    return "\n".join(
        [
            "# Reference",
            "",
            "`docs/make_reference.py` writes this page from the code: change the code instead.",
            "",
            *_contents(),
            "## Commands",
            "",
            *(line for command in COMMANDS for line in _command(command)),
            "### `mlxtune --version`",
            "",
            "Prints the versions of mlxtune, mlx and mlx-lm; `mlxtune doctor` prints more.",
            "",
            "## Exit codes",
            "",
            *_table(
                ("code", "means"), [(str(code), meaning) for code, meaning in EXIT_CODES.items()]
            ),
            "## Files of a run",
            "",
            "Paths are relative to the folder of `--output`; `checkpoints` is the default of "
            "`--checkpoint-dir`.",
            "",
            *_table(
                ("file", "holds"), [(f"`{path}`", contents) for path, contents in RUN_FILES.items()]
            ),
            "## Python",
            "",
            "`mlxtune.__version__` is mlxtune's version.",
            "",
            *(line for name in mlxtune.__all__ for line in _name(name)),
        ]
    )


def _contents() -> Iterator[str]:
    names = ", ".join(f"[{command.name}](#mlxtune-{command.name})" for command in COMMANDS)
    yield f"- [Commands](#commands): {names}"
    yield "- [Exit codes](#exit-codes)"
    yield "- [Files of a run](#files-of-a-run)"
    yield "- [Python](#python)"
    yield ""


# Commands


def _command(each: click.Command) -> Iterator[str]:
    yield f"### `mlxtune {each.name}`"
    yield ""
    yield from _paragraphs(each.help or "")
    arguments = [p for p in each.params if isinstance(p, click.Argument)]
    usage = " ".join(["mlxtune", str(each.name), "[OPTIONS]", *map(_argument, arguments)])
    example = (each.epilog or "").removeprefix("Example: ")
    yield from ("```", usage, "```", "")
    if example:
        yield from ("Example:", "", "```sh", example, "```", "")
    for section, rows in _sections(each):
        if rows:
            yield f"**{section}**"
            yield ""
            yield from _table(("option", "takes", "default", ""), rows)


def _argument(argument: click.Argument) -> str:
    if isinstance(argument.type, click.Choice):
        return "|".join(map(str, argument.type.choices))
    shown = argument.metavar or str(argument.name).upper()
    if argument.nargs == -1 and not shown.endswith("..."):
        shown += "..."
    return shown if argument.required or shown.startswith("[") else f"[{shown}]"


def _sections(each: click.Command) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield a command's options by section; the last section has the options without a config."""
    fields = dataclasses.fields(each.config) if isinstance(each, ConfigCommand) else ()
    types = field_types(each.config) if isinstance(each, ConfigCommand) else {}
    arguments = {p.name for p in each.params if isinstance(p, click.Argument)}
    shown = [field for field in fields if field.name not in arguments]
    for section in Section:
        known = [f for f in shown if f.metadata["option"].section is section]
        yield section.value, [_option(field, types[field.name]) for field in known]
    names = {field.name for field in fields}
    own = [p for p in each.params if isinstance(p, click.Option) and p.name not in names]
    yield "Options of the command itself" if fields else "Options", [_own_option(p) for p in own]


def _option(field: dataclasses.Field[Any], annotation: Any) -> tuple[str, ...]:
    option: Option = field.metadata["option"]
    default = "required" if option.required else _default(field.default)
    return f"`{flag(field.name)}`", _takes(option, annotation), default, option.help


def _takes(option: Option, annotation: Any) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    limits = {
        "at least": option.at_least,
        "at most": option.at_most,
        "above": option.above,
        "below": option.below,
    }
    bounds = " and ".join(
        f"{name} {limit:g}" for name, limit in limits.items() if limit is not None
    )
    kind = getattr(annotation, "__name__", str(annotation)).partition(" ")[0].partition("[")[0]
    if kind in ("str", "tuple"):
        named = option.metavar not in (None, "PATH", "FILE")
        kind = f"`{option.metavar}`" if named else "path"
    kind = KINDS.get(kind, kind)
    return f"{kind}, {bounds}" if bounds else kind


def _default(value: Any) -> str:
    if value is None or value is False or value == () or value == "":
        return ""
    if isinstance(value, tuple):
        value = ",".join(value)
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _own_option(option: click.Option) -> tuple[str, ...]:
    name = max(option.opts, key=len)
    if isinstance(option.type, click.Choice):
        takes = ", ".join(f"`{choice}`" for choice in option.type.choices)
    elif option.is_flag:
        takes = "flag"
    else:
        takes = KINDS.get(option.type.name.removesuffix("eger"), "text")
        if option.metavar:
            takes = {"PATH": "path", "FILE": "path"}.get(option.metavar, f"`{option.metavar}`")
    if option.multiple:
        takes += ", may be repeated"
    plain = isinstance(option.default, str | int | float)
    default = "required" if option.required else _default(option.default if plain else None)
    return f"`{name}`", takes, default, option.help or ""


# Python


def _name(name: str) -> Iterator[str]:
    found = getattr(mlxtune, name)
    yield f"### `{name}`"
    yield ""
    if inspect.isclass(found) and issubclass(found, BaseException):
        bases = " and ".join(f"`{base.__name__}`" for base in found.__bases__)
        yield f"An exception, derived from {bases}."
        yield ""
    elif inspect.isclass(found) and dataclasses.is_dataclass(found):
        yield from ("```python", *_fields(found), "```", "")
    else:
        yield from ("```python", f"{name}{_signature(found)}", "```", "")
    yield from _paragraphs(_doc(found))
    if inspect.isclass(found) and not issubclass(found, BaseException):
        yield from _methods(found)


def _fields(found: type) -> Iterator[str]:
    """Yield the lines of a call that creates a dataclass, with one field on each line."""
    yield f"{found.__name__}("
    for field in dataclasses.fields(found):
        default = ""
        if field.default is not dataclasses.MISSING:
            default = f" = {field.default!r}"
        elif field.default_factory is not dataclasses.MISSING:
            default = " = …"
        yield f"    {field.name}: {field.type}{default},"
    yield ")"


def _methods(found: type) -> Iterator[str]:
    for name, member in vars(found).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"- `.{name}`: {_first_line(_doc(member))}"
        elif inspect.isfunction(member) or isinstance(member, classmethod):
            function = member.__func__ if isinstance(member, classmethod) else member
            if not (issubclass(found, CheckedConfig) and name == "contradictions"):
                yield f"- `.{name}{_signature(function)}`: {_first_line(_doc(function))}"
    yield ""


def _signature(found: Any) -> str:
    """Return a signature as in the code, the same in every version of Python."""
    parts, starred = [], False
    for p in inspect.signature(found).parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        annotation = "" if p.annotation is p.empty else f": {p.annotation}"
        default = "" if p.default is p.empty else f" = {_written(p.default)}"
        parts.append(f"{stars}{p.name}{annotation}{default}")
    returned = getattr(found, "__annotations__", {}).get("return")
    arrow = f" -> {returned}" if returned and not inspect.isclass(found) else ""
    return f"({', '.join(parts)}){arrow}"


def _written(value: Any) -> str:
    if inspect.isfunction(value) or inspect.isclass(value):
        return value.__name__ if value.__name__ != "<lambda>" else "…"
    # The address of an object differs each time.
    return "…" if " at 0x" in repr(value) else repr(value)


def _doc(found: Any) -> str:
    # The tables of options in this reference have the fields of a config.
    own = (found.__doc__ or "").partition(f"\n\n{FIELDS}\n")[0]
    # Dataclasses without a docstring get a generated one.
    return "" if own.startswith(f"{getattr(found, '__name__', '')}(") else inspect.cleandoc(own)


def _first_line(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _paragraphs(text: str) -> Iterator[str]:
    r"""Yield a docstring as Markdown; indented paragraphs, and those after \b, stay unchanged."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = paragraph.splitlines()
        if not lines:
            continue
        if lines[0].strip() == "\b":
            yield from ("```", *lines[1:], "```")
        elif lines[0].startswith("    "):
            yield from ("```", *inspect.cleandoc("\n" + paragraph).splitlines(), "```")
        else:
            yield " ".join(line.strip() for line in lines)
        yield ""


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield _row(head)
    yield _row(("---",) * len(head))
    for row in rows:
        yield _row(tuple(cell.replace("|", "\\|").replace("<", "&lt;") for cell in row))
    yield ""


def _row(cells: tuple[str, ...]) -> str:
    return re.sub(r" +", " ", f"| {' | '.join(cells)} |")


# Modules


@cache
def modules() -> str:
    """Return the list of modules by folder, each with the first line of its docstring."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        folders.setdefault(path.parent, []).append(path)
    lines: list[str] = []
    for folder, files in folders.items():
        own = folder / "__init__.py"
        lines += [f"### `{folder.relative_to(DOCS.parent)}/`", "", _summary(own), ""]
        named = [f"`{path.name}`" for path in files if path != own]
        rows = list(zip(named, (_summary(path) for path in files if path != own), strict=True))
        lines += _table(("module", "contents"), rows) if rows else []
    return "\n".join(lines)


def _summary(path: Path) -> str:
    return _first_line(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")


def architecture(text: str) -> str:
    """Return docs/architecture.md with the current list of modules."""
    before, _, rest = text.partition(MODULES_BEGIN)
    _, _, after = rest.partition(MODULES_END)
    return f"{before}{MODULES_BEGIN}\n\n{modules()}\n{MODULES_END}{after}"


def main() -> None:
    """Write both files."""
    REFERENCE.write_text(reference(), encoding="utf-8")
    ARCHITECTURE.write_text(architecture(ARCHITECTURE.read_text(encoding="utf-8")), "utf-8")


if __name__ == "__main__":
    main()
