"""The process that answers questions on the page of a run; `asking.py` starts and ends it.

The process gets the options as an argument in JSON. Each line of stdin is a question in JSON, and
each line of stdout a JSON object with text to add to the answer of the `base` model or of the
`adapter`, the new `status`, `notes` or a `problem`. The process ends when stdin closes or its
parent ends.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

from mlxtune.backend.text.generate import Answer
from mlxtune.config import AnswerConfig
from mlxtune.config.limits import RECORD_LIMITS, parse_json
from mlxtune.core.data.prompt import prompt_of
from mlxtune.core.files.limited_helper import end_with
from mlxtune.errors import MlxTuneError
from mlxtune.session.trained_model import Answerers, UseSession, check_prompt_length
from mlxtune.views.console import RunConsole

_NAMES = {False: "base", True: "adapter"}


def answer_questions(options: dict[str, Any], questions: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Answer each question; yield lines for the page. Raises MlxTuneError if loading fails."""
    session = UseSession(AnswerConfig(**options), RunConsole(quiet=True))
    session.reader.require_template()
    loaded = session.load()
    answerers = Answerers(session, loaded)
    for question in questions:
        yield {"status": "answering"}
        try:
            text = parse_json(question.encode(), RECORD_LIMITS, "the question")
            content = {"messages": [{"role": "user", "content": text}]}
            prompt = prompt_of(session.reader.encoder, content, "the question")
            check_prompt_length(prompt, loaded.base, "the question")
            for on, piece in answerers.answer({False: prompt, True: prompt}):
                if not isinstance(piece, Answer):
                    yield {_NAMES[on]: piece}
                elif piece.finish_reason == "length":
                    yield {"notes": [f"the {_NAMES[on]}'s answer was cut off"]}
        except MlxTuneError as problem:
            yield {"problem": str(problem)}
        yield {"status": ""}


def main(out: TextIO) -> None:
    """Answer the questions on stdin."""
    MlxTuneError.names_flags = True
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    options = parse_json(sys.argv[1].encode(), RECORD_LIMITS, "the options")
    try:
        for line in answer_questions(options, iter(sys.stdin.readline, "")):
            print(json.dumps(line), file=out, flush=True)
    except MlxTuneError as problem:
        print(json.dumps({"problem": str(problem), "status": ""}), file=out, flush=True)


if __name__ == "__main__":
    # Keep the output of libraries out of the JSON lines.
    out, sys.stdout = sys.stdout, sys.stderr
    main(out)
