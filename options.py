"""What the commands share: their options as one frozen dataclass, how errors are told, what Ctrl-C does."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ringkv.errors import RingkvError

if TYPE_CHECKING:
    from ringkv.engine.config import RingConfig, SamplingParams
    from ringkv.engine.engine import Engine

SAMPLING_FIELDS: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "thinking")
SAMPLING_FIELDS += ("max_thinking_tokens", "on_repetition")
RING, SAMPLING, MACHINE, OUTPUT = "Ring", "Sampling", "Model and machine", "Output"


def option(help: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def count(given: str | int) -> int | str:
    """An int, or the text: "auto", or what the engine refuses by name."""
    return int(given) if str(given).isdecimal() else given


@dataclass(frozen=True)
class Options:
    """What generate and chat share; None leaves the choice to the checkpoint or the engine's default."""

    model: Annotated[str, option("A folder, a .gguf file, a hub id, or smollm2.", MACHINE, "-m", "--model")] = "smollm2"
    revision: Annotated[str | None, option("Branch, tag or commit of a hub id.", MACHINE)] = None
    device: Annotated[str, option("auto, cpu, cuda or cuda:N.", MACHINE)] = "auto"
    dtype: Annotated[str, option("auto, float16, bfloat16, float32 or float64.", MACHINE)] = "auto"
    backend: Annotated[str, option("auto, torch or triton.", MACHINE)] = "auto"
    threads: Annotated[int | None, option("CPU threads.", MACHINE)] = None

    budget: Annotated[
        Any, option("Tokens kept a KV head after an eviction (4096); auto: what fits.", RING, parser=count)
    ] = None
    window: Annotated[int | None, option("Most recent tokens, never evicted; victims an eviction (64).", RING)] = None
    policy: Annotated[
        str | None, option("What leaves: a name or name:field=value,... (vase-attnv; see `ringkv policies`).", RING)
    ] = None
    retention: Annotated[
        str | None, option("What of a prompt enters: refreekv, all, or refreekv:threshold=0.05.", RING)
    ] = None
    sinks: Annotated[int | None, option("First tokens, always kept (4).", RING)] = None
    pin: Annotated[str | None, option("Also always kept: none, system or prompt (none).", RING)] = None

    temperature: Annotated[float | None, option("0 is greedy (0.6).", SAMPLING)] = None
    top_p: Annotated[float | None, option("Smallest set of likely tokens that reaches it (0.95).", SAMPLING)] = None
    top_k: Annotated[int | None, option("Only the k likeliest tokens; 0 is off (0).", SAMPLING)] = None
    min_p: Annotated[float | None, option("Only tokens this share as likely as the likeliest (0).", SAMPLING)] = None
    seed: Annotated[int | None, option("Same seed, same text.", SAMPLING)] = None
    max_tokens: Annotated[int | None, option("The limit (32768; under policy full what fits).", SAMPLING)] = None
    stop: Annotated[list[str] | None, option("A string that ends the text; may be repeated.", SAMPLING)] = None
    thinking: Annotated[
        bool | None, option("Ask the chat template for a thought, or for none.", SAMPLING, "--thinking/--no-thinking")
    ] = None
    max_thinking_tokens: Annotated[int | None, option("Close the thought after so many tokens.", SAMPLING)] = None
    on_repetition: Annotated[str | None, option("stop, close_thought or ignore (stop).", SAMPLING)] = None

    system: Annotated[str | None, option("A system message.", SAMPLING)] = None
    raw: Annotated[bool, option("Take the prompt as it is, without the chat template.", SAMPLING, "--raw")] = False
    stats: Annotated[bool, option("Print the whole table of figures on stderr.", OUTPUT, "--stats")] = False
    quiet: Annotated[bool, option("No summary on stderr.", OUTPUT, "-q", "--quiet")] = False
    debug: Annotated[bool, option("Tracebacks and log lines.", OUTPUT, "--debug")] = False

    def given(self, *names: str) -> dict[str, Any]:
        """The named options that were given."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def ring(self) -> RingConfig:
        """The ring that these options name."""
        from ringkv.engine.config import RingConfig

        return RingConfig(**self.given("budget", "window", "policy", "retention", "sinks", "pin"))

    def engine(self, lanes: Any) -> Engine:
        """Load what these options name."""
        from ringkv.engine.engine import Engine

        ring = self.ring()
        machine = self.given("device", "dtype", "backend", "revision", "threads", "seed")
        return Engine.from_pretrained(self.model, ring=ring, lanes=lanes, **machine)

    def params(self, **more: Any) -> SamplingParams:
        """The sampling options as the engine takes them."""
        from ringkv.engine.config import SamplingParams

        return SamplingParams(**self.given("seed", *SAMPLING_FIELDS), **more)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command every field of Options as an option; it receives them as its argument ``options``."""
    hints = get_type_hints(Options, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(Options)
    ]
    own_hints = get_type_hints(function, include_extras=True)
    own = [
        parameter.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "options"
    ]

    def command(**values: Any) -> None:
        options = Options(**{field.name: values.pop(field.name) for field in fields(Options)})
        with reporting(options.debug):
            function(options=options, **values)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *shared]}
    return command


@contextmanager
def reporting(debug: bool) -> Iterator[None]:
    """Errors as one line and an exit code: 2 bad input, 1 the machine, 130 interrupted, 0 a reader that left."""
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
    except (RingkvError, MemoryError, OSError, RuntimeError) as error:
        if debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
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
