"""Chat templates: from messages to the text that a model was trained on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, meta, nodes

from ringkv.engine.text.sandbox import Sandbox
from ringkv.errors import RingkvError

_MAX_SOURCE = 1 << 18  # characters of a template; real ones have ten thousand
_MAX_MESSAGE = 400


class ChatTemplate:
    """A chat template, rendered in a ``Sandbox`` of its own.

    Args:
        source: jinja, with what transformers adds to it.
        special_tokens: the variables that hold tokens, such as ``bos_token``.

    Attributes:
        variables: those that it reads.
        names: the words that it holds as constants or as names of attributes, such as the keys of messages.
        replaces: whether it may take characters out of a text.

    Raises:
        RingkvError: the source is not valid jinja, or longer than 262,144 characters.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        if len(source) > _MAX_SOURCE:
            raise RingkvError(f"chat template: {len(source)} characters; accepted are up to {_MAX_SOURCE}")
        try:
            source.encode()
        except UnicodeEncodeError as error:
            raise RingkvError("chat template: it holds half a surrogate pair, which is not valid Unicode") from error
        self.source = source
        self._special_tokens: dict[str, Any] = dict(special_tokens or {})
        self._sandbox = Sandbox()
        self._lock = threading.Lock()
        try:
            tree = self._sandbox.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            self.names = frozenset(filter(str.isidentifier, _words(tree)))
            filters = {node.name for node in tree.find_all(nodes.Filter)}
            self.replaces = "replace" in self.names | filters
            self._template = self._sandbox.from_string(tree)
        except Exception as error:  # compiling evaluates constant expressions, which raise whatever they raise
            raise _one_line(error) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: of plain JSON types.
            add_generation_prompt: whether the text ends where the assistant begins.
            thinking: the variable ``enable_thinking``; None leaves it undefined.

        Raises:
            RingkvError: the template raises an error, or is stopped for taking too long.
        """
        variables = self._special_tokens | {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if thinking is not None:
            variables["enable_thinking"] = thinking
        with self._lock:
            try:
                self._sandbox.start(messages)
                return "".join(map(self._sandbox.charged, self._template.generate(variables)))
            # A template is a program, and may raise anything that a program raises.
            except Exception as error:
                raise _one_line(error) from error


def _words(tree: nodes.Template) -> Iterator[str]:
    yield from (node.attr for node in tree.find_all(nodes.Getattr))
    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


def _one_line(error: Exception) -> RingkvError:
    text = " ".join(str(error).split())[:_MAX_MESSAGE]
    expected = isinstance(error, TemplateError) and text
    return RingkvError(f"chat template: {text if expected else f'{type(error).__name__}: {text}'}")
