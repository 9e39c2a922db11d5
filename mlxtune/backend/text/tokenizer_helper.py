"""Script that tokenizer.py runs to try a tokenizer file; imports nothing from mlxtune.

core/files/limited_helper.py runs it under a memory limit. The script prints the problem as JSON, or
null.
"""

import json
import math
import os
import signal
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The maximum CPU time, in seconds, for loading a tokenizer, and again for trying it.
_SECONDS = 10.0
# The maximum number of characters into which a tokenizer's normalizers may turn one character.
_MAX_GROWTH = 256
_TRIAL_TEXTS = [
    "a",
    string.printable,
    "What is 17 + 25? Das weiß ich nicht. 我们 🦙 שלום",
    *("a" * 4096, " " * 4096, "1" * 4096, "\n" * 4096, "a " * 2048, ".-" * 2048),
]


def prepare() -> Any:
    """Return the libraries `tokenizers` and `sentencepiece`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import sentencepiece
    import tokenizers

    return tokenizers, sentencepiece


def serve(libraries: Any, path: str, most_tokens: str) -> None:
    """Load and try the tokenizer in a file; print the problem as JSON, or null.

    `most_tokens` is the maximum number of added tokens, each of which takes time on every load.
    """
    tokenizers, sentencepiece = libraries
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    problem = None
    try:
        if path.endswith(".json"):
            problem = _problem(json.loads(Path(path).read_bytes()), int(most_tokens))
            if problem is None:
                tokenizer = tokenizers.Tokenizer.from_file(path)
                # FastTokenizer also disables both, even if the file enables them.
                tokenizer.no_truncation()
                tokenizer.no_padding()
                signal.setitimer(signal.ITIMER_PROF, _SECONDS)
                tokenizer.encode_batch(_TRIAL_TEXTS, add_special_tokens=False)
        else:
            processor = sentencepiece.SentencePieceProcessor(model_file=path)
            signal.setitimer(signal.ITIMER_PROF, _SECONDS)
            processor.encode(_TRIAL_TEXTS)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001
        # Only panics of the Rust library are reported; other errors surface when mlxtune loads the
        # file.
        panicked = type(error).__name__ == "PanicException"
        problem = f"is damaged ({error!s:.200})" if panicked else None
    print(json.dumps(problem), flush=True)


def _problem(content: Any, most_tokens: int) -> str | None:
    if (added := len(content.get("added_tokens") or ())) > most_tokens:
        return f"adds {added:,} tokens to its vocabulary, more than {most_tokens:,}"
    growth = math.prod(_growth(content.get("normalizer")))
    if growth > _MAX_GROWTH:
        return f"its normalizer turns a character into up to {growth:.3g} characters"
    return None


def _growth(normalizer: Any) -> Iterator[float]:
    """Yield the maximum number of characters into which each step of a normalizer expands one."""
    if not isinstance(normalizer, dict):
        return
    for step in normalizer.get("normalizers") or ():
        yield from _growth(step)
    content, pattern = normalizer.get("content"), normalizer.get("pattern")
    if isinstance(content, str) and isinstance(pattern, dict):
        text = pattern.get("String")
        # A regular expression may match the empty text between any two characters.
        yield max(1, len(content) / len(text)) if text else 1 + len(content)
    if isinstance(prefix := normalizer.get("prepend"), str):
        yield 1 + len(prefix)
