"""The jinja environment of chat templates: transformers' own, in which nothing runs or grows without end.

Chat templates use a small part of jinja and of Python's methods. What is named here may be used, and anything else is
refused by name. The work of what may be used is counted, not watched: loops, calls, and values that are made, compared
or printed are charged to a budget, and each charge looks at the clock. That works in any thread, leaves nothing running
behind, and needs neither a signal nor a process.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sized, ValuesView
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0  # of processor time in this thread: a busy machine refuses no template
# Steps and characters (an element of a list counts as 8): so many, and so many times what goes in.
_MAX_WORK, _WORK_PER_INPUT = 1 << 24, 64
_MAX_DEPTH = 100  # of lists in lists
_MAX_BITS = 1 << 16  # of an int


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Filters, tests and methods: those that do not look into the elements of a value, and those that do.
_SHALLOW = _names(
    "boolean count d default defined false first float get integer items iterable keys last length list map mapping "
    "none number reject rejectattr reverse sameas select selectattr sequence tojson true undefined values"
)
_DEEP = _names(
    "abs capitalize dictsort e escape indent int join lower max min replace safe sort string title trim unique upper "
    "== eq equalto != ne < lt lessthan <= le > gt greaterthan >= ge in"
)
_METHODS = {
    str: _names(
        "capitalize count endswith find isalnum isalpha isdigit isspace join lower lstrip partition removeprefix "
        "removesuffix replace rsplit rstrip split splitlines startswith strip title upper"
    ),
    dict: _names("get items keys values"),
}
_SCANNING = _names("lstrip rsplit rstrip strip trim")  # these may compare every character with all of the argument


class Sandbox(ImmutableSandboxedEnvironment):
    """Immutable, sandboxed, metered. One render at a time; ``start`` before each."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=self.weighed,
        )
        self.filters = self._metered(self.filters | {"tojson": self._tojson})
        self.tests = self._metered(self.tests)
        self.globals = {
            "namespace": _Namespace,
            "raise_exception": self._raise,
            "range": self.globals["range"],
            "strftime_now": self._strftime,
        }
        self.start(None)

    def start(self, values: Any) -> None:
        """A fresh budget for a render of these values."""
        self._left, self._deadline = 1 << 62, time.thread_time() + MAX_SECONDS
        before = self._left
        self.weighed(values)
        self._left = _MAX_WORK + _WORK_PER_INPUT * (before - self._left)

    def tick(self, cost: int = 1) -> None:
        """Charge for some work.

        Raises:
            TemplateError: the budget or the time is used up.
        """
        self._left -= cost
        if self._left < 0:
            raise TemplateError("stopped: it takes too many steps or makes too much text")
        if time.thread_time() > self._deadline:
            raise TemplateError(f"stopped after {MAX_SECONDS:g} seconds")

    def charged(self, value: Any) -> Any:
        """The value, paid for."""
        size = len(value) if isinstance(value, str | list | tuple | dict) else 0
        self.tick(1 + (size if isinstance(value, str) else 8 * size))
        _refuse_bits(value.bit_length() if isinstance(value, int) else 0)
        return value

    def weighed(self, value: Any) -> Any:
        """The value, with all that it holds paid for; lists may hold one another many times over."""
        stack = [(value, 0)]
        while stack:
            one, depth = stack.pop()
            self.charged(one)
            if depth > _MAX_DEPTH:
                raise TemplateError(f"stopped: it nests lists deeper than {_MAX_DEPTH}")
            if isinstance(one, dict):
                stack += [(each, depth + 1) for pair in one.items() for each in pair]
            elif isinstance(one, list | tuple | KeysView | ValuesView | ItemsView):
                stack += [(each, depth + 1) for each in one]
        return value

    def join(self, *parts: Any) -> str:
        """The operator ``~``."""
        return "".join([str(self.weighed(part)) for part in parts])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return isinstance(obj, LoopContext | Namespace) and attr[0] != "_" and attr != "changed"

    def wrap_str_format(self, value: Any) -> Any:
        """What jinja hands out instead of a method: here every method that is listed, metered as a filter is."""
        owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
        listed = any(isinstance(owner, kind) and name in names for kind, names in _METHODS.items())
        return functools.partial(self._run, name, getattr(type(owner), name), owner) if listed else None

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.weighed(argument) if isinstance(argument, tuple) else argument)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.charged(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _refuse_bits(left.bit_length() * max(right, 0))
        elif operator == "*":
            times, many = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(many, Sized):
                self.tick(max(times, 0) * len(many) * (1 if isinstance(many, str) else 8))
        elif operator == "%" and isinstance(left, str):
            raise TemplateError("operator %: accepted are numbers; texts are joined by ~")
        return self.charged(super().call_binop(context, operator, left, right))

    def _metered(self, functions: Mapping[str, Any]) -> dict[str, Any]:
        """Those of jinja's filters or tests that are listed."""
        return {
            name: functools.update_wrapper(functools.partial(self._run, name, function), function)
            for name, function in functions.items()
            if name in _SHALLOW | _DEEP
        }

    def _run(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a filter, a test or a method, and charge before it runs for what it goes through and makes."""
        value, *others = [*args[hasattr(function, "jinja_pass_arg") :], *kwargs.values()]
        if name not in _SHALLOW:
            self.weighed(value)
        before = self._left
        self.weighed(others)
        weight = before - self._left
        if name == "join" and others and isinstance(value, Sized) and isinstance(others[0], Sized):
            self.tick(len(value) * len(others[0]))
        elif name == "replace" and others:
            self.tick(str(value).count(str(others[0])) * weight)
        elif name == "indent":
            widths = (len(one) if isinstance(one, str) else max(int(one), 0) for one in others)
            self.tick(len(str(value).splitlines()) * sum(widths, 4))
        elif name in _SCANNING:
            self.tick(len(str(value)) // 16 * weight)
        result = function(*args, **kwargs)
        if isinstance(result, Iterator) and not isinstance(result, LoopContext):
            result = list(result)  # what a lazy filter makes is charged for as well
        return self.charged(result)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """transformers' filter: jinja's own would escape HTML."""
        width = len(indent) if isinstance(indent, str) else max(indent or 0, 0)
        self.tick(1000 * width)  # a line may begin with as many times the indent as Python nests calls
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return "".join(map(self.charged, encoder.iterencode(self.weighed(value))))

    def _raise(self, message: Any) -> None:
        raise TemplateError(str(self.weighed(message)))

    def _strftime(self, format: str) -> str:
        self.tick(256 * len(format))  # as long as Python lets the result be
        return datetime.now().strftime(format)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Meter(self).visit(source), *args, **kwargs)


def _refuse_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateError(f"stopped: it makes an integer of more than {_MAX_BITS} bits")


class _Meter(NodeTransformer):
    """Calls the sandbox where jinja compiles to plain Python: in loops, ``~``, comparisons, slices and keys."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        cost = nodes.Const(1 + sum(len(text.data) for text in node.find_all(nodes.TemplateData)), lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(self._call("tick", cost), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("join", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides: list[Any] = [node, *node.ops]
        for side in sides:
            side.expr = self._weighed(side.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._call("charged", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = self._weighed(node.key)
        return node

    def _weighed(self, node: nodes.Expr) -> nodes.Expr:
        return node if isinstance(node, nodes.Const) else self._call("weighed", node)

    def _call(self, name: str, *args: nodes.Expr) -> nodes.Call:
        at = {"lineno": args[0].lineno, "environment": self._sandbox}
        return nodes.Call(nodes.EnvironmentAttribute(name, **at), list(args), [], None, None, **at)


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
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise TemplateError(f"namespace: {name!r} begins with an underscore")
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # it may hold itself
