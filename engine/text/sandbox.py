"""The jinja environment of chat templates: transformers' own, in which nothing runs or grows without end.

Work is counted, not watched: every round of a loop, every call, and every text or list that an expression makes is
charged to a budget, and each charge looks at the clock. That works in any thread, leaves nothing running behind, and
needs neither a signal nor a process. Operations that are one step of Python are refused or charged before they run.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0
# Steps and characters (an element of a list counts as 8): so many, and so many times what goes in.
_MAX_WORK, _WORK_PER_INPUT = 1 << 26, 64
_MAX_WIDTH = 1 << 20  # what a filter or a method of a text may be told to pad to
_MAX_BITS = 1 << 16  # of an int
_WIDTH = re.compile(r"\d{7}|\*")

# Filters that take a list or an object apart, and make no text of it.
_STRUCTURAL = frozenset(
    (
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list"),
        *("map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort"),
        *("sum", "unique"),
    )
)


class Sandbox(ImmutableSandboxedEnvironment):
    """Immutable, sandboxed, metered. One render at a time; ``start`` before each."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=self._printable,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: self._metered(name, function) for name, function in self.filters.items()}
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime, "namespace": _Namespace}
        del self.globals["lipsum"]
        self.start(None)

    def start(self, values: Any) -> None:
        """A fresh budget for a render of these values."""
        self._left, self._deadline = 1 << 62, time.monotonic() + MAX_SECONDS
        self._left = _MAX_WORK + _WORK_PER_INPUT * self.weigh(values)

    def tick(self, cost: int = 1) -> None:
        """Charge for some work.

        Raises:
            TemplateError: the budget or the time is used up.
        """
        self._left -= cost
        if self._left < 0:
            raise TemplateError("stopped: it takes too many steps or makes too much text")
        if time.monotonic() > self._deadline:
            raise TemplateError(f"stopped after {MAX_SECONDS:g} seconds")

    def charged(self, value: Any) -> Any:
        """The value, paid for."""
        size = len(value) if isinstance(value, str | list | tuple | dict) else 0
        self.tick(1 + (size if isinstance(value, str) else 8 * size))
        return value

    def weigh(self, value: Any) -> int:
        """Charge for all that a text of the value would hold; lists may hold one another many times over."""
        before, stack = self._left, [value]
        while stack:
            one = self.charged(stack.pop())
            if isinstance(one, dict):
                stack += [*one, *one.values()]
            elif isinstance(one, list | tuple):
                stack += one
        return before - self._left

    def join(self, *parts: Any) -> Any:
        """The operator ``~``."""
        return "".join([str(self._printable(part)) for part in parts])

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)
        if isinstance(text := getattr(method, "__self__", None), str):
            self._foresee(method.__name__, text, *args, **kwargs)
        return self.charged(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        whole = [operand for operand in (left, right) if isinstance(operand, int)]
        if operator == "%" and isinstance(left, str):
            self._foresee("format", left, right)
        elif operator == "*" and len(whole) == 2:
            _refuse_bits(left.bit_length() + right.bit_length())
        elif (
            operator == "*" and whole and isinstance(other := left if whole[0] is right else right, str | list | tuple)
        ):
            self.tick(max(whole[0], 0) * 8 * len(other))
        elif operator == "**" and len(whole) == 2:
            _refuse_bits(left.bit_length() * max(right, 0))
        return self.charged(super().call_binop(context, operator, left, right))

    def _printable(self, value: Any) -> Any:
        self.weigh(value)
        return value

    def _foresee(self, name: str, text: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse or charge for what a method or a filter would make of a text, before it makes it."""
        values = [*args, *kwargs.values()]
        if any(isinstance(value, int) and value > _MAX_WIDTH for value in values):
            raise TemplateError(f"stopped: it asks for more than {_MAX_WIDTH} of something")
        self.weigh(values)
        if name in ("format", "format_map") and _WIDTH.search(str(text)):
            raise TemplateError("stopped: it formats to a width of * or of seven digits and more")
        if name == "replace" and isinstance(text, str) and len(values) > 1:
            self.tick(text.count(str(values[0])) * len(str(values[1])))
        if name == "join" and isinstance(text, str) and values and isinstance(values[0], list | tuple | dict | str):
            self.tick(len(text) * len(values[0]))

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            before, value, rest = args[:first], args[first], args[first + 1 :]
            if name == "join":
                value = list(value)
                self._foresee(name, str(rest[0]) if rest else str(kwargs.get("d", "")), value)
            else:
                self._foresee(name, value, *rest, **kwargs)
            if name not in _STRUCTURAL:
                self._printable(value)
            return self.charged(function(*before, value, *rest, **kwargs))

        return metered

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Meter(self).visit(source), *args, **kwargs)


class _Meter(NodeTransformer):
    """Puts a call of ``tick`` into every loop, and makes ``~`` a call of ``join``; macros are calls anyway."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        cost = nodes.Const(1 + sum(len(text.data) for text in node.find_all(nodes.TemplateData)), lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(self._call("tick", [cost], node), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("join", node.nodes, node)

    def _call(self, name: str, args: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name, lineno=at.lineno, environment=self._sandbox)
        return nodes.Call(function, args, [], None, None, lineno=at.lineno, environment=self._sandbox)


class _Generation(Extension):
    """``{% generation %}``, with which transformers marks the assistant's tokens for training, is its content."""

    tags = {"generation"}  # noqa: RUF012, the shape is jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """jinja's namespace without names in underscores, which are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja, so that a template may set `self`
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        Namespace.__setitem__(self, name, value)


def _refuse_underscore(name: Any) -> None:
    if str(name).startswith("_"):
        raise TemplateError(f"namespace: {name!r} begins with an underscore")


def _refuse_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateError(f"stopped: it makes an integer of more than {_MAX_BITS} bits")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter: jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
