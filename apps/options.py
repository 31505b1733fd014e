"""What the commands share: options as one frozen dataclass, and the texts and files that options name."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
from typer.models import OptionInfo

from ringkv.apps.process import reporting
from ringkv.errors import RingkvError
from ringkv.files import missing_folder, same_file, utf8_text

if TYPE_CHECKING:
    from ringkv.engine import Engine, RingConfig, SamplingParams

SAMPLING_FIELDS: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "thinking")
SAMPLING_FIELDS += ("stop_token_ids", "max_thinking_tokens", "on_repetition")
# The headings of --help.
RING, SAMPLING, MACHINE, OUTPUT = "Ring", "Sampling", "Model and machine", "Output"
MEASURED, STATE = "What is measured", "Stop and go on"

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


def option(
    help: str,
    panel: str,
    *names: str,
    default: Any = None,
    choices: Sequence[str] = (),
    metavar: str = "TEXT",
    **more: Any,
) -> Any:
    """An option that takes a text. Its help says the default, where there is one."""
    if choices:
        more["autocompletion"] = lambda: [*choices]  # typer leaves out what does not fit
    more |= {"help": help, "rich_help_panel": panel, "metavar": metavar}
    return typer.Option(default, *names, show_default=False, **more)


def flag(help: str, panel: str, *names: str, default: bool | None = False) -> Any:
    """An option that takes no value."""
    return option(help, panel, *names, default=default, metavar="")


def numeric(help: str, panel: str, *names: str, default: Any = None, metavar: str = "INT") -> Any:
    """An option that takes a number. A text that is no number is passed on, for the check of its field to refuse."""
    parser = real if metavar == "FLOAT" else number
    return option(help, panel, *names, default=default, metavar=metavar, parser=parser)


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

    model: str = option(
        "A folder, a .gguf file, a hub id, or smollm2.", MACHINE, "-m", "--model", default="smollm2", metavar="MODEL"
    )
    revision: str | None = option("Branch, tag or commit of a hub id.", MACHINE)
    device: str = option("auto, cpu, cuda or cuda:N.", MACHINE, default="auto", choices=CHOICES["device"])
    dtype: str = option(
        "auto, float16, bfloat16, float32 or float64.", MACHINE, default="auto", choices=CHOICES["dtype"]
    )
    backend: str = option("auto, torch, triton or native.", MACHINE, default="auto", choices=CHOICES["backend"])
    threads: Any = numeric("CPU threads (as many as torch chooses).", MACHINE)

    budget: Any = numeric(
        "Tokens that each KV head keeps after an eviction (4096), or auto: the most that fit.", RING, metavar="INT|auto"
    )
    window: Any = numeric(
        "The most recent tokens, which are never evicted; also how many an eviction takes (64).", RING
    )
    policy: str | None = option(
        "What leaves: a name, name:field=value,..., or your own module:Class (vase-attnv; see `ringkv policies`).",
        RING,
        choices=POLICY_NAMES,
    )
    retention: str | None = option(
        "What of a prompt enters: refreekv, all, or refreekv:threshold=0.05.", RING, choices=CHOICES["retention"]
    )
    sinks: Any = numeric("The first tokens of the text, which always stay (4).", RING)
    pin: str | None = option("What else always stays: none, system or prompt (none).", RING, choices=CHOICES["pin"])

    temperature: Any = numeric("The temperature; 0 is greedy (0.6).", SAMPLING, metavar="FLOAT")
    top_p: Any = numeric(
        "Draw from the smallest set of likely tokens that reaches this sum (0.95).", SAMPLING, metavar="FLOAT"
    )
    top_k: Any = numeric("Draw from the k likeliest tokens; 0 is off (0).", SAMPLING)
    min_p: Any = numeric(
        "Draw from tokens at least this share as likely as the likeliest (0).", SAMPLING, metavar="FLOAT"
    )
    seed: Any = numeric("The same seed gives the same text; without one, a seed is drawn and reported.", SAMPLING)
    max_tokens: Any = numeric("The most tokens of an answer (32768; under policy full, what fits).", SAMPLING)
    stop: list[str] | None = option("A string that ends the text; may be repeated.", SAMPLING, parser=argument_text)
    stop_token_ids: list[Any] | None = numeric(
        "The id of a token that ends the text; may be repeated.", SAMPLING, "--stop-token-id"
    )
    thinking: bool | None = flag(
        "Ask the chat template for a thought, or for none.", SAMPLING, "--thinking/--no-thinking", default=None
    )
    max_thinking_tokens: Any = numeric("Close the thought after this many tokens.", SAMPLING)
    on_repetition: str | None = option(
        "What to do when the text loops: stop, close_thought or ignore (stop).",
        SAMPLING,
        choices=CHOICES["on_repetition"],
    )

    system: str | None = option("A system message.", SAMPLING, parser=argument_text)
    raw: bool = flag("Take the prompt as it is, without the chat template.", SAMPLING, "--raw")
    stats: bool = flag("Print the whole table of figures on stderr.", OUTPUT, "--stats")
    quiet: bool = flag("Print no summary on stderr.", OUTPUT, "-q", "--quiet")
    debug: bool = flag("Show tracebacks and log lines.", OUTPUT, "--debug")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, OptionInfo):  # of an option that the command does not have
                object.__setattr__(self, name, value.default)

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the named options that were given, by name."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def checkpoint(self, named: str | None) -> str:
        """The model, from the argument of a command or else from --model.

        Raises:
            RingkvError: both are given, and differ.
        """
        if named is not None and self.model not in (Options().model, named):
            raise RingkvError(f"--model {self.model}: {named} is named too; accepted is one of them")
        return self.model if named is None else named

    def with_ring(self, about: Mapping[str, Any]) -> Options:
        """With the ring of a snapshot, where no option says another one.

        Raises:
            RingkvError: its policy is of a module, which no file may have imported.
        """
        theirs: dict[str, Any] = {name: about.get(name) for name in ("budget", "window", "policy", "sinks")}
        if self.policy is None and str(theirs["policy"]).partition(":")[0] not in POLICY_NAMES:
            raise RingkvError(f"--policy: the snapshot is of {theirs['policy']!r}, which --resume takes by name only")
        theirs |= self.given(*theirs)
        return replace(self, **theirs)

    def ring(self) -> RingConfig:
        """The ring that these options describe; a policy may be a class of a module in the current folder."""
        from ringkv.engine import RingConfig

        module, colon, _ = (self.policy or "").partition(":")
        if colon and module not in POLICY_NAMES and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # a module of the user's own is found here, as python -m finds it
        return RingConfig(**self.given(*RING_FIELDS))

    def engine(self, lanes: Any) -> Engine:
        """Load the model that these options name, with their ring."""
        from ringkv.engine import Engine

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
    hints = get_type_hints(Options)
    chosen = [field for field in fields(Options) if not names or field.name in (*names, "debug")]
    shared = [_parameter(field.name, field.default, hints[field.name]) for field in chosen]

    def decorate(function: Command) -> Callable[..., None]:
        hints, defaults = get_type_hints(function), inspect.signature(function).parameters
        own = [_parameter(name, one.default, hints[name]) for name, one in defaults.items() if name != "options"]

        def command(**values: Any) -> None:
            options = Options(**{field.name: values.pop(field.name) for field in chosen})
            if options.quiet:  # the hub's client looks when it is imported
                os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
            with reporting(options.debug):
                code = function(options=options, **values)
            if code:
                raise typer.Exit(code)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        # typer reads it; mypy knows no function that has one.
        command.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in [*shared, *own]}
        return command

    return decorate


def _parameter(name: str, default: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
