"""Templates that would hang or fill the memory are ended; all others render as transformers has it.

What a hostile template does is in ATTACKS; each was seen to hang or to take gigabytes without what
it is ended by.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from mlxtune.backend.text import template_sandbox
from mlxtune.backend.text.chat_template import ChatTemplate
from mlxtune.backend.text.template_costs import Harmful, Limits, TookTooLong
from mlxtune.backend.text.template_sandbox import render
from mlxtune.errors import ModelError

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
QUICK = Limits(seconds=0.5)


def doubled(step: str, then: str = "", start: str = "[1]") -> str:
    """A template that does a step to x and y 99 times, and then something with them."""
    return (
        f"{{% set ns = namespace(x={start}, y={start}) %}}{{% for i in range(99) %}}"
        f"{{% set ns.x = {step} %}}{{% set ns.y = {step.replace('ns.x', 'ns.y')} %}}"
        f"{{% endfor %}}{then}"
    )


def nested(then: str, start: str = "[1]", around: str = "[ns.x, ns.x]") -> str:
    """A template that does something with lists in lists of 2^99 items, which take no memory."""
    return doubled(around, then, start)


def in_tuples(then: str) -> str:
    """A template that does something with tuples in tuples, whose hash is never kept."""
    return nested(then, "(1, 2)", "(ns.x, ns.x)")


BIG = "{% set b = 'a' * 1000000 %}"
ATTACKS = {
    # Time.
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops over constants": "{% for i in [1,2,3,4,5,6,7,8] %}" * 9 + "{% endfor %}" * 9,
    "macros": "{% macro m(n) %}{% if n %}{{ m(n-1) ~ m(n-1) }}{% endif %}{% endmacro %}{{m(99)}}",
    "searches": BIG + "{% for i in range(100000) %}{% if 'x' in b %}{% endif %}{% endfor %}",
    "search from the end": "{{ ('a' * 10000000).rfind('b' ~ 'a' * 5000000) }}",
    "strip": "{{ ('a' * 10000000).strip('b' * 5000000 ~ 'a') }}",
    # Text.
    "times": "{{ ('a' * 10**10) | length }}",
    "times while compiling": "{{ 'a' * 10000000000 }}",
    "doubled by +": doubled("ns.x + ns.x", start="'a'"),
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
    "center": "{{ 'a'.center(10000000000) }}",
    "zfill": "{{ '1'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(10000000000) }}",
    "join": BIG + "{{ b.join(['b'] * 100000) }}",
    "join over a text": BIG + "{{ b.join(b) }}",
    "replace": BIG + "{{ b.replace('a', b) }}",
    "replace nothing": BIG + "{{ b.replace('', b) }}",
    "translate": BIG + "{{ b.translate({97: b}) }}",
    "a width": "{{ '{:999999999999}'.format(1) }}",
    "a width that is a value": "{{ '{:{w}}'.format(1, w=9999999999) }}",
    "many fields": "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "many named fields": "{{ ('{a}' * 100000).format_map({'a': 'a' * 100000}) }}",
    "% and a width": "{{ '%999999999d' % 1 }}",
    "% and a width that is a value": "{{ '%*d' % (999999999, 1) }}",
    "% and many fields": "{{ ('%(a)s' * 100000) % {'a': 'a' * 100000} }}",
    "filter center": "{{ 'a' | center(10000000000) }}",
    "filter indent": "{{ ('a\n' * 100000) | indent(first=true, width=10000000) }}",
    "filter indent by text": "{{ ('a\n' * 100000) | indent('x' * 100000) }}",
    "filter join": "{{ (['a' * 1000] * 100000) | join('b' * 1000) }}",
    "filter join of what is mapped": BIG
    + "{{ ([{'a': b}] * 99999) | map(attribute='a') | join | length }}",
    "filter replace": BIG + "{{ b | replace('a', b) }}",
    "filter replace by name": BIG + "{{ b | replace(old='a', new=b) }}",
    "filter tojson and indent": "{{ [[1, 2]] | tojson(indent=1000000000) }}",
    "filter tojson and text": "{{ ([[1]] * 1000) | tojson(indent='x' * 1000000) }}",
    "filter tojson and separators": BIG + "{{ ([1] * 100000) | tojson(separators=(b, ':')) }}",
    "filter tojson again": "{{ '\"'" + " | tojson" * 60 + " }}",
    "filter format": "{{ '%999999999d' | format(1) }}",
    "filter wordwrap": BIG + "{{ b | wordwrap(1, wrapstring=b) }}",
    "filter map center": "{{ ['a'] | map('center', 10000000000) | list }}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "date": "{{ strftime_now('%Y' * 1000000) }}",
    "a method by another name": "{% set f = 'a'.center %}{{ f(10000000000) }}",
    "a method in a namespace": "{% set n = namespace(get='a'.center) %}{{ n.get(10000000000) }}",
    "a method by attr": "{{ ('a' | attr('center'))(10000000000) }}",
    # Lists.
    "list doubled": doubled("ns.x + ns.x"),
    "list times": "{{ ([1] * 10**10) | length }}",
    "nested, shown": nested("{{ ns.x }}"),
    "nested, joined": nested("{{ 'a' ~ ns.x }}"),
    "nested, as JSON": nested("{{ ns.x | tojson }}"),
    "nested, compared": nested("{{ ns.x == ns.y }}"),
    "nested, compared twice": nested("{{ ns.x == ns.y == 'a' }}"),
    "nested, tested": nested("{{ ns.x is eq(ns.y) }}"),
    "nested, looked for": nested("{{ ns.x in [ns.y] }}"),
    "nested, found": nested("{{ [ns.y].index(ns.x) }}"),
    "nested, sorted": nested("{{ [ns.y, ns.x] | sort }}"),
    "nested, the largest": nested("{{ [ns.y, ns.x] | map('default') | max }}"),
    "nested, selected": nested("{{ [{'a': ns.y}] | selectattr('a', '==', ns.x) | list }}"),
    "nested, changed": nested("{% for i in [ns.x, ns.y] %}{{ loop.changed(i) }}{% endfor %}"),
    "nested, in a namespace": "{% set n = namespace(a=1) %}{{ [n, n] }}",
    "tuples, a key": in_tuples("{% set d = {ns.x: 1} %}"),
    "tuples, looked up": in_tuples("{{ {'a': 1}[ns.x] }}"),
    "tuples, got": in_tuples("{{ {'a': 1}.get(ns.x) }}"),
    "tuples, unique": in_tuples("{{ [ns.x] | unique | list }}"),
    "tuples, in a dict": in_tuples("{{ dict([(ns.x, 1)]) }}"),
    "tuples, from arguments": "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% else %}"
    "{% set d = {varargs: 1} %}{% endif %}{% endmacro %}{{ m(60, 1) }}",
    "sum": "{{ ([[1] * 100] * 100000) | sum(start=[]) }}",
    "batch": "{{ 'a' | batch(1000000000, 'x') | list }}",
    "slice": "{{ 'a' | slice(1000000000) | list }}",
    "split": "{{ ('bb,' * 5000000).split(',') | length }}",
    "a list of characters": "{{ ('你' * 20000000) | list | length }}",
    # Numbers.
    "power": "{{ 2 ** 999999999 }}",
    "squared": doubled("ns.x * ns.x", start="7"),
    "long numbers": doubled("ns.x + ns.x", "{{ ns.x | string | length }}", "[10 ** 4200]"),
    "round": "{{ 5 | round(-999999999) }}",
    "to_bytes": "{{ (5).to_bytes(10000000000, 'big') }}",
    # Source.
    "a long source": "{{ a }}" * 40_000,
    "deep in parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "deep in blocks": "{% if a %}" * 5000 + "{% endif %}" * 5000,
    "deep in loops": "{% for a in b %}" * 50 + "{% endfor %}" * 50,
}


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS.keys())
def test_template_that_would_take_all_time_or_memory_is_ended_soon(source: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(Harmful):
        render(source, MESSAGES, None, {}, QUICK)
    assert time.perf_counter() - started < 5
    # Kilobytes on Linux, bytes on macOS.
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < (400 << 10 if after < 1 << 30 else 400 << 20)


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
def test_template_does_not_reach_what_is_outside_it(source: str) -> None:
    try:
        assert render(source, MESSAGES, None, {}) == ""
    except (jinja2.TemplateError, TypeError) as error:
        assert any(word in str(error) for word in ("unsafe", "undefined", "loader"))


# Each is rendered by transformers too, and has to be equal.
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
REFUSED = [
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


@pytest.mark.parametrize("source", HARMLESS)
def test_harmless_template_renders_as_transformers_renders_it(source: str) -> None:
    options = {"add_generation_prompt": True, "bos": "<s>"}
    (expected,), _ = render_jinja_template([MESSAGES], TOOLS, chat_template=source, **options)
    assert expected
    assert render(source, MESSAGES, TOOLS, options) == expected


@pytest.mark.parametrize("source", REFUSED)
def test_template_that_fails_does_so_with_the_error_that_transformers_gives(source: str) -> None:
    found = []
    for how in (
        lambda: render_jinja_template([MESSAGES], TOOLS, chat_template=source),
        lambda: render(source, MESSAGES, TOOLS, {}),
    ):
        with pytest.raises(Exception) as raised:
            how()
        found.append((type(raised.value), str(raised.value)))
    assert found[0] == found[1]


def test_long_conversation_is_rendered_for_it_is_not_the_template_that_is_long() -> None:
    # 60 million characters on the way, more than a short conversation may make.
    source = (
        "{% for m in messages %}" + "{% set x = m.content ~ '!' %}" * 20 + "{{ x }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a" * 1_000_000} for _ in range(3)]
    assert render(source, messages, None, {}) == ("a" * 1_000_000 + "!") * 3


def test_time_is_measured_for_each_conversation_anew() -> None:
    # Half of the time each.
    source = "{% for i in range(1500) %}{% for j in range(100) %}{% endfor %}{% endfor %}done"
    started = time.perf_counter()
    render(source, MESSAGES, None, {})
    seconds = time.perf_counter() - started
    for _ in range(4):
        assert render(source, MESSAGES, None, {}, Limits(seconds=3 * seconds)) == "done"
    with pytest.raises(TookTooLong, match=r"takes more than 0\.\d+ s for a conversation"):
        render(source, MESSAGES, None, {}, Limits(seconds=seconds / 10))


def test_template_that_is_ended_is_an_error_of_the_model_and_not_of_each_row() -> None:
    template = ChatTemplate({"default": "{{ 'a' * 10**10 }}", "tool_use": "{{ lipsum() }}"}, {})
    with pytest.raises(ModelError) as raised:
        template(MESSAGES)
    assert str(raised.value) == (
        "the model's chat template (default) produces more text or values than any conversation "
        "needs: fix it, or name a built-in --template"
    )
    with pytest.raises(ModelError, match=r"template \(tool_use\) uses .*lorem.*, which is not al"):
        template(MESSAGES, tools=TOOLS)


def test_transformers_compiles_templates_by_the_private_function_that_is_replaced() -> None:
    # An upgrade of transformers that fails here needs another way to render in the sandbox.
    assert "_compile_jinja_template" in render_jinja_template.__code__.co_names
    environment = chat_template_utils._compile_jinja_template("").environment
    assert isinstance(environment, ImmutableSandboxedEnvironment)
    # The sandbox copies these; all other options are Jinja's defaults.
    assert (environment.trim_blocks, environment.lstrip_blocks) == (True, True)
    options = ("autoescape", "finalize", "keep_trailing_newline", "newline_sequence", "undefined")
    plain = ImmutableSandboxedEnvironment()
    assert all(getattr(environment, each) == getattr(plain, each) for each in options)


def test_version_of_transformers_that_renders_otherwise_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_sandbox, "_COMPILE", "_compiled_elsewhere")
    template_sandbox._compile.cache_clear()
    with pytest.raises(Harmful, match="this version of transformers"):
        render("a", MESSAGES, None, {})
