"""Users' reward functions, however they behave: nothing is lost, and the others are scored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.prompt import PromptRow
from mlxtune.core.run.sampled_answers import GroupRecord, SampleRecord
from mlxtune.errors import ConfigError
from mlxtune.rewards.functions import _BUILT_IN, RewardSpec, parse_rewards
from mlxtune.rewards.scoring import Reward, RewardScorer, with_remedy
from tests.core.files.test_processes import alive
from tests.waiting import SECONDS, wait_until

# Each function is the behavior that a completion names.
SOURCE = """
import copy, json, math, os, pickle, random, signal, subprocess, sys, threading, time
import beside

def reward(prompt, completion, row):
    return globals()[completion](row)

def fine(row): return row["n"]
def beside_it(row): return beside.VALUE
def library(row):
    import click, colorsys
    return hasattr(json, "loads") and hasattr(colorsys, "rgb_to_hls") and hasattr(click, "echo")
def yes(row): return True
def numpy(): import numpy; return numpy
def float32(row): return numpy().float32(0.25)
def int64(row): return numpy().int64(7)
def true_of_numpy(row): return numpy().bool_(True)
def text(row): return "1.0"
def none(row): return None
def nan(row): return math.nan
def infinite(row): return -math.inf
def huge(row): return 10**400
def large(row): return 1e50
def array(row): return numpy().zeros(3)
def complex_number(row): return 1j
def raises(row):
    return row["missing"]
def pops(row): return row.pop("missing")
def gets(row): return row.get("missing", row.pop("missing", 8))
def copies(row):
    given = [copy.copy(row), copy.deepcopy(row), pickle.loads(pickle.dumps(row)), {**row}]
    return all(each == row and type(each) is dict for each in given)
async def awaits(row): return 1
def exits(row): sys.exit(3)
def interrupts(row): signal.raise_signal(signal.SIGINT)
class Bad(Exception):
    def __str__(self): raise SystemExit
def bad_error(row): raise Bad
def recursion(row): return recursion(row)
def mutates(row): return len(row.pop("list")) + row.pop("n")
def reads_stdin(row): return len(sys.stdin.read())
def needs_stdin(row): return float(input())
def changes_folder(row): os.chdir("/"); return 1
def sees_folder(row): return os.path.samefile(".", row["folder"])
def handles_signals(row):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, lambda *_: os._exit(9))
    signal.setitimer(signal.ITIMER_REAL, 60)
    return 1
def sees_signals(row):
    return signal.getitimer(signal.ITIMER_REAL) == (0, 0) and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
def closes_streams(row): sys.stdout.close(); sys.stderr.close(); os.close(0); return 1
def prints(row): print("from reward \\x1b[31m", row["n"], "\\udc80"); return 1
def prints_megabytes(row):
    for _ in range(300): os.write(1, b"x" * 10_000)
    return 1
def forks(row): os.fork(); return 2
def forks_and_stays(row):
    if not os.fork(): time.sleep(600)
    return 3
def daemonises(row):
    if not os.fork():
        os.setsid()
        if not os.fork():
            with open(row["pids"], "a") as file: file.write(f"{os.getpid()}\\n")
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not os.path.exists(row["pids"]): time.sleep(0.01)
    return 4
def random_number(row): return random.random() + numpy().random.random()
def order_of_a_set(row): return [*{"a", "b", "c", "d", "e"}].index("a")
def ends(row): os._exit(3)
next_call, waits = threading.Event(), False
def ends_in_the_next_call(row):
    global waits
    waits = True
    threading.Thread(target=lambda: next_call.wait() and os._exit(9), daemon=True).start()
    return 1
def follows(row):
    next_call.set()
    time.sleep(600 * waits)
    return 6
def kills_itself(row): os.kill(os.getpid(), signal.SIGKILL)
def closes_pipes(row): os.closerange(3, 256); return 1
def writes_to_pipes(row):
    for number in range(3, 20):
        try: os.write(number, b"{}\\n")
        except OSError: pass
    return 1
def allocates(row): return len(bytearray(2**40))
def hangs(row):
    while True: pass
def hangs_printing(row):
    while True: print("x" * 1000)
def stops(row): os.kill(os.getpid(), signal.SIGSTOP)
"""
RAISING = SOURCE.splitlines().index('    return row["missing"]') + 1
KEYS = "the row's keys: 'n', 'list', 'folder', 'pids'"
# The rewards of behaviors that have one, and of the others the reason.
VALUES: dict[str, float] = {
    **dict.fromkeys(("fine", "library", "yes", "true_of_numpy", "changes_folder"), 1.0),
    **dict.fromkeys(("sees_folder", "handles_signals", "sees_signals", "closes_streams"), 1.0),
    **dict.fromkeys(("prints", "prints_megabytes", "ends_in_the_next_call"), 1.0),
    **{"follows": 6, "beside_it": 5, "float32": 0.25, "int64": 7, "mutates": 3},
    **{"copies": 1, "gets": 8, "reads_stdin": 0, "forks": 2, "forks_and_stays": 3, "daemonises": 4},
}
WHY = {
    "text": "returned text, not a number",
    "none": "returned None, not a number",
    "nan": "returned nan, not a finite number",
    "infinite": "returned -inf, not a finite number",
    "huge": "returned inf, not a finite number",
    "large": "returned 1e+50: return a number up to 1e+38",
    "array": "returned ndarray, not a number",
    "complex_number": "returned complex, not a number",
    "raises": f"raised KeyError: 'missing' (line {RAISING}; {KEYS})",
    "pops": f"raised KeyError: 'missing' (line {RAISING + 1}; {KEYS})",
    "awaits": "returned a coroutine, not a number: define it without async",
    "exits": "raised SystemExit: 3",
    "interrupts": "raised KeyboardInterrupt",
    "bad_error": "raised Bad",
    "recursion": "raised RecursionError",
    "needs_stdin": "raised EOFError",
    "ends": "ended its process with exit status 3",
    "kills_itself": "ended its process with exit status -9",
    "closes_pipes": "closed the pipe of its results",
    "writes_to_pipes": "wrote to the pipe of its results",
    "allocates": "took more than 4 GB of memory",
}
# A row, and the text of an answer to it.
Answer = tuple[PromptRow, str]
HANGS = ("hangs", "hangs_printing", "stops")
REPEATED = ("random_number", "order_of_a_set")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the functions, a module beside them, and files of the library's names."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "check.py").write_text(SOURCE)
    (folder / "beside.py").write_text("VALUE = 5\n")
    for name in ("json", "colorsys", "click", "numpy"):
        (folder / f"{name}.py").write_text("raise SystemError('takes the place of another')\n")
    return folder


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Iterator[RewardScorer]:
    """A scorer whose functions have all the time that they need."""
    check = RewardSpec.parse(f"{folder}/check.py")
    with RewardScorer([check, RewardSpec.parse("length:4=2")], SECONDS) as scorer:
        yield scorer


def score(scorer: RewardScorer, answers: list[Answer]) -> list[Reward]:
    return [scorer.score(row, text) for row, text in answers]


def completions(folder: Path, *names: str) -> list[Answer]:
    row = {"n": 1, "list": [1, 2], "folder": str(Path.cwd()), "pids": str(folder / "pids")}
    return [completion(row, name, line) for line, name in enumerate(names, start=1)]


def completion(row: dict[str, Any], text: str = "", line: int = 1, ask: str = "Do it.") -> Answer:
    prompt = [{"role": "user", "content": ask}]
    return PromptRow(prompt, None, row, Path("rows.jsonl"), line), text


def value(reward: Reward) -> float | None:
    return reward.values["check.reward"]


def test_numbers_are_rewards_despite_side_effects(scorer: RewardScorer, folder: Path) -> None:
    scored = score(scorer, completions(folder, *VALUES))
    assert [reward.problems for reward in scored] == [()] * len(VALUES)
    assert dict(zip(VALUES, map(value, scored), strict=True)) == VALUES
    for reward in scored:
        assert reward.total == reward.values["check.reward"] + 2 * reward.values["length:4"]  # type: ignore[operator]


def test_other_results_have_a_problem_naming_row_and_function(
    scorer: RewardScorer, folder: Path
) -> None:
    names = [name for done in WHY for name in (done, "fine")]
    scored = score(scorer, completions(folder, *names))
    for line, (name, reward) in enumerate(zip(names, scored, strict=True), start=1):
        if name == "fine":
            assert (value(reward), reward.problems) == (1, ())
        else:
            assert (value(reward), reward.total) == (None, None)
            assert reward.values["length:4"] == min(1, 4 / len(name))
            (problem,) = reward.problems
            assert problem.startswith(f"rows.jsonl:{line}: reward check.reward: {WHY[name]}")


def test_function_that_hangs_is_ended_and_the_rest_is_scored(
    scorer: RewardScorer, folder: Path
) -> None:
    for name in HANGS:
        scorer._start()
        scorer._timeout = 0.1
        (reward,) = score(scorer, completions(folder, name))
        scorer._timeout = SECONDS
        assert value(reward) is None
        assert reward.problems == (
            "rows.jsonl:1: reward check.reward: took more than 0.1 s: make it faster, or raise "
            "--reward-timeout",
        )
        (reward,) = score(scorer, completions(folder, "fine"))
        assert value(reward) == 1


@pytest.mark.slow
def test_rewards_depend_on_neither_order_nor_process(folder: Path, scorer: RewardScorer) -> None:
    names = [*REPEATED, "fine", "changes_folder", "sees_folder", "mutates", "handles_signals"]
    names += ["sees_signals", "raises", "ends", "nan", "closes_streams", "closes_pipes", "fine"]
    answers = completions(folder, *names)
    first = score(scorer, answers)
    assert 0 < (value(first[0]) or 0) < 2
    assert score(scorer, answers[::-1])[::-1] == first
    with RewardScorer([RewardSpec.parse(f"{folder}/check.py")], SECONDS) as new:
        assert list(map(value, score(new, answers[:2]))) == list(map(value, first[:2]))
    (other,) = score(scorer, [completion({**answers[0][0].row}, REPEATED[0], ask="Other.")])
    assert value(other) != value(first[0])


def test_forks_do_not_answer(folder: Path, scorer: RewardScorer) -> None:
    """The process need not be replaced, as it must be if replies are confused."""
    score(scorer, completions(folder, "fine"))
    process = scorer._process
    scored = score(scorer, completions(folder, *["forks", "fine"] * 3))
    assert list(map(value, scored)) == [2, 1] * 3
    assert scorer._process is process


def test_output_is_passed_on_up_to_a_limit(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with RewardScorer([RewardSpec.parse(f"{folder}/check.py")], SECONDS) as scorer:
        score(scorer, completions(folder, "prints_megabytes", "prints"))
    shown = capfd.readouterr().err
    assert 2**16 < len(shown) < 2**16 + 100
    assert shown.endswith("\nreward functions print more than 65,536 bytes: not shown\n")


def test_output_does_not_control_the_terminal(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with RewardScorer([RewardSpec.parse(f"{folder}/check.py")], SECONDS) as scorer:
        score(scorer, completions(folder, "prints"))
    assert capfd.readouterr() == ("", "from reward \\x1b[31m 1 \\udc80\n")


def test_processes_of_functions_end_with_the_scorer(folder: Path) -> None:
    pids = folder / "pids"
    pids.unlink(missing_ok=True)
    with RewardScorer([RewardSpec.parse(f"{folder}/check.py")], SECONDS) as scorer:
        score(scorer, completions(folder, "forks_and_stays", "daemonises"))
        daemons = list(map(int, pids.read_text().split()))
        assert all(map(alive, daemons))
    wait_until(lambda: not any(map(alive, daemons)))


def test_file_is_read_once(tmp_path: Path) -> None:
    """A process that is started again must not call another version."""
    file = tmp_path / "check.py"
    file.write_text(
        "import os\ndef reward(prompt, completion, row): return 1 if row else os.abort()"
    )
    with RewardScorer([RewardSpec.parse(str(file))], SECONDS) as scorer:
        file.write_text("def reward(prompt, completion, row): return 2")
        rows: list[dict[str, Any]] = [{}, {"n": 1}]
        scored = score(scorer, list(map(completion, rows)))
    assert [reward.total for reward in scored] == [None, 1]


def test_several_functions_of_several_files_are_weighted(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "def a(prompt, completion, row): return len(completion)\n"
        "def b(row, completion, prompt): return len(prompt)\n"
    )
    (tmp_path / "two.py").write_text(
        "def a(prompt, completion, row, more=1):\n"
        "    return len(prompt) + 10 * len(completion) + 100 * len(row)\n"
    )
    texts = ("one.py:a", "two.py:a=0.5", "one.py:b=-1")
    with RewardScorer(
        [RewardSpec.parse(f"{tmp_path}/{text}") for text in texts], SECONDS
    ) as scorer:
        (reward,) = score(scorer, [completion({"k": 1}, "de", ask="abc")])
    assert reward.values == {"one.a": 2, "two.a": 123, "one.b": 3}
    assert reward.total == 2 + 61.5 - 3


@pytest.mark.parametrize("weight", ["1e308", "1e10", "-1e2"])
def test_sum_beyond_the_range_of_records_is_not_a_reward(tmp_path: Path, weight: str) -> None:
    (tmp_path / "check.py").write_text("def reward(prompt, completion, row): return 9e37")
    with RewardScorer([RewardSpec.parse(f"{tmp_path}/check.py={weight}")], SECONDS) as scorer:
        (reward,) = score(scorer, [completion({})])
    assert (reward.values, reward.total) == ({"check.reward": 9e37}, None)
    assert reward.problems[0].startswith("rows.jsonl:1: the sum of the rewards is ")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (None, "cannot be read: No such file"),
        ("def reward(:", "raised SyntaxError: invalid syntax (check.py, line 1)"),
        ("x = 1\nimport missing", "raised ModuleNotFoundError: No module named 'missing' (line 2)"),
        ("x = 1", "has no function reward: define reward(prompt, completion, row)"),
        (
            "from os import fsync\n"
            "def parse(text): ...\n"
            "def _own(prompt, completion, row): ...\n"
            "def right(prompt, completion, row): ...",
            "has no function reward (did you mean check.py:right?): define reward(prompt, ",
        ),
        ("reward = 1", "has a reward that is not a function: define reward(prompt, "),
        ("reward = None", "has a reward that is not a function: define reward(prompt, "),
        (
            "def reward(a): ...",
            "has the function reward(a): define reward(prompt, completion",
        ),
        ("import os\nos._exit(5)", "ended its process with exit status 5"),
        ("# coding: nothing", "raised SyntaxError: unknown encoding: nothing"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_file_that_cannot_be_used_is_an_error_at_the_start(
    tmp_path: Path, source: str | None, problem: str
) -> None:
    if source is not None:
        (tmp_path / "check.py").write_text(source)
    with pytest.raises(ConfigError) as raised:
        RewardScorer([RewardSpec.parse(f"{tmp_path}/check.py")], SECONDS).__enter__()
    assert problem in str(raised.value)
    assert "check.py" in str(raised.value)


# Every text that reaches us from a file of functions has half a surrogate pair.
HALVES = r"""
import os
class Named(type):
    __name__ = property(lambda self: "Odd\udc80")
class Odd(Exception, metaclass=Named): pass
def reward(prompt, completion, row): return globals()[completion](row)
def message(row): raise ValueError("half \udc80")
def name(row): raise Odd
def returned(row): return Odd()
def printed(row): os.write(2, b"half \xed\xb2\x80"); raise ValueError
"""


def test_text_from_functions_is_valid_unicode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "check.py"
    file.write_text(HALVES)
    names = ("message", "name", "returned", "printed")
    with RewardScorer([RewardSpec.parse(str(file))], SECONDS) as scorer:
        rewards = [scorer.score(*completion({}, name)) for name in names]
    for reward in rewards:
        tokens = (1,), (-1.0,)
        sample = SampleRecord(*tokens, "", True, reward.values, None, problems=reward.problems)
        group = GroupRecord(1, "rows.jsonl:1", 0, 0, "a", "", (1,), (sample,))
        assert json.loads(group.as_json())["samples"][0]["problems"] == list(reward.problems)
    assert r"raised ValueError: half \udc80 (line 7)" in rewards[0].problems[0]
    assert r"raised Odd\udc80" in rewards[1].problems[0]
    assert r"returned Odd\udc80, not a number" in rewards[2].problems[0]
    assert capsys.readouterr().err.encode().startswith(b"half ")


def test_text_of_a_failed_import_is_valid_unicode(tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text(r"raise ValueError('half \udc80')")
    with pytest.raises(ConfigError) as raised:
        RewardScorer([RewardSpec.parse(f"{tmp_path}/check.py")], SECONDS).__enter__()
    assert str(raised.value).encode().endswith(rb"raised ValueError: half \udc80 (line 1)")


class Answering:
    """A process that answers with a given line; a new one imports its functions."""

    answer = b""

    def __init__(self, *arguments: object, **options: object) -> None:
        self._lines = iter((b"{}", self.answer))

    def read_line(self, *arguments: object, **options: object) -> bytes:
        return next(self._lines)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    "answer",
    [
        *(b'{"id": %d, "value": ' + value for value in (b"NaN}", b'"1"}', b"true}", b"[]}")),
        *(b"[]", b"[" * 60_000, b'{"id": %d}', b'{"id": %d, "error": 5}', b'"\xff"', b"{}"),
    ],
    ids=lambda value: value[:20].decode(errors="replace"),
)
def test_reply_in_another_form_gives_no_reward(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr("mlxtune.rewards.scoring.LimitedProcess", Answering)
    with RewardScorer([RewardSpec.parse(f"{folder}/check.py")], 1) as scorer:
        monkeypatch.setattr(Answering, "answer", answer.replace(b"%d", b"0"))
        scorer._close()
        (reward,) = score(scorer, completions(folder, "fine"))
    assert reward.problems == (
        "rows.jsonl:1: reward check.reward: wrote to the pipe of its results",
    )


@pytest.mark.parametrize("kills", [1, 2])
def test_process_that_is_killed_while_it_imports_is_started_once_more(
    tmp_path: Path, kills: int
) -> None:
    (tmp_path / "check.py").write_text(
        "import os, pathlib, signal\n"
        f"marks = pathlib.Path({str(tmp_path)!r})\n"
        f"if len([*marks.glob('*.mark')]) < {kills}:\n"
        "    (marks / f'{os.getpid()}.mark').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def reward(prompt, completion, row): return 1\n"
    )
    scorer = RewardScorer([RewardSpec.parse(f"{tmp_path}/check.py")], SECONDS)
    if kills == 1:
        with scorer:
            assert scorer.score(*completion({})).total == 1
    else:
        with pytest.raises(ConfigError, match="ended its process with exit status -9"):
            scorer.__enter__()
    assert len([*tmp_path.glob("*.mark")]) == kills


@pytest.mark.parametrize(
    ("named", "meant"),
    [(":totl", ":total"), (":wonder", None), ("", None), (":CONSTANT", None)],
)
def test_missing_function_names_a_similar_one(
    tmp_path: Path, named: str, meant: str | None
) -> None:
    (tmp_path / "check.py").write_text(
        "CONSTANT = 1\n"
        "def other(prompt, completion, row): ...\n"
        "def total(prompt, completion, row): ...\n"
    )
    with pytest.raises(ConfigError) as raised:
        RewardScorer([RewardSpec.parse(f"{tmp_path}/check.py{named}")], SECONDS).__enter__()
    kind = "has a CONSTANT that is not a function" if "C" in named else "has no function"
    assert kind in str(raised.value)
    asked = f" (did you mean check.py{meant}?)" if meant else ""
    assert f"{asked}: define " in str(raised.value)
    assert ("did you mean" in str(raised.value)) == bool(asked)


# Each way in which a function may fail, and whether the answer can be the cause.
FAILURES = {
    "float(completion)": True,
    "json.loads(completion)['answer']": True,
    "{}['answer']": True,
    "re.match('a', completion).group()": True,
    "completion.split()[3]": True,
    "1 / (len(completion) - 2)": True,
    "eval(completion[0])": True,
    "int('9' * 5000)": True,
    "row['answer']": False,
    "row.pop('answer')": False,
    "undefined": False,
    "json.load_s(completion)": False,
    "__import__('missing')": False,
    "open('missing.txt')": False,
    "sys.exit()": False,
    "signal.raise_signal(signal.SIGINT)": False,
    "None": False,
}


def test_advice_is_added_if_the_answer_can_be_the_cause(tmp_path: Path) -> None:
    functions = "".join(
        f"def f{i}(prompt, completion, row): return {each}\n" for i, each in enumerate(FAILURES)
    )
    (tmp_path / "check.py").write_text(f"import json, re, signal, sys\n{functions}")
    specs = [RewardSpec.parse(f"{tmp_path}/check.py:f{i}") for i in range(len(FAILURES))]
    with RewardScorer(specs, SECONDS) as scorer:
        reward = scorer.score(*completion({}, "{}"))
    advised = [with_remedy(each) != each for each in reward.problems]
    assert dict(zip(FAILURES, advised, strict=True)) == FAILURES, reward.problems


def test_two_rewards_of_one_name_are_an_error() -> None:
    with pytest.raises(ConfigError, match="the same name"):
        RewardScorer([RewardSpec.parse("exact"), RewardSpec.parse("exact=2")], 1)


def test_built_in_rewards_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtune.rewards.scoring.LimitedProcess", None)
    with RewardScorer([RewardSpec.parse("exact")], 1) as scorer:
        rows = [PromptRow([], answer, {}, Path("rows.jsonl"), 3) for answer in ("5", None)]
        right, none = score(scorer, [(row, "5") for row in rows])
    assert right.total == 1
    assert none.problems == ("rows.jsonl:3: reward exact: the row has no answer to compare with",)
    every = [f"{kind}=5=1" if kind == "regex" else kind for kind in _BUILT_IN]
    with RewardScorer(parse_rewards(every), 1) as scorer:
        row = PromptRow([], '{"5": 5}', {}, Path("rows.jsonl"), 1)
        assert set(scorer.score(row, '{"5": 5}').values.values()) == {1}
