"""The command line: parses into frozen dataclasses and calls the engine. stdout carries text or JSON only."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringkv.apps.options import (
    CHOICES,
    MACHINE,
    MEASURED,
    OUTPUT,
    POLICY_NAMES,
    RING,
    RING_FIELDS,
    SAMPLING,
    SAMPLING_FIELDS,
    WHERE,
    Commands,
    Options,
    check_output,
    flag,
    interrupt_cancels,
    number,
    numeric,
    option,
    read_text,
    reporting,
    with_options,
)
from ringkv.errors import RingkvError

if TYPE_CHECKING:
    from ringkv.engine.completion import Completion
    from ringkv.engine.config import SamplingParams

app = typer.Typer(
    name="ringkv",
    help="Long chain-of-thought generation on a KV ring of fixed size.",
    cls=Commands,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Checkpoint = Annotated[str | None, typer.Argument(help="As --model takes it.", metavar="MODEL", show_default=False)]


@app.command()
@with_options()
def generate(
    options: Options,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from stdin.", metavar="PROMPT", show_default=False)
    ] = None,
    prompt_file: Annotated[Path | None, option("Read the prompt from a file.", OUTPUT, metavar="FILE")] = None,
    input: Annotated[
        str | None, option("A file of prompts, one JSON object a line; - is stdin.", OUTPUT, metavar="FILE")
    ] = None,
    output: Annotated[
        str | None, option("Where its results go, a line each; - is stdout.", OUTPUT, metavar="FILE")
    ] = None,
    retry_errors: Annotated[bool, flag("With --input: generate failed rows again.", OUTPUT, "--retry-errors")] = False,
    n: Annotated[Any, numeric("Samples of each prompt (1).", SAMPLING, "-n")] = 1,
    lanes: Annotated[
        Any,
        numeric("Sequences at once (1; for a file of prompts 4); auto: what fits.", MACHINE, metavar="INT|auto"),
    ] = None,
    json: Annotated[bool, flag("Print the completion as JSON.", OUTPUT, "--json")] = False,
    trace: Annotated[
        Path | None, option("Record where every token goes, for `ringkv trace` to draw.", OUTPUT, metavar="FILE")
    ] = None,
) -> None:
    """Generate from one prompt, streaming the text to stdout, or from a file of prompts."""
    params = options.params(n=n)
    if input is not None or output is not None:
        if input is None or output is None or prompt is not None or prompt_file is not None:
            raise RingkvError("--input and --output: both are needed for a file of prompts, and no other prompt")
        if trace is not None:
            raise RingkvError("--trace: it records one prompt; accepted is no --input with it")
        _run_file(options, params, input, output, retry_errors, 4 if lanes is None else lanes)
        return
    if retry_errors:
        raise RingkvError("--retry-errors: it goes with --input")
    if trace is not None:
        check_output("--trace", trace, prompt_file)
        if n > 1:
            raise RingkvError(f"--trace: it records one sample; accepted is -n 1, not {n}")
    messages: Any = read_text(prompt, prompt_file, "--prompt-file")
    if not (options.raw or messages.strip()):
        raise RingkvError.bad("prompt", messages, "a text with words, or any with --raw")
    if options.system is not None:
        if options.raw or not options.system.strip():
            raise RingkvError.bad("--system", options.system, "none with --raw" if options.raw else "a text with words")
        messages = [{"role": "system", "content": options.system}, {"role": "user", "content": messages}]
    with options.engine(1 if lanes is None else lanes) as engine, interrupt_cancels(engine) as interrupted:
        if n > 1:
            results = engine.generate(messages, params, raw=options.raw)
        else:
            for event in engine.stream(messages, params, raw=options.raw, trace=trace is not None):
                if not json and event.channel == "answer":
                    typer.echo(event.text, nl=False)
                    sys.stdout.flush()
            results = [event.completion]
        if trace is not None and results[0].trace is not None:
            from ringkv.apps.trace.trace import Trace

            Trace.of(engine, results[0]).save(trace)
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
    import torch

    from ringkv.apps.console import job_progress, job_summary
    from ringkv.apps.jobs.job import Job
    from ringkv.engine.loading import resolve_device
    from ringkv.kernels.backend import resolve

    if options.system is not None:
        raise RingkvError("--system: it goes with one prompt; in a file of prompts give rows with messages")
    for name, value in (("--budget", options.budget), ("--lanes", lanes)):
        if value == "auto":
            why = "with --input it would hang on the memory that is free when a run is resumed"
            raise RingkvError(f"{name} = 'auto': {why}; accepted is an int >= 1")
    # What "auto" is here: a run that is resumed where the compiler or the GPU is gone would write other tokens.
    backend = resolve(options.backend, resolve_device(options.device), torch.float32)
    settings = dataclasses.asdict(options) | {"lanes": lanes, "backend": backend}
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
@with_options(*WHERE, "backend", "threads", "budget", "window", "policy", "sinks", "seed")
def score(
    options: Options,
    file: Annotated[str, typer.Argument(help="A text file; - is stdin.", metavar="FILE")],
    json: Annotated[bool, flag("Print a JSON object.", OUTPUT, "--json")] = False,
) -> None:
    """Log-likelihood of a text under the ring: fed token by token, evicting as generation does."""
    from ringkv.engine.report import describe_engine

    text = read_text(None if file != "-" else file, None if file == "-" else Path(file), "FILE")
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
            **describe_engine(engine),
            "ring": {"budget": engine.ring.config.budget, "window": engine.ring.config.window},
            "policy": engine.ring.policy.name,
        }
    if json:
        _echo_json(rows)
    else:
        typer.echo(
            f"{rows['nll_per_token']:.4f} nats a token, perplexity {rows['perplexity']:.2f}, {rows['tokens']} tokens"
        )


@app.command()
@with_options()
def chat(
    options: Options,
    show_thinking: Annotated[
        bool | None,
        flag("Show thoughts (in a terminal, not in a pipe).", OUTPUT, "--show-thinking/--hide-thinking"),
    ] = None,
) -> None:
    """Hold a conversation. /help lists the commands; Ctrl-C stops an answer, and leaves at the prompt."""
    from ringkv.apps.chat.session import ChatSession
    from ringkv.apps.chat.terminal import Terminal

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
@with_options(*WHERE, *RING_FIELDS)
def plan(
    options: Options,
    checkpoint: Checkpoint = None,
    prompt: Annotated[Any, numeric("Tokens of the prompt whose prefill must fit (4096).", RING)] = 4096,
    lanes: Annotated[Any, numeric("Sequences at once (1); auto: what fits.", MACHINE, metavar="INT|auto")] = 1,
    memory: Annotated[
        str | None, option("To fit into, such as 24GiB; else what is free now.", MACHINE, metavar="SIZE")
    ] = None,
    json: Annotated[bool, flag("Print a JSON object.", OUTPUT, "--json")] = False,
) -> None:
    """What an engine takes of the memory, from the configuration alone: no weight is loaded."""
    from ringkv.apps.plan.estimate import estimate

    given = options.given("device", "dtype", "revision")
    figures = estimate(options.checkpoint(checkpoint), options.ring(), lanes, prompt=prompt, memory=memory, **given)
    if json:
        _echo_json(figures)
        return
    from ringkv.apps.console import print_plan

    print_plan(figures)


@app.command()
def trace(
    file: Annotated[
        Path, typer.Argument(help="What `ringkv generate --trace FILE` wrote.", metavar="FILE", show_default=False)
    ],
    html: Annotated[
        Path | None, option("Write a page: the text, shaded, over time; by layer and head.", OUTPUT, metavar="FILE")
    ] = None,
    png: Annotated[Path | None, option("Draw the survival map (needs matplotlib).", OUTPUT, metavar="FILE")] = None,
    debug: Annotated[bool, flag("Tracebacks and log lines.", OUTPUT, "--debug")] = False,
) -> None:
    """Show what the ring remembered of a generation: as a page, as a picture, or in a few lines."""
    with reporting(debug):
        from ringkv.apps.trace.trace import Trace

        for name, path, others in (("--html", html, (file, png)), ("--png", png, (file,))):
            if path is not None:
                check_output(name, path, *others)
        recorded = Trace.load(file)
        if html is not None:
            from ringkv.apps.trace.page import render
            from ringkv.files import write_whole

            write_whole(html, render(recorded).encode(), "--html")
        if png is not None:
            from ringkv.apps.trace.plot import draw

            draw(recorded, png)
        if html is None and png is None:
            from ringkv.apps.console import print_trace

            print_trace(recorded)


@app.command()
@with_options(*WHERE, "backend", "threads", "window", "retention", "sinks")
def bench(
    options: Options,
    checkpoint: Checkpoint = None,
    budgets: Annotated[str, option("Budgets to measure (128,512).", MEASURED, metavar="INT,...")] = "128,512",
    lanes: Annotated[str, option("Numbers of lanes to measure (1,4).", MEASURED, metavar="INT,...")] = "1,4",
    policies: Annotated[
        str,
        option(
            "Policies to measure (vase-attnv); a semicolon between those with fields.",
            MEASURED,
            metavar="NAME,...",
            choices=POLICY_NAMES,
        ),
    ] = "vase-attnv",
    tokens: Annotated[Any, numeric("Tokens that each lane generates (96).", MEASURED)] = 96,
    prompt: Annotated[Any, numeric("Tokens of the prompt (128).", MEASURED)] = 128,
    compare: Annotated[
        str | None,
        option("transformers: the same tokens through it too.", MEASURED, metavar="PEER", choices=CHOICES["compare"]),
    ] = None,
) -> None:
    """Measure speed beside the least time that memory allows; the last line is JSON."""
    from ringkv.apps.console import print_bench, print_cards
    from ringkv.apps.measure import peer
    from ringkv.apps.measure.bench import Bench, copy_bandwidth, machine
    from ringkv.engine.report import describe_engine

    if compare is not None:
        peer.check_peer(compare)
    model = options.checkpoint(checkpoint)
    each = [
        dataclasses.replace(options, model=model, budget=number(budget), policy=policy)
        for budget in _listed(budgets, ",")
        for policy in _listed(policies, ";" if set(policies) & set(":;") else ",")
    ]
    numbers: list[Any] = [number(count) for count in _listed(lanes, ",")]
    wanted = Bench([one.ring() for one in each], numbers, prompt, tokens)
    rows, runs, peers = [], {}, []
    with each[0].engine(1) as engine:
        bandwidth = copy_bandwidth(engine.model.device)
        cards = wanted.cards(engine, bandwidth)
        print_cards(cards)
        for row, run in wanted.rows(engine, bandwidth):
            rows.append(row)
            runs[row["lanes"]] = run
        if compare is not None:
            loaded = peer.load_peer(model, engine.model.device, engine.model.dtype, options.revision)
            peers = list(peer.compare(engine, loaded, wanted.ids(engine.model.config), runs))
        about: dict[str, Any] = {"bench": "ringkv", **describe_engine(engine), "device": str(engine.model.device)}
    print_bench(rows, peers)
    about |= {"prompt": prompt, "tokens": tokens, "cards": cards, "rows": rows, "peers": peers}
    _echo_json(about | {"machine": machine() | options.given("threads")})


@app.command()
def policies(json: Annotated[bool, flag("Print a JSON array.", OUTPUT, "--json")] = False) -> None:
    """List the eviction policies: hyperparameters with their defaults, paper, what stays."""
    with reporting(debug=False):
        from ringkv.engine.policies import policy_table

        rows = policy_table()
        if json:
            _echo_json(rows)
            return
        from ringkv.apps.console import print_policies

        print_policies(rows)


def version(value: bool) -> None:
    """--version."""
    if value:
        from ringkv import __version__

        typer.echo(f"ringkv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _listed(text: str, separator: str) -> list[str]:
    return [each.strip() for each in text.split(separator)]


def _echo_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, ensure_ascii=False))


def _finish(done: Completion, options: Options, json: bool, shown: bool) -> None:
    """The JSON, or what is not shown of the text; then the summary or the table on stderr."""
    if json:
        _echo_json(done.to_dict())
    else:
        typer.echo("" if shown else done.text)
    from ringkv.apps.console import print_stats, summary

    if options.stats:
        print_stats(done)
    elif not options.quiet:
        typer.echo(summary(done), err=True)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
