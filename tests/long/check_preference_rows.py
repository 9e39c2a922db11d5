"""Compare generated pairs with TRL's: rows, masks and log-probabilities.

    python -m tests.long.check_preference_rows [--pairs 10000]

`--pairs` pairs use tiny tokenizers, with log-probabilities of tiny models of three families; as
many pairs use the templates of ../shared with a real vocabulary, in every thinking mode. Needs
torch and trl, as tests/interop does.

Results: docs/preferences.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.backend.text.turns import write_folders
from tests.interop.trl_rows import compare_logps, compare_rows, compare_texts, generated
from tests.models import CHATML, THINKING, write_model
from tests.paths import SHARED

# A model type, a template, and whether thinking is on (None if the template has no thinking).
_TINY: tuple[tuple[str, str, bool | None], ...] = (
    ("llama", CHATML, None),
    ("qwen3", THINKING, False),
    ("gemma3_text", THINKING, True),
)


def main() -> int:
    import datasets

    warnings.simplefilter("ignore")
    datasets.disable_progress_bars()
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10_000)
    pairs, failed = parser.parse_args().pairs, 0
    with tempfile.TemporaryDirectory() as name:
        for checks in (tiny, real):
            total, worst = Counter[str](), 0.0
            for said, counts, deviation in checks(Path(name), pairs):
                failed += counts is None
                total += counts or Counter()
                worst = max(worst, deviation)
                print(said, flush=True)
            print(
                f"all {checks.__name__}: {dict(total)}, log-probabilities {worst:.1e}", flush=True
            )
            failed += worst > 1e-4 or total["pairs"] < pairs
    return 1 if failed else 0


Checked = tuple[str, Counter[str] | None, float]


def tiny(parent: Path, pairs: int) -> Iterator[Checked]:
    """Yield the results of comparing pairs under tiny tokenizers."""
    share = -(-pairs // len(_TINY))
    for seed, (family, template, thinking) in enumerate(_TINY, start=1):
        folder = write_model(parent / family, family)
        (folder / "chat_template.jinja").write_text(template)
        yield _checked(folder, share, seed, thinking, family)


def real(parent: Path, pairs: int) -> Iterator[Checked]:
    """Yield the results of comparing pairs under the models' real templates."""
    modes = [
        (folder, thinking)
        for folder in write_folders(SHARED, parent).values()
        for thinking in ((True, False) if folder.template.asks_for_thinking else (None,))
    ]
    for seed, (folder, thinking) in enumerate(modes, start=100):
        yield _checked(folder.path, -(-pairs // len(modes)), seed, thinking)


def _checked(
    folder: Path, pairs: int, seed: int, thinking: bool | None, family: str = ""
) -> Checked:
    import transformers

    since = time.perf_counter()
    # Gemma's template accepts no system message.
    options: dict[str, Any] = {"seed": seed, "system": folder.name != "gemma.jinja"}
    rows = generated(pairs, **options, longest=10 if family else 40)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    counts: Counter[str] | None = None
    data, worst = folder / "pairs.jsonl", 0.0
    try:
        counts, same = compare_rows(folder, tokenizer, rows, data, thinking)
        counts["texts"] = compare_texts(folder, rows, data)
        worst = compare_logps(family, same) if family else 0.0
        said = f"{dict(counts)}, log-probabilities {worst:.1e}"
    except AssertionError as error:
        said, counts = f"MISMATCH {error}", None
    seconds = time.perf_counter() - since
    return f"{folder.name}, thinking {thinking}: {said} in {seconds:.0f}s", counts, worst


if __name__ == "__main__":
    sys.exit(main())
