"""Chat templates whose output depends on more than the messages: no training is repeatable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.text.chat_template import ChatTemplate
from mlxtune.errors import ModelError
from tests.command import Cli
from tests.models import CHATML

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "Two."},
]
RANDOM, OBJECT, TIME = "chooses at random", "writes a Python object", "writes the time of day"
ATTACKS = {
    "random": ("{{ ['a', 'b'] | random }}", RANDOM),
    "random of one": ("{{ ['a'] | random }}", RANDOM),
    "random of a text": ("{{ messages[0].content | random }}", RANDOM),
    "random by map": ("{{ [['a', 'b']] | map('random') | join }}", RANDOM),
    "random by a name": ("{{ [['a', 'b']] | map('ran' ~ 'dom') | join }}", RANDOM),
    "random in a condition": ("{% if range(9) | random %}a{% endif %}", RANDOM),
    "random in a filter block": ("{% filter random %}abc{% endfilter %}", RANDOM),
    "random in a macro": ("{% macro m() %}{{ 'ab' | random }}{% endmacro %}{{ m() }}", RANDOM),
    "lipsum": ("{{ lipsum() }}", RANDOM),
    "lipsum of one word": ("{{ lipsum(n=1, html=false, min=1, max=2) }}", RANDOM),
    "length of lipsum": ("{{ lipsum() | length }}", RANDOM),
    "a class": ("{{ namespace() }}{{ cycler('a') }}", OBJECT),
    "a method": ("{{ messages[0].items }}", OBJECT),
    "a method of a text": ("{{ messages[0].content.strip }}", OBJECT),
    "a generator": ("{{ messages | map('length') }}", OBJECT),
    "a function": ("{{ raise_exception }}", OBJECT),
    "a function in a list": ("{{ [strftime_now] }}", OBJECT),
    "a function as JSON text": ("{{ [strftime_now] | string | tojson }}", OBJECT),
    "a joiner": ("{{ joiner() }}", OBJECT),
    "a format": ("{{ '%s' % lipsum }}", OBJECT),
    "a format's field": ("{{ '{}'.format(lipsum) }}", OBJECT),
    "the hour": ("{{ strftime_now('%H') }}", TIME),
    "the minute": ("{{ strftime_now('%d %b %Y, %H:%M') }}", TIME),
    "the second": ("{{ strftime_now('%S') }}", TIME),
    "the microsecond": ("{{ strftime_now('%f') }}", TIME),
    "the time": ("{{ strftime_now('%c') }}", TIME),
    "the half of the day": ("{{ strftime_now('%p') }}", TIME),
    "the time by a name": ("{{ strftime_now('%' ~ 'T') }}", TIME),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_nondeterministic_template_is_refused(name: str) -> None:
    source, problem = ATTACKS[name]
    with pytest.raises(ModelError) as raised:
        ChatTemplate({"default": source}, {}).request(MESSAGES).text()
    said = str(raised.value)
    assert said.startswith(f"the model's chat template (default) {problem}")
    assert said.endswith("differ: fix it, or name a built-in --template")
    assert said.isprintable()


@pytest.mark.parametrize("source", ["{{ ['a', 'b'] | random }}", "{{ messages[0].items }}"])
@pytest.mark.parametrize("rows", ["all", "one"])
def test_all_rows_are_inspected(source: str, rows: str) -> None:
    condition = {"all": "true", "one": "messages[0].content == '500'"}[rows]
    render = ChatTemplate({"default": f"{{% if {condition} %}}{source}{{% endif %}}"}, {})
    render.start(render.request([{"role": "user", "content": str(i)}]) for i in range(501))
    with pytest.raises(ModelError, match="differ: fix it"):
        render.start([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ strftime_now('%d %b %Y') }}",
        "{{ strftime_now('%Y-%m-%d') }}",
        "{{ messages }}",
        "{% macro m() %}{% endmacro %}{{ m }}",
        "{{ messages[0].content ~ ' random lipsum' }}",
        "{{ undefined.x }}",
        "{{ raise_exception(lipsum | string) }}",
    ],
)
@pytest.mark.parametrize("content", ["Hi", "<function f at 0x7f25a00f1620>"])
def test_date_independent_template_is_rendered(source: str, content: str) -> None:
    messages = [{"role": "user", "content": content}]
    template = ChatTemplate({"default": source}, {})
    one, other = template.request(messages), template.request(messages)
    try:
        assert one.text() == other.text()
    except ValueError as refusal:
        assert type(refusal).__name__ == "BadRowError"


@pytest.mark.parametrize("command", ["inspect", "train"])
@pytest.mark.parametrize("name", ["random", "the hour"])
def test_command_refuses_it_before_any_training(
    request: pytest.FixtureRequest, broken: Path, output: Path, command: str, name: str
) -> None:
    source, problem = ATTACKS[name]
    (broken / "chat_template.jinja").write_text(CHATML + source)
    run: Cli = request.getfixturevalue(command)
    assert problem in run("--model-path", broken, "--no-cache").error
    assert not output.parent.exists()
