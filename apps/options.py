"""What the commands share: options as one frozen dataclass, and the texts and files that options name."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ringkv.apps.process import reporting
from ringkv.errors import RingkvError
from ringkv.files import missing_folder, same_file, utf8_text

if TYPE_CHECKING:
    from ringkv.engine import Engine, RingConfig, SamplingParams

SAMPLING_FIELDS: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "thinking")
SAMPLING_FIELDS += ("stop_token_ids", "max_thinking_tokens", "on_repetition")
# The headings of --help.
RING, SAMPLING, MACHINE, OUTPUT = "Ring", "Sampling", "Model and machine", "Output"
MEASURED = "What is measured"

# What completion offers: constants here, since the engine's own lists take a second to import.
POLICY_NAMES: tuple[str, ...] = ("full", "streaming", "random", "tova", "h2o", "snapkv", "rkv", "gkv", "curdkv")
POLICY_NAMES += ("value-range", "vase-attnv", "vase-dkv", "expected-attention", "triattention")
CHOICES = {
    "policy": POLICY_NAMES,
    "retention": ("refreekv", "all"),
    "pin": ("none", "system", "prompt"),
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float16", "bfloat16", "float32", "float64"),
    "backend": ("auto", "torch", "triton", "native"),
    "on_repetition": ("stop", "close_thought", "ignore"),
    "compare": ("transformers",),
}
WHERE = ("model", "revision", "device", "dtype")
RING_FIELDS = ("budget", "window", "policy", "retention", "sinks", "pin")


def option(help: str, panel: str, *names: str, choices: Sequence[str] = (), **more: Any) -> Any:
    """An option that takes a text. Its help says the default, where there is one."""
    if choices:
        more["autocompletion"] = lambda: [*choices]  # typer leaves out what does not fit
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **{"metavar": "TEXT", **more})


def flag(help: str, panel: str, *names: str) -> Any:
    """An option that takes no value."""
    return option(help, panel, *names, metavar="")


def numeric(help: str, panel: str, *names: str, metavar: str = "INT", **more: Any) -> Any:
    """An option that takes a number. A text that is no number is passed on, for the check of its field to refuse."""
    return option(help, panel, *names, parser=real if metavar == "FLOAT" else number, metavar=metavar, **more)


def argument_text(given: str) -> str:
    """A text of the command line: bytes that the locale could not decode are read as UTF-8, if they are UTF-8."""
    try:
        return given.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return given  # with half a character in it, which is refused where the text is encoded


def real(given: str | float) -> float | str:
    """A text as a float where it reads as one, else the text itself."""
    return number(given, (float,))


def number(given: str | float, kinds: Sequence[type[float]] = (int, float)) -> float | str:
    """A text as an int or a float where it reads as one, else the text itself."""
    for kind in kinds:
        try:
            return kind(given)
        except ValueError:
            pass
    return str(given)


@dataclass(frozen=True)
class Options:
    """Options that commands share. None leaves the choice to the checkpoint, or is the engine's default."""

    model: Annotated[
        str, option("A folder, a .gguf file, a hub id, or smollm2.", MACHINE, "-m", "--model", metavar="MODEL")
    ] = "smollm2"
    revision: Annotated[str | None, option("Branch, tag or commit of a hub id.", MACHINE)] = None
    device: Annotated[str, option("auto, cpu, cuda or cuda:N.", MACHINE, choices=CHOICES["device"])] = "auto"
    dtype: Annotated[str, option("auto, float16, bfloat16, float32 or float64.", MACHINE, choices=CHOICES["dtype"])] = (
        "auto"
    )
    backend: Annotated[str, option("auto, torch, triton or native.", MACHINE, choices=CHOICES["backend"])] = "auto"
    threads: Annotated[Any, numeric("CPU threads (as many as torch chooses).", MACHINE)] = None

    budget: Annotated[
        Any,
        numeric(
            "Tokens that each KV head keeps after an eviction (4096), or auto: the most that fit.",
            RING,
            metavar="INT|auto",
        ),
    ] = None
    window: Annotated[
        Any, numeric("The most recent tokens, which are never evicted; also how many an eviction takes (64).", RING)
    ] = None
    policy: Annotated[
        str | None,
        option(
            "What leaves: a name, name:field=value,..., or your own module:Class (vase-attnv; see `ringkv policies`).",
            RING,
            choices=POLICY_NAMES,
        ),
    ] = None
    retention: Annotated[
        str | None,
        option(
            "What of a prompt enters: refreekv, all, or refreekv:threshold=0.05.", RING, choices=CHOICES["retention"]
        ),
    ] = None
    sinks: Annotated[Any, numeric("The first tokens of the text, which always stay (4).", RING)] = None
    pin: Annotated[
        str | None, option("What else always stays: none, system or prompt (none).", RING, choices=CHOICES["pin"])
    ] = None

    temperature: Annotated[Any, numeric("The temperature; 0 is greedy (0.6).", SAMPLING, metavar="FLOAT")] = None
    top_p: Annotated[
        Any,
        numeric("Draw from the smallest set of likely tokens that reaches this sum (0.95).", SAMPLING, metavar="FLOAT"),
    ] = None
    top_k: Annotated[Any, numeric("Draw from the k likeliest tokens; 0 is off (0).", SAMPLING)] = None
    min_p: Annotated[
        Any, numeric("Draw from tokens at least this share as likely as the likeliest (0).", SAMPLING, metavar="FLOAT")
    ] = None
    seed: Annotated[
        Any, numeric("The same seed gives the same text; without one, a seed is drawn and reported.", SAMPLING)
    ] = None
    max_tokens: Annotated[
        Any, numeric("The most tokens of an answer (32768; under policy full, what fits).", SAMPLING)
    ] = None
    stop: Annotated[
        list[str] | None, option("A string that ends the text; may be repeated.", SAMPLING, parser=argument_text)
    ] = None
    stop_token_ids: Annotated[
        list[Any] | None, numeric("The id of a token that ends the text; may be repeated.", SAMPLING, "--stop-token-id")
    ] = None
    thinking: Annotated[
        bool | None, flag("Ask the chat template for a thought, or for none.", SAMPLING, "--thinking/--no-thinking")
    ] = None
    max_thinking_tokens: Annotated[Any, numeric("Close the thought after this many tokens.", SAMPLING)] = None
    on_repetition: Annotated[
        str | None,
        option(
            "What to do when the text loops: stop, close_thought or ignore (stop).",
            SAMPLING,
            choices=CHOICES["on_repetition"],
        ),
    ] = None

    system: Annotated[str | None, option("A system message.", SAMPLING, parser=argument_text)] = None
    raw: Annotated[bool, flag("Take the prompt as it is, without the chat template.", SAMPLING, "--raw")] = False
    stats: Annotated[bool, flag("Print the whole table of figures on stderr.", OUTPUT, "--stats")] = False
    quiet: Annotated[bool, flag("Print no summary on stderr.", OUTPUT, "-q", "--quiet")] = False
    debug: Annotated[bool, flag("Show tracebacks and log lines.", OUTPUT, "--debug")] = False

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the named options that were given, by name."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def checkpoint(self, named: str | None) -> str:
        """The model, from the argument of a command or else from --model.

        Raises:
            RingkvError: both are given, and differ.
        """
        if named is not None and self.model not in (Options.model, named):
            raise RingkvError(f"--model {self.model}: {named} is named too; accepted is one of them")
        return self.model if named is None else named

    def ring(self) -> RingConfig:
        """The ring that these options describe; a policy may be a class of a module in the current folder."""
        from ringkv.engine import RingConfig

        module, colon, _ = (self.policy or "").partition(":")
        if colon and module not in POLICY_NAMES and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # a module of the user's own is found here, as python -m finds it
        return RingConfig(**self.given("budget", "window", "policy", "retention", "sinks", "pin"))

    def engine(self, lanes: Any) -> Engine:
        """Load the model that these options name, with their ring."""
        from ringkv.engine import Engine

        if self.quiet:  # huggingface_hub reads it when it is imported
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        ring = self.ring()
        machine = self.given("device", "dtype", "backend", "revision", "threads", "seed")
        engine = Engine.from_pretrained(self.model, ring=ring, lanes=lanes, **machine)
        engine.name = argument_text(engine.name)  # for results and traces; the model's own is a path
        return engine

    def params(self, **more: Any) -> SamplingParams:
        """The sampling options as the engine takes them."""
        from ringkv.engine import SamplingParams

        return SamplingParams(**self.given("seed", *SAMPLING_FIELDS), **more)


def read_text(text: str | None, file: Path | None, name: str) -> str:
    """The text of a command: as given, of stdin where it is -, or of a file, whose line ends stay as they are.

    Args:
        name: the option that names the file.

    Raises:
        RingkvError: both or none were given, or the text is empty or not UTF-8.
    """
    if (text is None) == (file is None):
        raise RingkvError(f"prompt: give one, as an argument, as - for stdin, or with {name}")
    what = f"{name} {str(file)!r}" if file is not None else "stdin" if text == "-" else "prompt"
    try:
        if file is not None:
            text = utf8_text(file.read_bytes())
        elif text == "-":
            text = utf8_text(sys.stdin.buffer.read())
    except (OSError, ValueError) as error:  # a path may hold a null byte
        raise RingkvError(f"{what}: cannot be read as UTF-8 text ({error})") from None
    if not text:
        raise RingkvError(f"{what}: it is empty; accepted is a text")
    return text


def check_output(name: str, path: Path, *others: Path | None) -> None:
    """Refuse at the start a file that could not be written at the end, or that another option of the command names."""
    folder = Path(os.path.realpath(path)).parent
    if path.is_dir():
        why = "it is a folder"
    elif (missing := missing_folder(path)) is not None:
        why = f"there is no folder {str(missing)!r}"
    elif path.exists() and not path.is_file():
        why = "it is no regular file"
    elif not os.access(folder, os.W_OK):
        why = f"the folder {str(folder)!r} cannot be written to"
    elif any(other is not None and same_file(path, other) for other in others):
        why = "this command names it twice"
    else:
        return
    raise RingkvError(f"{name} {str(path)!r}: {why}; accepted is the name of a file")


@contextmanager
def _downloads_in_silence(quiet: bool) -> Iterator[None]:
    """While open, the hub's client shows no progress, if a command is to be quiet; it looks when it is imported."""
    name = "HF_HUB_DISABLE_PROGRESS_BARS"
    before = os.environ.get(name)
    if quiet:
        os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def listed(text: str, separator: str = ",") -> list[str]:
    """The parts of a list that is typed as one text."""
    return [each.strip() for each in text.split(separator)]


Command = Callable[..., int | None]


def with_options(*names: str) -> Callable[[Command], Callable[..., None]]:
    """Give a command fields of ``Options`` as its options, and ``Options`` of them as its argument ``options``.

    The command returns its exit code; None is 0. Its errors are told as ``reporting`` does.

    Args:
        names: the fields, beside ``debug``; none are all of them.
    """
    hints = get_type_hints(Options, include_extras=True)
    chosen = [field for field in fields(Options) if not names or field.name in (*names, "debug")]
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in chosen
    ]

    def decorate(function: Command) -> Callable[..., None]:
        own_hints = get_type_hints(function, include_extras=True)
        own = [
            parameter.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(function).parameters.items()
            if name != "options"
        ]

        def command(**values: Any) -> None:
            options = Options(**{field.name: values.pop(field.name) for field in chosen})
            with reporting(options.debug), _downloads_in_silence(options.quiet):
                code = function(options=options, **values)
            if code:
                raise typer.Exit(code)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        # typer reads it; mypy knows no function that has one.
        command.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*shared, *own]}
        return command

    return decorate
