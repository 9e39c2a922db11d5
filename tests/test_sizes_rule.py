"""The package reads files only within size limits; exceptions are listed here with reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.sources import PACKAGE, tree_of

# Calls that read a whole file, or build objects from its content.
READS = {
    *("json.load", "json.loads", "np.load", "numpy.load", "pickle.load", "pickle.loads"),
    *("mx.load", "safetensors.safe_open", "safe_open", "load_file", "yaml.load", "tomllib.load"),
    *("tomllib.loads", "load_config", "shutil.copyfile", "shutil.copytree", "hashlib.file_digest"),
}
# Methods that are bounded only with an argument that limits the size.
METHODS = {"read_text", "read_bytes", "read"}

OWN_CHILD = "from a process that this one started, in a folder that nobody else knows"
PACKAGED = "part of an installed package"
SYSTEM = "a file of the operating system, or of mlx.launch"
LIMITED_PROCESS = "in a process whose memory and time are limited"
LINE = "a line of bounded length from such a process"
PEERS = "from the other workers, which run the same command"
ALLOWED: dict[str, dict[str, str]] = {
    # Bounded readers
    "errors.py": {"json.loads": "a value that this process has just quoted"},
    "config/limits.py": {"json.loads": "the bounded reader: values are counted before"},
    "config/config_file.py": dict.fromkeys(("yaml.load", "tomllib.loads"), "64 KB at most"),
    "core/run/progress.py": {"json.loads": "a line below 4 KB, others by parse_json"},
    "core/files/lock.py": {"json.loads": "a note of which at most some KB are read"},
    "backend/adapters/adapter_folder.py": {
        "mx.load": "after the header was checked",
        "json.loads": "the header of what this process has just made",
    },
    "backend/adapters/fusing.py": {"mx.load": "lazily, after open_base has checked the headers"},
    "backend/models/model_folder.py": {"load_config": "after check_files has read the same files"},
    "hub/client.py": {"read": "through a stream with a limit, put in place just before"},
    "core/files/reading.py": {
        "hashlib.file_digest": "by pieces, after the blocks were checked",
        "read_text": SYSTEM,
    },
    "core/files/tensor_files.py": {"safe_open": "the header's size was checked just before"},
    "core/files/hashing.py": {"json.loads": "a header that read_header has checked just before"},
    # Other processes
    "core/data/sources/rows.py": {"json.loads": LINE},
    "backend/text/chat_template.py": {"json.loads": LINE},
    "backend/text/template_helper.py": {"json.loads": LIMITED_PROCESS},
    "backend/text/tokenizer_helper.py": dict.fromkeys(
        ("json.loads", "read_bytes"), LIMITED_PROCESS
    ),
    "benchmark/bench.py": dict.fromkeys(("json.loads", "read"), OWN_CHILD),
    "benchmark/bench_helper.py": dict.fromkeys(("pickle.loads", "read_bytes"), OWN_CHILD),
    "core/files/processes.py": {"read_bytes": OWN_CHILD},
    "core/machine/facts.py": {"json.loads": OWN_CHILD},
    "diagnosis/workbench.py": dict.fromkeys(("json.loads", "read_text", "read_bytes"), OWN_CHILD),
    "backend/workers/launch.py": {"json.loads": PEERS},
    "backend/workers/heartbeat.py": {"json.loads": PEERS, "read_text": SYSTEM},
    "views/run_text.py": {"json.loads": "a row of the demonstration's own data"},
    "session/memory_planning.py": {"json.loads": PEERS},
    "commands/push.py": {"read_text": "the card that this command has just written"},
    "hub/upload.py": {"read_text": PACKAGED},
    "core/data/template.py": {"read_text": PACKAGED},
    "backend/text/tokenizer.py": {
        "json.loads": LINE,
        "read": "what this process wrote to stderr meanwhile",
    },
    "rewards/reward_helper.py": {"json.loads": "a line that its parent has sent"},
    # The machine
    "commands/demo.py": {"read_text": PACKAGED},
    "core/machine/blas.py": {"read_text": PACKAGED},
    "core/files/limited_helper.py": {"read_text": SYSTEM},
    "backend/workers/environment.py": {"read_text": SYSTEM},
}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def reads_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each unbounded read, called or passed as a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _dotted(node) in READS:
            yield node.lineno, _dotted(node)
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            last = name.rpartition(".")[2]
            if last in {"load_config", "safe_open", "load_file"}:
                yield node.lineno, last
            # core/files/reading.py's functions read up to a gigabyte without a limit.
            if name in ("read_text", "read_bytes") and len(node.args) == 1 and not node.keywords:
                yield node.lineno, name
            # The functions of the module `reading` take limits.
            limited = last == "read" and (node.args or node.keywords)
            bounded = name.startswith("reading.") or limited
            if isinstance(node.func, ast.Attribute) and last in METHODS and not bounded:
                yield node.lineno, last


def test_every_read_is_bounded_or_has_a_reason() -> None:
    found: dict[str, set[str]] = {}
    problems = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for line, call in reads_in(tree_of(path)):
            found.setdefault(name, set()).add(call)
            if call not in ALLOWED.get(name, {}):
                problems.append(f"{name}:{line}: {call}: use core/files/reading.py")
    assert problems == []
    left = {
        f"{name}: {call}"
        for name, calls in ALLOWED.items()
        for call in calls.keys() - found.get(name, set())
    }
    assert left == set(), "exceptions that nothing needs any more"


def test_reads_that_bypass_the_rule_are_found() -> None:
    source = """
import json, mx
from pathlib import Path
json.loads(Path("a").read_text())
Path("a").read_bytes()
open("a").read()
open("a").read(10)
map(json.loads, [])
mx.load("a")
safe_open("a")
reading.read_text(path, limits)
read_text(path, limits)
read_bytes(path)
"""
    found = sorted(name for _, name in reads_in(ast.parse(source)))
    expected = ["json.loads"] * 2 + ["mx.load", "read"]
    assert found == [*expected, "read_bytes", "read_bytes", "read_text", "safe_open"]
