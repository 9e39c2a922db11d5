"""Chat templates of model folders, rendered as transformers renders them, within a budget.

A chat template is a program by a stranger. transformers' sandbox keeps it from files and code, but
not from running forever or filling the memory. So every operation is charged to a budget before it
runs: each iteration of a loop, and the output of each call, filter and operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import BlockReference, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from mlxtune.backend.text.template_costs import (
    FILTERS,
    GROWTH,
    TEXT_METHODS,
    Forbidden,
    Harmful,
    Limits,
    Meter,
    check_bits,
    filter_cost,
    length,
    method_cost,
    names,
    operator_cost,
)
from mlxtune.errors import one_line

# The longest template, in characters: four times the longest of real models.
MAX_SOURCE = 2**17
# Filters that _Hooks adds to a template.
_LOOP, _CONCAT, _PASS = "mlxtune_loop", "mlxtune_concat", "mlxtune_pass"
# Filters that consume a generator, which is made a list first to know its cost.
_TAKING = frozenset({"groupby", "join", "max", "min", "sort", "unique"})
# Tests whose cost depends on their values.
_COMPARING = names("eq == equalto ne != in lt < lessthan le <= gt > greaterthan ge >=")
# What may be called, in addition to transformers' functions and the methods of _BUILT_IN.
_CALLED = (Macro, Undefined, Joiner, BlockReference, LoopContext)
_HELPERS = (LoopContext, Cycler, Extension)
_BUILT_IN = (str, dict, list, tuple)
# Attributes that are plain values, or methods whose calls are charged.
_DICT_ATTRIBUTES, _VALUES = frozenset(dir(dict)), frozenset({str, int, bool, list, dict})
_PLAIN: dict[type, frozenset[str]] = {
    str: TEXT_METHODS,
    LoopContext: names("index index0 revindex revindex0 first last length depth"),
}
_RENDER, _COMPILE = chat_template_utils.render_jinja_template, "_compile_jinja_template"


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
    limits: Limits = Limits(),  # noqa: B008  it is frozen
) -> str:
    """Render messages with a template as transformers' render_jinja_template does.

    Raises Harmful, jinja2.TemplateSyntaxError, and whatever the template does.
    """
    template = _compile(source)
    arguments = {"conversations": [list(messages)], "chat_template": source, **options}
    arguments["tools"] = None if tools is None else list(tools)
    with template.lock:
        template.meter.start(limits)
        try:
            return str(template.rendering(**arguments)[0][0])
        except Harmful:
            wider = limits.of([*messages, *(tools or ())])
            if wider.size == limits.size:
                raise
            template.meter.start(wider)
            return str(template.rendering(**arguments)[0][0])


@dataclass(frozen=True)
class _Compiled:
    """A template: `rendering` is transformers' function, bound to render this one."""

    rendering: Callable[..., Any]
    meter: Meter
    lock: threading.Lock


@lru_cache(maxsize=32)
def _compile(source: str) -> _Compiled:
    """Compile a template in the sandbox. Raises Harmful or jinja2.TemplateSyntaxError."""
    if len(source) > MAX_SOURCE:
        raise Harmful(f"is longer than {MAX_SOURCE:,} characters")
    if _COMPILE not in _RENDER.__code__.co_names:
        raise Harmful("cannot be checked with this version of transformers: install another one")
    environment = _Sandbox(chat_template_utils._compile_jinja_template("").environment)
    try:
        template = environment.from_string(source)
    except (jinja2.TemplateSyntaxError, Harmful):
        raise
    except Exception as error:  # such as nesting beyond what Python compiles
        raise Harmful(f"cannot be compiled ({one_line(error)})") from error
    # transformers has no public way to render with another environment, so its function runs with
    # globals in which the template is already compiled, by ours. A test names both private names.
    names = {**vars(chat_template_utils), _COMPILE: lambda _: template}
    rendering = FunctionType(_RENDER.__code__, names, "render", _RENDER.__defaults__)
    return _Compiled(rendering, environment.meter, threading.Lock())


class _Sandbox(ImmutableSandboxedEnvironment):
    """A copy of an environment in which every operation is charged to a budget."""

    # Intercepting operators also keeps the compiler from computing them.
    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(self, original: jinja2.Environment) -> None:
        super().__init__(
            trim_blocks=original.trim_blocks,
            lstrip_blocks=original.lstrip_blocks,
            extensions=[type(each) for each in original.extensions.values()],
        )
        self.globals |= original.globals
        self.meter = Meter(Limits())
        self.finalize = self._shown
        self.__dict__["concat"] = self._concat
        self.filters = {name: self._filter(name, each) for name, each in original.filters.items()}
        self.filters |= {_LOOP: self._loop, _CONCAT: self._concat_values, _PASS: self._pass}
        self.tests = {
            name: self._test(each) if name in _COMPARING else each
            for name, each in original.tests.items()
        }
        forbidden = {"lipsum"}
        self.functions = {id(f): name for name, f in self.globals.items() if name not in forbidden}

    # Jinja's documented hook for another code generator, in spite of its name.
    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        hooked = _Hooks().visit(source).set_environment(self)
        return super()._generate(hooked, *args, **options)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or item, with shortcuts for those that are harmless."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _PLAIN.get(kind, ()):
            return getattr(obj, attribute)
        if isinstance(obj, Namespace) and not attribute.startswith("_"):
            value = getattr(obj, attribute, None)
            if type(value) in _VALUES:
                return value
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, and charge for it."""
        if operator == "+" and type(left) is str and type(right) is str:
            self.meter.spend(len(left) + len(right))
            return left + right
        operator_cost(self.meter, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        """Call a macro, or a known function or method, and charge for it."""
        if type(function) is Macro or not callable(function):  # Jinja reports the latter
            self.meter.spend()
            return super().call(context, function, *args, **options)
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, _BUILT_IN):
            # Jinja's own arguments.
            options.pop("_loop_vars", None)
            options.pop("_block_vars", None)
            name = function.__name__
            if name == "join" and args and isinstance(args[0], Iterator):
                args = (list(args[0]),)
            method_cost(self.meter, owner, name, args, options)
            return function(*args, **options)
        name = self.functions.get(id(function)) or self.functions.get(id(owner))
        if isinstance(function, LoopContext) and args:
            args = (self._loop(args[0]), *args[1:])
        elif name == "strftime_now" and any(isinstance(f, str) and len(f) > 100 for f in args):
            raise Forbidden("a long format for the date")
        elif name is not None or isinstance(owner, _HELPERS):
            self.meter.spend(sum(map(self.meter.weigh, args)))
        elif not isinstance(function, _CALLED):
            raise Forbidden(str(getattr(function, "__name__", type(function).__name__)))
        self.meter.spend()
        return super().call(context, function, *args, **options)

    def _filter(self, name: str, function: Any) -> Any:
        """Return a filter whose use is charged."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        growth = GROWTH.get(name)

        def charged(*args: Any, **options: Any) -> Any:
            if name not in FILTERS:
                raise Forbidden(f"the filter {name}")
            before, value, args = args[:first], args[first], args[first + 1 :]
            if growth and type(value) is str and not args and not options:
                self.meter.spend(growth * len(value))
                return function(*before, value)
            if name in _TAKING and isinstance(value, Iterator):
                value = list(value)
            filter_cost(self.meter, name, value, args, options)
            return function(*before, value, *args, **options)

        # Jinja's mark of a filter that takes its context first.
        charged.__dict__.update(vars(function) if hasattr(function, "__dict__") else {})
        return charged

    def _test(self, function: Any) -> Any:
        """Return a test whose use is charged."""
        return lambda *args: function(*map(self._pass, args))

    def _loop(self, values: Any) -> Any:
        """Return the values of a loop, and charge for each iteration."""
        if isinstance(values, Undefined):
            return values

        def charged(iterator: Iterator[Any]) -> Iterator[Any]:
            for value in iterator:
                self.meter.spend()
                yield value

        return charged(iter(values))

    def _pass(self, value: Any) -> Any:
        """Return a value to be compared, looked up or copied, and charge for it."""
        if isinstance(value, int):
            check_bits(value.bit_length())
        elif length(value):
            self.meter.spend_on(value)
        return value

    def _shown(self, value: Any) -> Any:
        """Return a value to be printed, and charge for it; strings are charged when joined."""
        if type(value) is not str:
            self.meter.spend_on(value)
        return value

    def _concat_values(self, values: Iterable[Any]) -> str:
        return self._concat([str(self._shown(value)) for value in values])

    def _concat(self, texts: Iterable[str]) -> str:
        parts = list(texts)
        self.meter.spend(sum(map(len, parts)))
        return "".join(parts)


class _Hooks(NodeTransformer):
    """Adds filters to operations in which a compiled template would bypass its environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(_LOOP, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(_CONCAT, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        first, last = node.expr, node.ops[-1]
        # Comparing with a constant is cheap, but searching for one is not.
        if len(node.ops) == 1 and (
            _is_constant(last.expr) or (_is_constant(first) and not last.op.endswith("in"))
        ):
            return node
        node.expr = _through(_PASS, first)
        for each in node.ops:
            each.expr = _through(_PASS, each.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _through(_PASS, node)
        node.arg = _through(_PASS, node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _through(_PASS, node.key)
        return node


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(_is_constant(each) for each in node.items)
    return isinstance(node, nodes.Const)


def _through(name: str, node: nodes.Expr) -> nodes.Expr:
    return node if _is_constant(node) else _filter(name, node)


def _filter(name: str, node: nodes.Node) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
