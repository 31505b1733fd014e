"""What the commands share: options as one frozen dataclass, reading texts, one line for an error, Ctrl-C."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
import typer.core

from ringkv.errors import RingkvError

if TYPE_CHECKING:
    from ringkv.engine import Engine, RingConfig, SamplingParams

SAMPLING_FIELDS: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "thinking")
SAMPLING_FIELDS += ("stop_token_ids", "max_thinking_tokens", "on_repetition")
# The headings of --help.
RING, SAMPLING, MACHINE, OUTPUT = "Ring", "Sampling", "Model and machine", "Output"
MEASURED = "What is measured"

# What completion offers: constants here, since the engine's own lists take a second to import.
POLICY_NAMES: tuple[str, ...] = ("full", "streaming", "random", "tova", "h2o", "snapkv", "rkv", "curdkv", "value-range")
POLICY_NAMES += ("vase-attnv", "vase-dkv")
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
    stop: Annotated[list[str] | None, option("A string that ends the text; may be repeated.", SAMPLING)] = None
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

    system: Annotated[str | None, option("A system message.", SAMPLING)] = None
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
        return Engine.from_pretrained(self.model, ring=ring, lanes=lanes, **machine)

    def params(self, **more: Any) -> SamplingParams:
        """The sampling options as the engine takes them."""
        from ringkv.engine import SamplingParams

        return SamplingParams(**self.given("seed", *SAMPLING_FIELDS), **more)


def read_text(text: str | None, file: Path | None, name: str) -> str:
    """The text of a command: as given, of stdin where it is -, or of a file.

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
            text = file.read_text(encoding="utf-8")
        elif text == "-":
            text = sys.stdin.buffer.read().decode("utf-8")
    except (OSError, ValueError) as error:  # a path may hold a null byte
        raise RingkvError(f"{what}: cannot be read as UTF-8 text ({error})") from None
    if not text:
        raise RingkvError(f"{what}: it is empty; accepted is a text")
    return text


def check_output(name: str, path: Path, *others: Path | None) -> None:
    """Refuse at the start a file that could not be written at the end, or that another option of the command names."""
    from ringkv.files import same_file

    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {str(path.parent)!r}"
    elif path.exists() and not path.is_file():
        why = "it is no regular file"
    elif not os.access(path.parent, os.W_OK):
        why = f"the folder {str(path.parent.absolute())!r} cannot be written to"
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
            with reporting(options.debug):
                code = function(options=options, **values)
            if code:
                raise typer.Exit(code)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        # typer reads it; mypy knows no function that has one.
        command.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*shared, *own]}
        return command

    return decorate


class Commands(typer.core.TyperGroup):
    """The group of all commands. A command that is called wrongly is answered in one line, too."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **more: Any,
    ) -> Any:
        """Run one, and exit with its code."""
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # it was closed: nothing comes from there, or goes there
                setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open as long as the process
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **more)
        except SystemExit as error:  # completion's; or what rich makes of a reader that left
            code = 0 if isinstance(error.__context__, BrokenPipeError) else error.code
        except Exception as error:  # typer's and click's share no class, and what is not theirs is raised again
            debug = "--debug" in (sys.argv if args is None else args)
            if isinstance(error, OSError) and not debug:
                told, code = str(error), 1
            elif standalone_mode and hasattr(error, "format_message"):  # typer's classes, or click's, by its version
                told, code = f"{' '.join(error.format_message().split()).rstrip('.')}; -h lists what is accepted", 2
            else:
                raise
            typer.echo(f"ringkv: {told}", err=True)
        if standalone_mode:
            sys.exit(code or 0)
        return code


@contextmanager
def reporting(debug: bool) -> Iterator[None]:
    """Turn errors into one line on stderr and an exit code.

    The code is 2 for bad input, 1 for a failure of the machine or of this program, 130 after an interrupt, and 0 where
    the reader of stdout has left. With ``debug`` an error is shown with its traceback, and log lines are printed.
    """
    if debug:
        import logging

        logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
        sys.stdout.flush()
    except typer.Exit:  # a RuntimeError
        raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it somewhere to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except Exception as error:  # one line, whatever went wrong
        if debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, (RingkvError, MemoryError, OSError, RuntimeError)):
            text = f"{type(error).__name__}: {text}; --debug shows where"
        typer.echo(f"ringkv: {text}", err=True)
        raise typer.Exit(2 if isinstance(error, RingkvError) else 1) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interrupt_cancels(engine: Engine) -> Iterator[list[int]]:
    """While open, the first Ctrl-C (or SIGTERM) ends the running request and the second one the program.

    Yields:
        A list that holds the signals that came.
    """
    came: list[int] = []

    def handler(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt
        engine.cancel(0)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, old in before.items():
            signal.signal(number, old)
