"""Compare every turn of ../shared/chat, under every template there, with transformers.

    python -m tests.long.check_templates

In every thinking mode of the template, the prompt tokens must equal the result of
`apply_chat_template` for the messages before the turn, and the supervised tokens must decode to the
turn's content and end-of-turn token. Takes minutes; the tests compare a part of the data.

Results: docs/encoding.md.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from tests.backend.text.turns import compare, write_folders
from tests.paths import SHARED


def main() -> int:
    warnings.simplefilter("ignore")
    total, failed = Counter[str](), 0
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        for file, folder in write_folders(SHARED, Path(name)).items():
            for mode in folder.template.modes:
                counts, since = Counter[str](), time.perf_counter()
                for data in sorted((SHARED / "chat").glob("*.jsonl")):
                    try:
                        counts += compare(folder, mode, data)
                    except AssertionError as error:
                        failed += 1
                        print(f"MISMATCH {error}", flush=True)
                said = ", ".join(f"{number:,} {what}" for what, number in counts.items())
                seconds = time.perf_counter() - since
                print(f"{file}, thinking {mode}: {said} in {seconds:.0f}s", flush=True)
                total += counts
    said = ", ".join(f"{number:,} {what}" for what, number in total.items())
    print(f"all: {said} in {time.perf_counter() - started:.0f}s; {failed} mismatches")
    return 1 if failed or not total["turns"] else 0


if __name__ == "__main__":
    sys.exit(main())
