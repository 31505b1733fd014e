"""What a line typed in a chat means: a message to send, or a command."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any

from ringkv.apps.chat.session import ChatSession, Events
from ringkv.apps.chat.transcript import PARAMS
from ringkv.errors import RingkvError

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation; the system message stays",
    "/system": "show the system message; /system TEXT sets it, /system - takes it away",
    "/set": "show the sampling options; /set NAME VALUE sets one, /set NAME default takes it back",
    "/think": "show or hide thoughts; showing them shows the last one",
    "/stats": "figures of the conversation and of the last answer",
    "/save": "/save FILE writes the conversation, its options and its ring",
    "/load": "/load FILE goes on from a saved one",
    "/retry": "ask the last question again, with another seed",
    "/continue": "go on with an answer that max_tokens or Ctrl-C cut off",
    "/quit": "leave; so does Ctrl-D",
}
HINTS = (
    "A line that ends in \\ goes on in the next one.",
    'A line that begins with """ begins a text of several lines; """ at the end of one ends it.',
    "A message that is to begin with / is typed with a space before it.",
    "Ctrl-C stops an answer, and leaves at the prompt.",
)
_ALIASES = {"/exit": "/quit"}
_WITH_TEXT = ("/system", "/set", "/save", "/load")


@dataclass(frozen=True)
class Reply:
    """What a typed line leads to.

    Attributes:
        text: to show.
        events: an answer to stream.
        quit: whether to leave.
    """

    text: str = ""
    events: Events | None = None
    quit: bool = False


def handle(session: ChatSession, line: str) -> Reply:
    """Do what a typed line says. What begins with / and is no command is explained, never sent.

    Raises:
        RingkvError: it is refused, and nothing changed.
    """
    if not line.startswith("/"):
        return Reply(events=session.send(line.strip())) if line.strip() else Reply()
    name, rest = [*line.split(maxsplit=1), ""][:2]
    name, rest = _ALIASES.get(name, name), rest.strip()
    if rest and name in COMMANDS and name not in _WITH_TEXT:
        raise RingkvError(f"{name} = {rest!r}: accepted is {name} alone")
    match name:
        case "/help":
            return Reply("\n".join([table(COMMANDS), *HINTS]))
        case "/reset":
            session.reset()
            return Reply("the conversation is forgotten")
        case "/system":
            if rest:
                session.set_system(None if rest == "-" else rest)
            return Reply(f"system: {session.system}" if session.system is not None else "there is no system message")
        case "/set":
            return Reply(_set(session, rest) if rest else table(_options(session)))
        case "/think":
            session.show_thinking = not session.show_thinking
            last = f"; the last one:\n{session.thought}" if session.thought else ""
            return Reply(f"thoughts are shown{last}" if session.show_thinking else "thoughts are hidden")
        case "/stats":
            return Reply(table(_figures(session)))
        case "/save":
            session.save(rest)
            return Reply(f"saved to {rest}: {_turns(session)}")
        case "/load":
            ring = session.load(rest)
            return Reply(f"loaded from {rest}: {_turns(session)}, {ring}")
        case "/retry":
            return Reply(events=session.retry())
        case "/continue":
            return Reply(events=session.resume())
        case "/quit":
            return Reply(quit=True)
    close = difflib.get_close_matches(name, COMMANDS, 1)
    hint = f"did you mean {close[0]}?" if close else "/help lists them;"
    return Reply(f"{name} is no command and was not sent ({hint} a space before the / sends it)")


def table(rows: dict[str, str]) -> str:
    """Lines of a name and a text."""
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def _turns(session: ChatSession) -> str:
    turns = len(session.turns) // 2
    return f"{turns} turn{'s' * (turns != 1)}"


def _set(session: ChatSession, rest: str) -> str:
    name, text = [*rest.split(maxsplit=1), ""][:2]
    if not text:
        raise RingkvError(f"/set {name}: a value is missing (default takes it back)")
    session.set(name, PARAMS.get(name) if text == "default" else _value(text))
    return f"{name} = {getattr(session.params, name)!r}"


def _value(text: str) -> Any:
    """What a typed value means: none, JSON where it is JSON, or the text itself."""
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _options(session: ChatSession) -> dict[str, str]:
    stats = session.stats()
    options = {name: f"{one['value']!r} ({one['source']})" for name, one in stats["sampling"].items() if name != "n"}
    return options | {"seed": "drawn" if stats["seed"] is None else f"{stats['seed']} (user)"}


def _figures(session: ChatSession) -> dict[str, str]:
    stats, last = session.stats(), session.last
    ring = stats["ring"]
    figures = {
        "model": stats["model"],
        "turns": f"{stats['turns']}; {stats['tokens']} tokens and {stats['evictions']} evictions in all answers",
        "ring": f"policy {ring['policy']}, budget {ring['budget']} + window {ring['window']} = "
        f"{ring['capacity']} slots a KV head, {ring['bytes'] / 2**20:.1f} MiB",
    }
    if last is not None:
        figures["last answer"] = (
            f"{last.prompt_tokens} prompt + {last.completion_tokens} new tokens ({last.thinking_tokens} thinking), "
            f"{last.timing['tokens_per_s']:.1f} tok/s, {ring['seen']} seen, {ring['kept']} live, "
            f"{ring['evictions']} evictions, ended by {last.finish_reason}, seed {ring['seed']}"
        )
    options = _options(session)
    shown = dict.fromkeys(
        ["temperature", "top_p", "max_tokens", *(n for n in options if options[n].endswith("(user)"))]
    )
    return figures | {"next answer": ", ".join(f"{name} {options[name]}" for name in shown)}
