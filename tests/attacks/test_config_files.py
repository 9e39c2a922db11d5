"""Strangers' config files: each causes a one-line error that names the file or the option."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.attacks.attack import attack, refused
from tests.command import Cli
from tests.slow import slow

DIGITS = "9" * 5000


def doubling(*, merged: bool, lines: int = 40) -> str:
    """Return lines of YAML, each of which contains the previous line's value twice."""
    text = "a0: &a0 {x: 1}\n" if merged else "a0: &a0 [x]\n"
    for line in range(1, lines):
        before = f"[*a{line - 1}, *a{line - 1}]"
        text += f"a{line}: &a{line} " + (f"{{<<: {before}}}\n" if merged else f"{before}\n")
    return text


NOT_YAML, NOT_TOML, NO_OPTION = "is not valid YAML", "is not valid TOML", "has no option"
YAML = {
    # Numbers
    "digits": (f"rank: {DIGITS}", "--rank must be a whole number"),
    "negative": (f"rank: -{DIGITS}", "--rank must be a whole number"),
    "of a float": (f"lr: {DIGITS}", "--lr must be a finite number"),
    "after the point": (f"lr: 0.{DIGITS}9", "--model-path is required"),
    "underscores": ("rank: " + "_".join("1" * 5000), "--rank must be a whole number"),
    "hexadecimal": ("rank: 0x" + "f" * 5000, "--rank must be a whole number"),
    "octal": ("rank: 0" + "7" * 5000, "--rank must be a whole number"),
    "binary": ("rank: 0b" + "1" * 50_000, "--rank must be a whole number"),
    "tagged": (f"rank: !!int {DIGITS}", NOT_YAML),
    "tagged hexadecimal": ("rank: !!int 0x" + "f" * 5000, "--rank must be a whole number"),
    "tagged, of a float": ("lr: !!int 0x" + "f" * 5000, "--lr must be a number"),
    "in a list": (f"targets: [{DIGITS}]", "--model-path is required"),
    "tagged in a list": ("targets: [!!int 0x" + "f" * 5000 + "]", "--targets must be names"),
    "tagged for a name": ("target_rank: {q: !!int 0x" + "f" * 5000 + "}", "--target-rank must"),
    "quoted": (f"rank: '{DIGITS}'", "--rank must be a whole number"),
    "as a name": ("? " + "9" * 5000 + "\n: 1", "has no option '999"),
    "exponent": ("lr: 1.0e+99999999", "--lr must be a finite number"),
    "infinite": ("lr: .inf", "--lr must be a number, not '.inf'"),
    "no digits": ("rank: 0x_", "--rank must be a whole number, not '0x_'"),
    # Sexagesimals and dates
    "sexagesimal": ("rank: " + ":".join(["59"] * 5000), "--rank must be a whole number"),
    "sexagesimal float": ("lr: " + ":".join(["59"] * 5000) + ".5", "--lr must be a number"),
    "long sexagesimal": ("lr: 1" + ":59" * 20_000, "--lr must be a number"),
    "tagged sexagesimal": ("rank: !!int 1" + ":59" * 20_000, "--rank must be a whole number"),
    "tagged sexagesimal float": ("lr: !!float 1" + ":59" * 20_000, NOT_YAML),
    "date": ("seed: 2024-13-45", "--seed must be a whole number, not '2024-13-45'"),
    "date for text": ("dtype: 2024-01-01", "--dtype must be one of"),
    "time zone": ("seed: 2001-12-14t21:59:43.10-99:99", "--seed must be a whole number"),
    # Merge keys and aliases
    "merged": (doubling(merged=True), "has no option 'a0'"),
    "merged for an option": (doubling(merged=True) + "target_rank: *a39", "--target-rank must"),
    "merged alone": ("<<: [" + "{a: 1}, " * 5000 + "]", "has no option '<<'"),
    "merge by tag": ("!!merge x: {rank: 8}", NOT_YAML),
    "value by tag": ("rank: !!value {=: 1}", NOT_YAML),
    "repeated": (doubling(merged=False), "30 more unknown options"),
    "repeated for names": (doubling(merged=False) + "targets: *a39", "--targets must be names"),
    "repeated for paths": (doubling(merged=False) + "data: *a39", "--data must be text"),
    "repeated for a name": (doubling(merged=False) + "target_rank: {q: *a39}", "--target-rank"),
    "repeated for text": (doubling(merged=False) + "output: *a39", "--output must be text"),
    "repeated as a key": (doubling(merged=False) + "? *a39\n: 1", NOT_YAML),
    "within itself": ("targets: &a [*a]", "--targets must be names"),
    "mapping within itself": ("target_rank: &a {x: *a}", "--target-rank must have"),
    "key within itself": ("&a ? *a\n: 1", NOT_YAML),
    # Tags
    "tagged text": ("rank: !!int x", NOT_YAML),
    "tagged nothing": ('rank: !!int ""', NOT_YAML),
    "tagged bool": ("dora: !!bool maybe", NOT_YAML),
    "tagged date": ("rank: !!timestamp x", NOT_YAML),
    "tagged list": ("rank: !!int [1]", NOT_YAML),
    "tagged bytes": ("output: !!binary AAA", NOT_YAML),
    "bytes for text": ("output: !!binary AAAA", "--output must be text"),
    "pairs": ("data: !!pairs [a]", NOT_YAML),
    "set": ("data: !!set {a, b}", "--data must be text or a list of texts"),
    "code": ("rank: !!python/object/apply:os.system [touch pwned]", NOT_YAML),
    "new object": ("rank: !!python/object/new:os.system [touch pwned]", NOT_YAML),
    # Characters
    "escape": ('output: "\\UFFFFFFFF"', NOT_YAML),
    "control": ("rank: \x01", NOT_YAML),
    "terminal": ('"\\e]0;pwned\\a": 1', "has no option"),
    # Size
    "nested": ("targets: " + "[" * 30_000, NOT_YAML),
    "nested mappings": ("{a: " * 15_000, NOT_YAML),
    "many in nested": ("targets: " + "[" * 300 + "a," * 30_000, NOT_YAML),
    "many keys": ("".join(f"k{n}: 1\n" for n in range(7000)), "6,990 more unknown options"),
    "long key": ("? " + "x" * 60_000 + "\n: 1", "has no option 'xxx"),
    "near misses": ("".join(f"rank{'k' * n}: 1\n" for n in range(300)), "more unknown options"),
    "large": ("rank: " + "1" * 70_000, "is larger than 64 KB"),
}
TOML = {
    "digits": (f"rank = {DIGITS}", "a number has too many digits"),
    "negative": (f"rank = -{DIGITS}", "a number has too many digits"),
    "underscores": ("rank = " + "1_" * 5000 + "1", "a number has too many digits"),
    "in a list": (f"targets = [{DIGITS}]", "a number has too many digits"),
    "hexadecimal": ("rank = 0x" + "f" * 5000, "--rank must be a whole number"),
    "of a float": ("lr = 0x" + "f" * 5000, "--lr must be a number"),
    "for a name": ("target_rank = {q = 0x" + "f" * 5000 + "}", "--target-rank must have"),
    "for text": ("output = 0x" + "f" * 5000, "--output must be text"),
    "in a list of texts": ("targets = [0x" + "f" * 5000 + "]", "--targets must be names"),
    "float": (f"lr = {DIGITS}.0", "--lr must be a finite number"),
    "exponent": ("lr = 1e99999", "--lr must be a finite number"),
    "quoted": (f'rank = "{DIGITS}"', "--rank must be a whole number"),
    "as a name": (f"{DIGITS} = 1", "has no option '999"),
    "date": ("rank = 1979-05-27", "--rank must be a whole number"),
    "no date": ("rank = 1979-99-99", NOT_TOML),
    "table": ("[rank]\na = 1", "--rank must be a whole number"),
    "dots": ("a" + ".a" * 20_000 + " = 1", "line 1: a key has too many dots"),
    "dots in a table": ("\n[a" + ".a" * 20_000 + "]", "line 2: a key has too many dots"),
    "dots in braces": ("a = {a" + ".a" * 20_000 + " = 1}", "a key has too many dots"),
    "quoted dots": ('"a"' + " . 'a'" * 10_000 + " = 1", "a key has too many dots"),
    "quotes": ("a = " + "\"'" * 30_000, NOT_TOML),
    "word": ("a" * 60_000, NOT_TOML),
    "nested": ("targets = " + "[" * 30_000, NOT_TOML),
    "nested tables": ("a = " + "{a=" * 20_000, NOT_TOML),
    "many tables": ("".join(f"[t{n}]\n" for n in range(7000)), "6,990 more unknown options"),
    "surrogate": ('output = "\\ud800"', NOT_TOML),
    "large": ("rank = " + "1" * 70_000, "is larger than 64 KB"),
}
FILES = {f"{name}.yaml": case for name, case in YAML.items()}
FILES |= {f"{name}.toml": case for name, case in TOML.items()}


SLOW = ("many in nested.yaml", "merged alone.yaml", "nested.yaml")


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in FILES])
def test_strangers_config_file_is_refused_in_one_line(cli: Cli, tmp_path: Path, name: str) -> None:
    text, expected = FILES[name]
    path = tmp_path / f"options{Path(name).suffix}"
    path.write_text(text)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    error = cli("train", "--config", path, "--model-path", "").error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 10
    assert expected in error
    assert len(error) < 3000
    assert error.isprintable()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["merged.yaml", slow("sexagesimal float.yaml"), slow("dots.toml")])
def test_strangers_config_file_takes_little_memory(tmp_path: Path, name: str) -> None:
    text, expected = FILES[name]
    path = tmp_path / f"options{Path(name).suffix}"
    path.write_text(text)
    assert expected in refused(attack("train", "--config", path, "--model-path", "", cwd=tmp_path))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full"])
def test_config_file_without_an_end_is_refused(cli: Cli, path: str) -> None:
    assert "is larger than 64 KB" in cli("train", "--config", path).error
