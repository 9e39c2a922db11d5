"""Templates that hang or fill the memory are stopped; others render as in transformers.

Each template of ATTACKS hung, or took gigabytes, in a process without limits.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from mlxtune.backend.text import chat_template
from mlxtune.backend.text.chat_template import (
    ChatTemplate,
    HarmfulTemplateError,
    TemplateProcess,
    TemplateRequest,
)
from mlxtune.backend.text.template_helper import INVALID, REFUSED, TEXT, Reply
from mlxtune.core.data.problems import BadRowError
from mlxtune.core.files import limited_helper
from mlxtune.core.files.processes import resident_memory
from mlxtune.errors import ModelError
from tests.slow import long_except, slow
from tests.waiting import SECONDS, wait_until

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Be <kind> & brief. "},
    {"role": "user", "content": "What is 1 + 1?\nAnd 'ß'?"},
    {
        "role": "assistant",
        "content": "Two.",
        "tool_calls": [{"function": {"name": "f", "arguments": {"b": [1, 2.5], "a": "ü"}}}],
    },
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}]
LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def lasting() -> Iterator[TemplateProcess]:
    """A process that several tests share, because none of them ends it."""
    process = TemplateProcess()
    yield process
    process.close()


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


@pytest.fixture
def quick() -> Iterator[TemplateProcess]:
    process = TemplateProcess(seconds=0.3)
    yield process
    process.close()


def render(process: TemplateProcess, source: str, messages: Any = MESSAGES, **more: Any) -> Reply:
    (reply,) = process.render(source, [json.dumps({"conversations": [messages], **more})])
    return reply


def doubled(step: str, then: str = "", start: str = "[1]") -> str:
    """Return a template that repeats a step on x and y 99 times, then renders an expression."""
    return (
        f"{{% set ns = namespace(x={start}, y={start}) %}}{{% for i in range(99) %}}"
        f"{{% set ns.x = {step} %}}{{% set ns.y = {step.replace('ns.x', 'ns.y')} %}}"
        f"{{% endfor %}}{then}"
    )


def nested(then: str, start: str = "[1]", around: str = "[ns.x, ns.x]") -> str:
    """Return a template with nested lists of 2^99 items, which share their memory."""
    return doubled(around, then, start)


def in_tuples(then: str) -> str:
    """Return a template with nested tuples, whose hashes are computed again at each use."""
    return nested(then, "(1, 2)", "(ns.x, ns.x)")


BIG = "{% set b = 'a' * 1000000 %}"
ATTACKS = {
    # Time
    "loops": LOOP,
    "macros": "{% macro m(n) %}{% if n %}{{ m(n-1) ~ m(n-1) }}{% endif %}{% endmacro %}{{m(99)}}",
    "strip": "{{ ('a' * 10000000).strip('b' * 5000000 ~ 'a') }}",
    # Text
    "times while compiling": "{{ 'a' * 10000000000 }}",
    "doubled by ~": doubled("ns.x ~ ns.x", start="'a'"),
    "doubled in blocks": "{% set x0 %}aaaaaaaaaa{% endset %}"
    + "".join(f"{{% set x{i + 1} %}}{{{{ x{i} ~ x{i} }}}}{{% endset %}}" for i in range(40)),
    "doubled by callers": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 30
    + "aaaaaaaaaaaaaaaa"
    + "{% endcall %}" * 30,
    "shown often": BIG + "{% for i in range(100000) %}{{ b }}{% endfor %}",
    "kept often": BIG + "".join(f"{{% set v{i} = b[1:] %}}" for i in range(999)),
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "join": BIG + "{{ b.join(['b'] * 100000) }}",
    "replace": BIG + "{{ b.replace('a', b) }}",
    "translate": BIG + "{{ b.translate({97: b}) }}",
    "a width that is a value": "{{ '{:{w}}'.format(1, w=9999999999) }}",
    "many fields": "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "% and many fields": "{{ ('%(a)s' * 100000) % {'a': 'a' * 100000} }}",
    "filter indent": "{{ ('a\n' * 100000) | indent(first=true, width=10000000) }}",
    "filter join": "{{ (['a' * 1000] * 100000) | join('b' * 1000) }}",
    "filter tojson and indent": "{{ [[1, 2]] | tojson(indent=1000000000) }}",
    "filter tojson again": "{{ '\"'" + " | tojson" * 60 + " }}",
    "filter wordwrap": BIG + "{{ b | wordwrap(1, wrapstring=b) }}",
    "a method by another name": "{% set f = 'a'.center %}{{ f(10000000000) }}",
    # Lists
    "list doubled": doubled("ns.x + ns.x"),
    "nested, as JSON": nested("{{ ns.x | tojson }}"),
    "nested, compared": nested("{{ ns.x == ns.y }}"),
    "nested, sorted": nested("{{ [ns.y, ns.x] | sort }}"),
    "tuples, a key": in_tuples("{% set d = {ns.x: 1} %}"),
    "tuples, unique": in_tuples("{{ [ns.x] | unique | list }}"),
    "sum": "{{ ([[1] * 100] * 100000) | sum(start=[]) }}",
    "split": "{{ ('bb,' * 5000000).split(',') | length }}",
    # Numbers
    "power": "{{ 2 ** 999999999 }}",
    "long numbers": doubled("ns.x + ns.x", "{{ ns.x | string | length }}", "[10 ** 4200]"),
    "to_bytes": "{{ (5).to_bytes(10000000000, 'big') }}",
    # Source
    "a long source": "{{ a }}" * 100_000,
}
# One attack of each kind: on time, in compilation, and by nested values that are small in memory.
QUICK = ("loops", "nested, as JSON")


@pytest.mark.parametrize("name", long_except(ATTACKS, *QUICK))
def test_template_that_would_take_all_time_or_memory_is_ended_soon(
    quick: TemplateProcess, name: str
) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(
        HarmfulTemplateError, match=r"^(takes more than 0\.3 s|produces more text or values) "
    ):
        render(quick, ATTACKS[name])
    # Without a time limit, rendering would not end on any machine.
    assert time.perf_counter() - started < SECONDS
    # ru_maxrss is in kilobytes on Linux, and in bytes on macOS.
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < (400 << 10 if after < 1 << 30 else 400 << 20)
    # The process starts again.
    assert render(quick, "a") == (TEXT, "a")


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{% if a %}" * 5000 + "{% endif %}" * 5000,
        "{% for a in b %}" * 50 + "{% endfor %}" * 50,
    ],
    ids=["unfinished", "deep in parentheses", "deep in blocks", "deep in loops"],
)
def test_template_that_cannot_be_compiled_is_invalid(lasting: TemplateProcess, source: str) -> None:
    kind, reason = render(lasting, source)
    assert kind == INVALID
    assert any(word in reason for word in ("line 1: ", "recursion", "nested blocks"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'].mro() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ (raise_exception | attr('__globals__'))['json'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ cycler.__init__.__globals__.os.popen('true') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_template_cannot_reach_outside_its_sandbox(lasting: TemplateProcess, source: str) -> None:
    kind, text = render(lasting, source)
    if kind == TEXT:
        assert text == ""
    else:
        assert any(word in text for word in ("unsafe", "undefined", "loader"))


# transformers must render each of these templates to the same text.
HARMLESS = [
    "{% for m in messages %}{{ loop.index }} {{ loop.revindex }} {{ loop.length }} {{ loop.last }}"
    "{{ loop.previtem is defined }} {{ loop.nextitem }} {{ loop.cycle('a', 'b') }}"
    "{{ loop.changed(m.role) }}{% else %}none{% endfor %}",
    "{% for m in messages[1:] if m.role != 'tool' %}{{ m['content'] ~ 1 ~ none ~ x }}{% endfor %}",
    "{% for m in missing %}a{% else %}nothing{% endfor %}{% for k, v in messages[0].items() %}"
    "{{ k + '=' + v }}{% endfor %}{% for c in 'abc' %}{{ loop.length }}{{ c }}{% endfor %}",
    "{% for t in [[1, [2]]] recursive %}{% if t is iterable %}[{{ loop(t) }}]{% else %}{{ t }}"
    "{% endif %}{% endfor %}",
    "{{ messages }} {{ messages[0] }} {{ [1, (2, 'a'), {'k': none}] }} {{ true }} {{ 1.5 ~ x }}",
    "{{ tools | tojson }} {{ tools | tojson(indent=2) }} {{ messages[2].tool_calls | tojson }}"
    "{{ messages[2].tool_calls[0].function.arguments | dictsort }}",
    "{{ messages | map(attribute='role') | join(', ') }} {{ messages | map('length') | sum }}"
    "{{ messages | selectattr('role', 'eq', 'user') | map(attribute='content') | list }}"
    "{{ messages | rejectattr('role', 'in', ['user']) | list | length }} {{ [3, 1] | sort }}",
    "{{ messages[0].content | trim | upper | replace('KIND', 'x') | e | title | capitalize }}"
    "{{ messages[1].content | indent(3, true) | center(60) }} {{ 'ß' | upper }} {{ 'a' | list }}",
    "{{ 'a,b'.split(',')[-1].strip('b').ljust(5) + '|'.join(['a', 'b']) + 'x'.replace('x', 'yz') }}"
    "{{ 'a'.startswith(('a', 'b')) }} {{ 'b' in 'abc' }} {{ 'z' not in ['a'] }} {{ 3 in [1, 3] }}",
    "{{ '%s is %05.1f' % ('it', 2) }} {{ '{} {x!r:>6}'.format(1, x='a') }} {{ '%d' | format(3) }}",
    "{{ 7 // 2 }} {{ 7 % 2 }} {{ 2 ** 10 }} {{ 2 * 'ab' }} {{ [1] * 2 + [3] }} {{ -3 | abs }}",
    "{% set ns = namespace(n=0, seen=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }} {{ ns.seen }} {{ dict(a=1).a }}",
    "{% macro show(m, tag='b') %}<{{ tag }}>{{ m.content }}{{ varargs }}{{ caller() if caller }}"
    "</{{ tag }}>{% endmacro %}{{ show(messages[0]) }}{% call show(messages[1], 'i') %}!"
    "{% endcall %}{{ show(messages[2], 'u', 1, 2) }}",
    "{% set x %}a{{ messages | length }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}",
    "{% generation %}{{ messages[2].content }}{% endgeneration %}{% for i in range(3) %}"
    "{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}{{ bos ~ add_generation_prompt }}",
    "{{ ('<' | safe) ~ '<' | e }} {{ '<b>' | forceescape }} {{ x is defined }} {{ x | d('d') }}",
    "{{ messages | groupby('role') | length }} {{ [1, 1, 2] | unique | list }} {{ [1, 2] | max }}"
    "{{ [1, 2, 3] | batch(2, 0) | list }} {{ [1, 2, 3] | slice(2) | map('list') | list }}",
    "{{ '3' | int + 1.5 | float }} {{ 2.567 | round(1) }} {{ 'a b' | wordcount }}",
    "{% block a %}{{ messages[0].role | urlencode }}{% endblock %}{{ self.a() }}"
    "{% set j = joiner() %}{{ j() }}{{ j() }}",
]
REFUSALS = [
    "{{ raise_exception('no') }}",
    "{{ missing.key }}",
    "{{ 1 / 0 }}",
    "{{ messages[0].content() }}",
    "{{ missing() }}",
    "{{ none + 1 }}",
    "{% for i in 3 %}{% endfor %}",
    "{{ messages[0].pop('role') }}",
    "{{ messages | map('nonsense') | list }}",
    "{{ {}[[]] }}{{ {[]: 1} }}",
    "{{ 'a' | tojson(nonsense=1) }}",
]


def test_harmless_templates_render_as_transformers_renders_them(lasting: TemplateProcess) -> None:
    more = {"tools": TOOLS, "add_generation_prompt": True, "bos": "<s>"}
    for source in HARMLESS:
        (expected,), _ = render_jinja_template([MESSAGES], chat_template=source, **more)
        assert expected
        assert render(lasting, source, **more) == (TEXT, expected)


def test_templates_that_fail_do_so_with_the_error_that_transformers_gives(
    lasting: TemplateProcess,
) -> None:
    for source in REFUSALS:
        with pytest.raises(Exception) as raised:
            render_jinja_template([MESSAGES], TOOLS, chat_template=source)
        assert render(lasting, source, tools=TOOLS) == (REFUSED, str(raised.value))


def test_date_is_todays(lasting: TemplateProcess) -> None:
    today = time.strftime("%Y")
    assert render(lasting, "{{ strftime_now('%Y') }}") in (
        (TEXT, today),
        (TEXT, time.strftime("%Y")),
    )


def test_text_of_any_characters_round_trips(lasting: TemplateProcess) -> None:
    messages = [{"role": "user", "content": "\x00 \n\r\u2028 😀"}]
    assert render(lasting, "{{ messages[0].content }}", messages) == (TEXT, messages[0]["content"])


def test_long_conversation_has_more_time_and_a_longer_result(lasting: TemplateProcess) -> None:
    # The result has 39 million characters, and intermediate values more.
    source = "{% for m in messages %}" + "{{ m.content ~ '!' }}" * 13 + "{% endfor %}"
    messages = [{"role": "user", "content": "a" * 1_000_000} for _ in range(3)]
    assert render(lasting, source, messages) == (TEXT, ("a" * 1_000_000 + "!") * 39)


def test_time_limit_restarts_for_each_rendering(quick: TemplateProcess) -> None:
    source = "{% for i in range(100) %}{% for j in range(1000) %}{% endfor %}{% endfor %}done"
    request = json.dumps({"conversations": [MESSAGES]})
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert quick.render(source, [request] * 200) == [(TEXT, "done")] * 200
    quick.close()
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before > 0.3


def test_time_of_a_suspended_process_does_not_count(quick: TemplateProcess) -> None:
    assert render(quick, "a") == (TEXT, "a")
    pid = _pid(quick)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1, os.kill, (pid, signal.SIGCONT)).start()
    assert render(quick, "b") == (TEXT, "b")


def test_memory_is_watched_where_the_system_does_not_limit_it(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resident_memory(os.getpid()) > 10 * 2**20
    assert render(process, "a") == (TEXT, "a")
    # Set a limit below the helper's present memory.
    monkeypatch.setattr(process._helper, "_memory", 2**20)
    monkeypatch.setattr(limited_helper, "HAS_MEMORY_LIMIT", False)
    with pytest.raises(HarmfulTemplateError, match="produces more text or values"):
        render(process, LOOP)


# The process

PARENT = """
import os, sys
from mlxtune.backend.text.chat_template import TemplateProcess
process = TemplateProcess()
process.render("a", ["{\\"conversations\\": [[]]}"])
print(process._helper.pid, flush=True)
"""


def _pid(process: TemplateProcess) -> int:
    assert process._helper is not None
    return process._helper.pid


def _wait_until_gone(pid: int) -> None:
    def gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(gone)


@pytest.mark.parametrize(
    ("end", "status"), [slow("pass", 0), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)]
)
def test_helper_ends_with_its_parent(end: str, status: int) -> None:
    parent = subprocess.run([sys.executable, "-c", PARENT + end], capture_output=True, text=True)
    assert (parent.returncode, parent.stderr) == (status, "")
    _wait_until_gone(int(parent.stdout))


def test_ctrl_c_is_answered_at_once_and_without_a_word_from_the_process() -> None:
    # An hour's limit, so that only Ctrl-C can end the rendering in time.
    code = PARENT.replace("TemplateProcess()", "TemplateProcess(seconds=3600)")
    code += f"process.render({LOOP!r}, ['{{\"conversations\": [[]]}}'])"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.5)
        # A terminal signals the whole process group.
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=SECONDS)
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    _wait_until_gone(pid)


def test_process_is_started_again_after_an_interruption(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("select.select", interrupt)
        render(process, "a")
    # The interrupted request's late reply must not be returned.
    assert render(process, "b") == (TEXT, "b")


def test_unexpected_process_end_is_an_error(process: TemplateProcess) -> None:
    assert render(process, "a") == (TEXT, "a")
    os.kill(_pid(process), signal.SIGKILL)
    with pytest.raises(
        HarmfulTemplateError, match=r"ends the process that renders it \(exit status -9\)"
    ):
        render(process, "a")


def test_renderings_in_the_background_are_kept_apart(process: TemplateProcess) -> None:
    requests = [[json.dumps({"conversations": [[]], "x": x})] for x in "ab"]
    one, other = (process.submit("{{ x }}", request) for request in requests)
    assert other.result() == [(TEXT, "b")]
    assert one.result() == [(TEXT, "a")]
    harmful = process.submit("{{ 'a' * 10**10 }}", requests[0])
    assert process.submit("c", requests[0]).result() == [(TEXT, "c")]
    for _ in range(2):
        with pytest.raises(HarmfulTemplateError, match="produces more text"):
            harmful.result()


def test_exit_waits_for_no_rendering() -> None:
    code = PARENT.replace("TemplateProcess()", "TemplateProcess(seconds=3600)")
    code += f"process.submit({LOOP!r}, ['{{\"conversations\": [[]]}}'])"
    parent = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS
    )
    assert (parent.returncode, parent.stderr) == (0, "")


# The interface for mlxtune.core


def test_killed_template_process_is_one_error_of_the_model() -> None:
    template = ChatTemplate({"default": "{{ 'a' * 10**10 }}", "tool_use": "{% for %}"}, {})
    request = template.request(**_call(MESSAGES))
    template.start([request])
    again = template.request(MESSAGES)
    for render in (request.text, lambda: template.start([]), again.text):
        with pytest.raises(ModelError) as raised:
            render()
        assert str(raised.value) == (
            "the model's chat template (default) produces more text or values than any "
            "conversation needs: fix it, or name a built-in --template"
        )
    with pytest.raises(ModelError, match=r"template cannot be read: line 1: .*: fix it, or name a"):
        template.request(MESSAGES, tools=TOOLS).text()


def _call(messages: Any, **more: Any) -> dict[str, Any]:
    options = {"tools": None, "add_generation_prompt": True, "enable_thinking": None}
    return {"messages": messages, **options, **more}


def test_started_calls_are_rendered_in_one_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    process = chat_template._process()

    def counted(source: str, requests: list[str], original: Any = process.submit) -> Any:
        asked.append((source, len(requests)))
        return original(source, requests)

    monkeypatch.setattr(process, "submit", counted)
    sources = {
        "default": "{{ messages[0].content }}{{ x.y }}",
        "tool_use": "{{ messages | length }}",
    }
    template = ChatTemplate(sources, {})
    calls = [_call([{"role": "user", "content": str(i)}] * (i + 1)) for i in range(5)]
    calls = [each for call in calls for each in (call, call | {"tools": TOOLS})]
    requests = [template.request(**call) for call in calls]
    template.start(iter(requests))
    assert asked == [(sources["default"], 5), (sources["tool_use"], 5)]

    pairs = zip(requests[::2], requests[1::2], strict=True)
    for i, (without_tools, with_tools) in enumerate(pairs):
        with pytest.raises(BadRowError, match="'x' is undefined"):
            without_tools.text()
        assert with_tools.text() == str(i + 1)
    assert len(asked) == 2
    assert template.request(**_call(MESSAGES, tools=TOOLS)).text() == "3"
    assert len(asked) == 3


def test_long_conversations_are_not_started_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MAX_PENDING_CHARS", 5000)
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    made: list[TemplateRequest] = []

    def requests() -> Iterator[TemplateRequest]:
        for i in range(9):
            made.append(template.request([{"role": "user", "content": str(i) * 1000}]))
            yield made[-1]

    template.start(requests())
    assert [array._replies is not None for array in made] == [True] * 4 + [False]
    assert [array.text() for array in made] == [str(i) * 1000 for i in range(5)]


@pytest.mark.parametrize("depth", [900, 5000])
def test_deeply_nested_value_refuses_the_row(depth: int) -> None:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    call = _call([{"role": "user", "content": value}])
    template = ChatTemplate({"default": "{{ messages }}"}, {})
    with pytest.raises(BadRowError, match="recursion"):
        template.request(**call).text()


def test_value_that_is_not_json_becomes_the_placeholder_of_transformers() -> None:
    messages = [{"role": "user", "content": b"a", "at": object}]
    source = "{{ messages }}"
    (expected,), _ = render_jinja_template([messages], chat_template=source)
    assert ChatTemplate({"default": source}, {}).request(messages).text() == expected


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(BadRowError, match=r"half of a surrogate pair, U\+D800"):
        ChatTemplate({"default": "{{ '\\ud800' }}"}, {}).request(MESSAGES).text()


def test_whole_surrogate_pair_is_text(lasting: TemplateProcess) -> None:
    request = json.dumps({"conversations": [MESSAGES]})
    assert lasting.render("{{ '\U0001f600' }}", [request]) == [(TEXT, "\U0001f600")]
