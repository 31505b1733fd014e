"""The command line: parses into frozen dataclasses and calls the engine. stdout carries text or JSON only."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ringkv.errors import RingkvError

if TYPE_CHECKING:
    from ringkv.engine.completion import Completion
    from ringkv.engine.config import RingConfig, SamplingParams
    from ringkv.engine.engine import Engine

app = typer.Typer(
    name="ringkv",
    help="Long chain-of-thought generation on a KV ring of fixed size.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SAMPLING_FIELDS: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "thinking")
SAMPLING_FIELDS += ("max_thinking_tokens", "on_repetition")
RING, SAMPLING, MACHINE, OUTPUT = "Ring", "Sampling", "Model and machine", "Output"


def _option(help: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def _count(given: str | int) -> int | str:
    """An int, or the text: "auto", or what the engine refuses by name."""
    return int(given) if str(given).isdecimal() else given


@dataclass(frozen=True)
class Options:
    """What generate and chat share; None leaves the choice to the checkpoint or the engine's default."""

    model: Annotated[str, _option("A folder, a .gguf file, a hub id, or smollm2.", MACHINE, "-m", "--model")] = (
        "smollm2"
    )
    revision: Annotated[str | None, _option("Branch, tag or commit of a hub id.", MACHINE)] = None
    device: Annotated[str, _option("auto, cpu, cuda or cuda:N.", MACHINE)] = "auto"
    dtype: Annotated[str, _option("auto, float16, bfloat16, float32 or float64.", MACHINE)] = "auto"
    backend: Annotated[str, _option("auto, torch or triton.", MACHINE)] = "auto"
    threads: Annotated[int | None, _option("CPU threads.", MACHINE)] = None

    budget: Annotated[
        Any, _option("Tokens kept a KV head after an eviction (4096); auto: what fits.", RING, parser=_count)
    ] = None
    window: Annotated[int | None, _option("Most recent tokens, never evicted; victims an eviction (64).", RING)] = None
    policy: Annotated[
        str | None, _option("What leaves: a name or name:field=value,... (vase-attnv; see `ringkv policies`).", RING)
    ] = None
    retention: Annotated[
        str | None, _option("What of a prompt enters: refreekv, all, or refreekv:threshold=0.05.", RING)
    ] = None
    sinks: Annotated[int | None, _option("First tokens, always kept (4).", RING)] = None
    pin: Annotated[str | None, _option("Also always kept: none, system or prompt (none).", RING)] = None

    temperature: Annotated[float | None, _option("0 is greedy (0.6).", SAMPLING)] = None
    top_p: Annotated[float | None, _option("Smallest set of likely tokens that reaches it (0.95).", SAMPLING)] = None
    top_k: Annotated[int | None, _option("Only the k likeliest tokens; 0 is off (0).", SAMPLING)] = None
    min_p: Annotated[float | None, _option("Only tokens this share as likely as the likeliest (0).", SAMPLING)] = None
    seed: Annotated[int | None, _option("Same seed, same text.", SAMPLING)] = None
    max_tokens: Annotated[int | None, _option("The limit (32768; under policy full what fits).", SAMPLING)] = None
    stop: Annotated[list[str] | None, _option("A string that ends the text; may be repeated.", SAMPLING)] = None
    thinking: Annotated[
        bool | None, _option("Ask the chat template for a thought, or for none.", SAMPLING, "--thinking/--no-thinking")
    ] = None
    max_thinking_tokens: Annotated[int | None, _option("Close the thought after so many tokens.", SAMPLING)] = None
    on_repetition: Annotated[str | None, _option("stop, close_thought or ignore (stop).", SAMPLING)] = None

    system: Annotated[str | None, _option("A system message.", SAMPLING)] = None
    raw: Annotated[bool, _option("Take the prompt as it is, without the chat template.", SAMPLING, "--raw")] = False
    stats: Annotated[bool, _option("Print the whole table of figures on stderr.", OUTPUT, "--stats")] = False
    quiet: Annotated[bool, _option("No summary on stderr.", OUTPUT, "-q", "--quiet")] = False
    debug: Annotated[bool, _option("Tracebacks and log lines.", OUTPUT, "--debug")] = False

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


@app.command()
@with_options
def generate(
    options: Options,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)] = None,
    prompt_file: Annotated[Path | None, _option("Read the prompt from a file.", OUTPUT)] = None,
    input: Annotated[str | None, _option("A file of prompts, one JSON object a line; - is stdin.", OUTPUT)] = None,
    output: Annotated[str | None, _option("Where its results go, a line each; - is stdout.", OUTPUT)] = None,
    retry_errors: Annotated[
        bool, _option("With --input: generate failed rows again.", OUTPUT, "--retry-errors")
    ] = False,
    n: Annotated[int, _option("Samples of each prompt (1).", SAMPLING, "-n")] = 1,
    lanes: Annotated[
        Any,
        _option("Sequences that run at once (1; for a file of prompts 4); auto: what fits.", MACHINE, parser=_count),
    ] = None,
    json: Annotated[bool, _option("Print the completion as JSON.", OUTPUT, "--json")] = False,
) -> None:
    """Generate from one prompt, streaming the text to stdout, or from a file of prompts."""
    params = options.params(n=n)
    if input is not None or output is not None:
        if input is None or output is None or prompt is not None or prompt_file is not None:
            raise RingkvError("--input and --output: both are needed for a file of prompts, and no other prompt")
        _run_file(options, params, input, output, retry_errors, 4 if lanes is None else lanes)
        return
    messages: Any = _prompt(prompt, prompt_file)
    if options.system is not None:
        messages = [{"role": "system", "content": options.system}, {"role": "user", "content": messages}]
    with options.engine(1 if lanes is None else lanes) as engine, interrupt_cancels(engine) as interrupted:
        if n > 1:
            results = engine.generate(messages, params, raw=options.raw)
        else:
            for event in engine.stream(messages, params, raw=options.raw):
                if not json and event.channel == "answer":
                    typer.echo(event.text, nl=False)
                    sys.stdout.flush()
            results = [event.completion]
    for done in results:
        _finish(done, options, json, shown=n == 1)
    if interrupted:
        raise typer.Exit(130)
    if any(done.finish_reason == "error" for done in results):
        raise typer.Exit(1)


def _run_file(
    options: Options, params: SamplingParams, input: str, output: str, retry_errors: bool, lanes: Any
) -> None:
    """Generate from a file of prompts; the exit code says whether rows failed, or what ended the run."""
    from ringkv.console import job_progress, job_summary
    from ringkv.engine.jobs import Job

    if options.system is not None:
        raise RingkvError("--system: it goes with one prompt; in a file of prompts give rows with messages")
    settings = dataclasses.asdict(options) | {"lanes": lanes}
    for name in ("seed", "stats", "quiet", "debug", "threads", *SAMPLING_FIELDS):
        settings.pop(name, None)
    with Job(input, output, params, settings, retry_errors=retry_errors) as job:
        if not job.missing:
            typer.echo(job_summary(job.status, output), err=True)
            raise typer.Exit(1 if job.status.failed else 0)
        with options.engine(lanes) as engine, job_progress(job.status, options.quiet) as on_result:
            status = job.run(functools.partial(engine.iterate, raw=options.raw), on_result)
    if not options.quiet or status.interrupted or status.problem:
        typer.echo(job_summary(status, output), err=True)
    if status.interrupted:
        raise typer.Exit(130)
    if status.failed or status.problem:
        raise typer.Exit(1)


@app.command()
@with_options
def score(
    options: Options,
    file: Annotated[str, typer.Argument(help="A text file; - is stdin.")],
    json: Annotated[bool, _option("Print a JSON object.", OUTPUT, "--json")] = False,
) -> None:
    """Log-likelihood of a text under the ring: fed token by token, evicting as generation does."""
    text = _prompt("-", None) if file == "-" else _prompt(None, Path(file))
    with options.engine(1) as engine:
        ids = engine.encode(text)
        scores = engine.score(ids, None if options.seed is None else [options.seed])
        scores = scores.flatten()
        total, count = float(scores.double().sum()), len(scores)
        rows = {
            "tokens": len(ids),
            "log_likelihood": total,
            "nll_per_token": -total / count,
            "perplexity": math.exp(min(700.0, -total / count)),
            "model": engine.name,
            "ring": {"budget": engine.ring.config.budget, "window": engine.ring.config.window},
            "policy": engine.ring.policy.name,
        }
    if json:
        import json as encoder

        typer.echo(encoder.dumps(rows))
    else:
        typer.echo(
            f"{rows['nll_per_token']:.4f} nats a token, perplexity {rows['perplexity']:.2f}, {rows['tokens']} tokens"
        )


@app.command()
@with_options
def chat(
    options: Options,
    show_thinking: Annotated[
        bool | None,
        _option("Show thoughts (in a terminal, not in a pipe).", OUTPUT, "--show-thinking/--hide-thinking"),
    ] = None,
) -> None:
    """Hold a conversation. /help lists the commands; Ctrl-C stops an answer, and leaves at the prompt."""
    from ringkv.engine.chat import ChatSession
    from ringkv.terminal import Terminal

    if options.raw:
        raise RingkvError("--raw: a chat needs the chat template; ringkv generate --raw takes a text as it is")
    params = options.params()
    shown = sys.stdout.isatty() if show_thinking is None else show_thinking
    with options.engine(1) as engine:
        session = ChatSession(engine, params, options.system, show_thinking=shown)
        terminal = Terminal(session, lambda: interrupt_cancels(engine), stats=options.stats, quiet=options.quiet)
        failed = terminal.run()
    if failed and not terminal.typed:
        raise typer.Exit(1)


@app.command()
@with_options
def plan(
    options: Options,
    checkpoint: Annotated[
        str | None, typer.Argument(help="As --model takes it.", metavar="[MODEL]", show_default=False)
    ] = None,
    prompt: Annotated[int, _option("Tokens of the prompt whose prefill must fit (4096).", RING)] = 4096,
    lanes: Annotated[Any, _option("Sequences that run at once (1); auto: what fits.", MACHINE, parser=_count)] = 1,
    memory: Annotated[str | None, _option("To fit into, such as 24GiB; else what is free now.", MACHINE)] = None,
    json: Annotated[bool, _option("Print a JSON object.", OUTPUT, "--json")] = False,
) -> None:
    """What an engine takes of the memory, from the configuration alone: no weight is loaded."""
    from ringkv.engine.estimate import estimate

    given = options.given("device", "dtype", "revision")
    figures = estimate(checkpoint or options.model, options.ring(), lanes, prompt=prompt, memory=memory, **given)
    if json:
        import json as encoder

        typer.echo(encoder.dumps(figures))
        return
    from ringkv.console import print_plan

    print_plan(figures)


@app.command()
@with_options
def bench(
    options: Options,
    checkpoint: Annotated[
        str | None, typer.Argument(help="As --model takes it.", metavar="[MODEL]", show_default=False)
    ] = None,
    budgets: Annotated[str, _option("Budgets to measure (128,512).", RING)] = "128,512",
    lanes: Annotated[str, _option("Numbers of lanes to measure (1,4).", MACHINE)] = "1,4",
    policies: Annotated[str, _option("Policies to measure (vase-attnv).", RING)] = "vase-attnv",
    tokens: Annotated[int, _option("Tokens that each lane generates (96).", SAMPLING)] = 96,
    prompt: Annotated[int, _option("Tokens of the prompt (128).", SAMPLING)] = 128,
) -> None:
    """Measure speed beside the least time that memory allows; the last line is JSON."""
    import json as encoder

    from ringkv.console import print_bench
    from ringkv.engine.measure import bench as measure

    wanted_budgets, wanted_lanes = ([_count(each.strip()) for each in text.split(",")] for text in (budgets, lanes))
    chosen = dataclasses.replace(options, model=checkpoint or options.model, budget=None, policy=None)
    with chosen.engine(1) as engine:
        names = [name.strip() for name in policies.split(",")]
        sizes: dict[str, Any] = {"prompt": prompt, "tokens": tokens, "window": engine.ring.config.window}
        rows = list(measure(engine, wanted_budgets, wanted_lanes, names, **sizes))
        about = {"bench": "ringkv", "model": engine.name, "device": str(engine.model.device), **sizes}
    print_bench(rows)
    typer.echo(encoder.dumps({**about, "rows": rows}))


@app.command()
def policies(json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List the eviction policies: hyperparameters with their defaults, paper, what stays."""
    with reporting(debug=False):
        from ringkv.engine.policies import policy_table

        rows = policy_table()
        if json:
            import json as encoder

            typer.echo(encoder.dumps(rows, ensure_ascii=False))
            return
        from ringkv.console import print_policies

        print_policies(rows)


def version(value: bool) -> None:
    """--version."""
    if value:
        from ringkv import __version__

        typer.echo(f"ringkv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise RingkvError("prompt: give one, as an argument, as - for stdin, or with --prompt-file")
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RingkvError(f"--prompt-file {file}: cannot be read as UTF-8 text ({error})") from None
    if prompt != "-":
        return prompt or ""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RingkvError(f"prompt from stdin: it is not UTF-8 ({error})") from None


def _finish(done: Completion, options: Options, json: bool, shown: bool) -> None:
    """The JSON, or what is not shown of the text; then the summary or the table on stderr."""
    if json:
        import json as encoder

        typer.echo(encoder.dumps(done.to_dict(), ensure_ascii=False))
    else:
        typer.echo("" if shown else done.text)
    from ringkv.console import print_stats, summary

    if options.stats:
        print_stats(done)
    elif not options.quiet:
        typer.echo(summary(done), err=True)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
