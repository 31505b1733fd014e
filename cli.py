"""The command line: every command reads its options into frozen dataclasses and calls an app.

stdout carries text or JSON only. What is heavy to import is imported in the commands.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

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
    STATE,
    WHERE,
    Options,
    argument_text,
    flag,
    numeric,
    option,
    read_text,
    with_options,
)
from ringkv.apps.process import Commands, interrupt_cancels, reporting
from ringkv.errors import RingkvError

app = typer.Typer(
    name="ringkv",
    help="Long chain-of-thought generation on a KV ring of fixed size.",
    cls=Commands,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
CHECKPOINT = typer.Argument(None, help="The model, as --model takes it.", metavar="MODEL", show_default=False)
PROMPT = typer.Argument(
    None, help="The prompt; - reads it from stdin.", metavar="PROMPT", show_default=False, parser=argument_text
)
TEXT = typer.Argument(..., help="A text file; - is stdin.", metavar="FILE")
TRACE = typer.Argument(..., help="What `ringkv generate --trace FILE` wrote.", metavar="FILE", show_default=False)


@app.command()
@with_options()
def generate(
    options: Options,
    prompt: str | None = PROMPT,
    prompt_file: Path | None = option("Read the prompt from a file.", OUTPUT, metavar="FILE"),
    input: str | None = option("A file of prompts, one JSON object a line; - is stdin.", OUTPUT, metavar="FILE"),
    output: str | None = option("Where the results go, one a line; - is stdout.", OUTPUT, metavar="FILE"),
    retry_errors: bool = flag("With --input: generate failed rows again.", OUTPUT, "--retry-errors"),
    n: Any = numeric("Samples of each prompt (1).", SAMPLING, "-n", default=1),
    lanes: Any = numeric(
        "Sequences that run at once (1; 4 for a file of prompts), or auto: what fits.", MACHINE, metavar="INT|auto"
    ),
    json: bool = flag("Print the completion as JSON.", OUTPUT, "--json"),
    trace: Path | None = option("Record where every token goes, for `ringkv trace` to draw.", OUTPUT, metavar="FILE"),
    save: Path | None = option(
        "Write what the text goes on from, at its end, on Ctrl-C and on SIGTERM.", STATE, metavar="FILE"
    ),
    every: Any = numeric("With --save: write it every so many tokens too (0: never).", STATE, default=0),
    resume: Path | None = option(
        "Go on from what --save wrote, with its ring and options where none are given.", STATE, metavar="FILE"
    ),
    fork: Any = numeric("With --resume: go on in so many branches (1).", STATE, default=1),
    checkpoint_every: Any = numeric(
        "With --input: keep running rows on the disk every so many tokens, for a run that is killed (4000; 0: never).",
        STATE,
    ),
) -> int:
    """Generate from one prompt, streaming the text to stdout, or from a file of prompts."""
    params = options.params(n=n)
    if input is not None or output is not None:
        if input is None or output is None or prompt is not None or prompt_file is not None:
            raise RingkvError("--input and --output: both are needed for a file of prompts, and no other prompt")
        if trace is not None:
            raise RingkvError("--trace: it records one prompt; accepted is no --input with it")
        for name, given in (("--save", save), ("--resume", resume), ("--every", every), ("--fork", fork != 1)):
            if given:
                raise RingkvError(f"{name}: it is for one prompt; accepted with --input is --checkpoint-every")
        from ringkv.apps.jobs.terminal import run_file

        lanes = 4 if lanes is None else lanes
        every = 4000 if checkpoint_every is None else checkpoint_every
        return run_file(options, params, input, output, lanes=lanes, retry_errors=retry_errors, every=every)
    if retry_errors:
        raise RingkvError("--retry-errors: it goes with --input")
    if checkpoint_every is not None:
        raise RingkvError("--checkpoint-every: it goes with --input; accepted for one prompt are --save and --every")
    from ringkv.apps.generate import Going, run_prompt

    lanes, going = 1 if lanes is None else lanes, Going(save, every, resume, fork)
    return run_prompt(options, params, prompt, prompt_file, lanes=lanes, json=json, trace=trace, going=going)


@app.command()
@with_options("debug")
def state(
    options: Options,
    file: Path = typer.Argument(..., help="What --save wrote.", metavar="FILE", show_default=False),
    json: bool = flag("Print a JSON object.", OUTPUT, "--json"),
) -> None:
    """Show what a text goes on from, as a file holds it: model, ring, tokens, options. No weights are loaded."""
    from ringkv.apps.state.terminal import show_state

    show_state(file, json)


@app.command()
@with_options(*WHERE, "backend", "threads", "budget", "window", "policy", "sinks", "seed")
def score(options: Options, file: str = TEXT, json: bool = flag("Print a JSON object.", OUTPUT, "--json")) -> None:
    """Print the log-likelihood of a text under the ring, which reads it singly and evicts as generation does."""
    from ringkv.apps.measure.terminal import run_score

    run_score(options, read_text(None if file != "-" else file, None if file == "-" else Path(file), "FILE"), json=json)


@app.command()
@with_options(*WHERE, "backend", "threads")
def calibrate(
    options: Options,
    checkpoint: str | None = CHECKPOINT,
    text: Path = option(
        "A text of some thousand tokens, like what the model will write.", MEASURED, default=..., metavar="FILE"
    ),
    output: Path = option("Where the statistics go.", OUTPUT, default=..., metavar="FILE"),
) -> None:
    """Compute the mean queries of a model over a text, for --policy triattention:stats=FILE."""
    from ringkv.apps.measure.terminal import run_calibrate

    run_calibrate(dataclasses.replace(options, model=options.checkpoint(checkpoint)), text, output)


@app.command()
@with_options()
def chat(
    options: Options,
    show_thinking: bool | None = flag(
        "Show thoughts (in a terminal, not in a pipe).", OUTPUT, "--show-thinking/--hide-thinking", default=None
    ),
) -> int:
    """Hold a conversation. /help lists the commands; Ctrl-C stops an answer, and leaves at the prompt."""
    from ringkv.apps.chat.session import ChatSession
    from ringkv.apps.chat.terminal import Terminal

    if options.raw:
        raise RingkvError("--raw: a chat needs the chat template; ringkv generate --raw takes a text as it is")
    params = options.params()
    shown = sys.stdout.isatty() if show_thinking is None else show_thinking
    with options.engine(1) as engine:
        session = ChatSession(engine, params, options.system, show_thinking=shown)
        terminal = Terminal(
            session, lambda: interrupt_cancels(engine, goes_on=True), stats=options.stats, quiet=options.quiet
        )
        failed = terminal.run()
    return 1 if failed and not terminal.typed else 0


@app.command()
@with_options(*WHERE, *RING_FIELDS)
def plan(
    options: Options,
    checkpoint: str | None = CHECKPOINT,
    prompt: Any = numeric("Tokens of the prompt whose prefill must fit (4096).", RING, default=4096),
    lanes: Any = numeric("Sequences that run at once (1), or auto: what fits.", MACHINE, default=1, metavar="INT|auto"),
    memory: str | None = option("The memory to fit into, such as 24GiB (what is free now).", MACHINE, metavar="SIZE"),
    json: bool = flag("Print a JSON object.", OUTPUT, "--json"),
) -> None:
    """Show what an engine takes of the memory, from the configuration alone: no weight is loaded."""
    from ringkv.apps.console import print_json
    from ringkv.apps.plan.estimate import estimate, print_plan

    given = options.given("device", "dtype", "revision")
    figures = estimate(options.checkpoint(checkpoint), options.ring(), lanes, prompt=prompt, memory=memory, **given)
    (print_json if json else print_plan)(figures)


@app.command()
@with_options("debug")
def trace(
    options: Options,
    file: Path = TRACE,
    html: Path | None = option("Write a page: the text, shaded, over time; by layer and head.", OUTPUT, metavar="FILE"),
    png: Path | None = option("Draw the survival map (needs matplotlib).", OUTPUT, metavar="FILE"),
) -> None:
    """Show what the ring remembered of a generation: as a page, as a picture, or in a few lines."""
    from ringkv.apps.trace.terminal import show_trace

    show_trace(file, html, png)


@app.command()
@with_options(*WHERE, "backend", "threads", "window", "retention", "sinks")
def bench(
    options: Options,
    checkpoint: str | None = CHECKPOINT,
    budgets: str = option("Budgets to measure (128,512).", MEASURED, default="128,512", metavar="INT,..."),
    lanes: str = option("Numbers of lanes to measure (1,4).", MEASURED, default="1,4", metavar="INT,..."),
    policies: str = option(
        "Policies to measure (vase-attnv), with semicolons between them where one has a colon.",
        MEASURED,
        default="vase-attnv",
        metavar="NAME,...",
        choices=POLICY_NAMES,
    ),
    tokens: Any = numeric("Tokens that each lane generates (96).", MEASURED, default=96),
    prompt: Any = numeric("Tokens of the prompt (128).", MEASURED, default=128),
    compare: str | None = option(
        "Run the same tokens through transformers too.", MEASURED, metavar="PEER", choices=CHOICES["compare"]
    ),
) -> None:
    """Measure speed beside the least time that the memory allows; the last line is JSON."""
    from ringkv.apps.measure.terminal import run_bench

    options = dataclasses.replace(options, model=options.checkpoint(checkpoint))
    run_bench(options, budgets, lanes, policies, tokens=tokens, prompt=prompt, compare=compare)


@app.command()
def policies(json: bool = flag("Print a JSON array.", OUTPUT, "--json")) -> None:
    """List the eviction policies: their fields and defaults, what stays, the paper.

    A policy of your own is named as --policy module:Class, or module:Class:field=value,... to set its fields. Its
    module is imported from the current folder, or from where Python finds it.
    """
    with reporting(debug=False):
        from ringkv.apps.console import print_json, print_policies
        from ringkv.engine import policy_table

        (print_json if json else print_policies)(policy_table())


@app.callback()
def _root(context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from ringkv import __version__

        typer.echo(f"ringkv {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """The console script."""
    app()
