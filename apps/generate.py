"""``ringkv generate`` with one prompt: its text on stdout as it comes, its figures on stderr."""

from __future__ import annotations

import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringkv.apps.console import print_json, print_stats, summary
from ringkv.apps.options import SAMPLING_FIELDS, Options, check_output, read_text
from ringkv.apps.process import INTERRUPTED, interrupt_cancels, note, say
from ringkv.apps.trace.trace import Trace
from ringkv.engine import UNFINISHED, Completion, SamplingParams, Snapshot, StreamEvent
from ringkv.errors import RingkvError, check_int


@dataclass(frozen=True)
class Going:
    """How a request is gone on with, later or now.

    Attributes:
        save: where its snapshot goes, at its end and after a signal; every so many tokens too, if ``every`` is not 0.
        resume: the snapshot that it goes on from, in place of a prompt. fork: in so many branches.
    """

    save: Path | None = None
    every: Any = 0
    resume: Path | None = None
    fork: Any = 1

    def check(self, params: SamplingParams, trace: Path | None, prompt_file: Path | None) -> None:
        """Refuse what does not go together.

        Raises:
            RingkvError: by the name of the option.
        """
        check_int("--every", self.every, 0)
        check_int("--fork", self.fork, 1)
        alone = params.n == self.fork == 1
        for given, needed, name in ((self.every, self.save, "--every"), (self.fork > 1, self.resume, "--fork")):
            if given and needed is None:
                raise RingkvError(f"{name}: it goes with {'--save' if name == '--every' else '--resume'}")
        if self.resume is not None and params.n > 1:
            raise RingkvError(f"-n {params.n}: accepted with --resume is --fork {params.n}")
        if self.resume is not None and trace is not None:
            raise RingkvError("--trace: it records a text from its prompt on; accepted is no --resume with it")
        if self.save is not None:
            check_output("--save", self.save, prompt_file, trace)
            if not alone:
                raise RingkvError("--save: it keeps one text; accepted are -n 1 and --fork 1")


def run_prompt(
    options: Options,
    params: SamplingParams,
    prompt: str | None,
    prompt_file: Path | None,
    *,
    lanes: int | str,
    json: bool,
    trace: Path | None,
    going: Going = Going(),
) -> int:
    """Generate from one prompt, or go on from a snapshot, and show what comes of it.

    Args:
        prompt: the text, or - for stdin; else ``prompt_file`` holds it.
        json: show completions as JSON alone.
        trace: where the trace of the one sample goes.

    Returns:
        The exit code: 0, 1 where the generation failed or could not be saved, 130 after an interrupt.

    Raises:
        RingkvError: a prompt, a file or an option that is refused; nothing was generated.
    """
    going.check(params, trace, prompt_file)
    if trace is not None:
        check_output("--trace", trace, prompt_file)
        if params.n > 1:
            raise RingkvError(f"--trace: it records one sample; accepted is -n 1, not {params.n}")
    given: SamplingParams | None = params
    asked: str | list[dict[str, str]] | Snapshot
    if going.resume is None:
        asked = _messages(options, read_text(prompt, prompt_file, "--prompt-file"))
    else:
        for name, value in (("PROMPT", prompt), ("--prompt-file", prompt_file), ("--system", options.system)):
            if value is not None:
                raise RingkvError(f"{name}: accepted with --resume is none")
        asked = Snapshot.load(going.resume)
        changes = options.given("seed", *SAMPLING_FIELDS)
        given = asked.params.replace(**changes) if changes or going.fork > 1 else None
        options = options.with_ring(asked.about)
    with options.engine(lanes) as engine, interrupt_cancels(engine) as interrupted:
        endings, unsaved = engine.prompts.endings, False
        if params.n > 1 or going.fork > 1:
            many = params.n if given is None or going.fork == 1 else going.fork
            samples = engine.generate(asked, (given or params).replace(n=many), raw=options.raw)
            results = samples if isinstance(samples, list) else [samples]
        else:
            keep = going.save is not None
            events = engine.stream(asked, given, raw=options.raw, trace=trace is not None, keep=keep, every=going.every)
            done, unsaved = _show(events, going.save, json)
            results = [done]
            if trace is not None and done.trace is not None:
                Trace.of(engine, done).save(trace)
    going_on = going.save is not None and not unsaved and results[0].finish_reason in UNFINISHED
    ended_before = isinstance(asked, Snapshot) and results[0].token_ids == asked.tokens
    for done in results:
        if json:
            print_json(done.to_dict())
        elif len(results) > 1:
            say(f"{done.text}\n")
        elif ended_before:  # and the line with it
            pass
        elif not going_on or sys.stdout.isatty():  # else what goes on from there prints the rest of the line
            say("\n")
        if options.stats:
            print_stats(done, endings)
        elif not options.quiet:
            note(summary(done))
        elif done.error is not None:
            note(f"ringkv: {done.error['message']}")
    if interrupted:
        return INTERRUPTED
    return 1 if unsaved or any(done.finish_reason == "error" for done in results) else 0


def _show(events: Generator[StreamEvent, None, None], save: Path | None, json: bool) -> tuple[Completion, bool]:
    """Show an answer as it comes, and save what it goes on from.

    What was held back, and is shown because nothing follows, is left to whoever goes on from the file.

    Returns:
        The completion, and whether the last snapshot could not be saved.
    """
    held, failed = "", False
    for event in events:
        if event.snapshot is not None and event.completion is None and save is not None:
            failed = not _saved(event.snapshot, save, told=failed)
        if event.channel == "answer" and not json:
            if event.held and save is not None:
                held += event.text
            else:
                say(event.text)
    done = event.completion
    assert done is not None  # the last event carries it
    unsaved = save is not None and done.error is None and not (done.snapshot and _saved(done.snapshot, save))
    if unsaved or done.finish_reason not in UNFINISHED:
        say(held)
    return done, unsaved


def _saved(snapshot: Snapshot, path: Path, told: bool = False) -> bool:
    """Write a snapshot; where that fails, as on a full disk, say so, unless it was told, and go on."""
    try:
        snapshot.save(path, "--save")
    except RingkvError as error:
        if not told:
            note(f"ringkv: {error}")
        return False
    return True


def _messages(options: Options, text: str) -> str | list[dict[str, str]]:
    """What an engine gets: the text, or with a system message a conversation."""
    if not (options.raw or text.strip()):
        raise RingkvError.bad("prompt", text, "a text with words, or any with --raw")
    if options.system is None:
        return text
    if options.raw or not options.system.strip():
        raise RingkvError.bad("--system", options.system, "none with --raw" if options.raw else "a text with words")
    return [{"role": "system", "content": options.system}, {"role": "user", "content": text}]
