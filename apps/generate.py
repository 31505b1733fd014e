"""``ringkv generate`` with one prompt: its text on stdout as it comes, its figures on stderr."""

from __future__ import annotations

from pathlib import Path

from ringkv.apps.console import print_json, print_stats, summary
from ringkv.apps.options import Options, check_output, read_text
from ringkv.apps.process import INTERRUPTED, interrupt_cancels, note, say
from ringkv.apps.trace.trace import Trace
from ringkv.engine import SamplingParams
from ringkv.errors import RingkvError


def run_prompt(
    options: Options,
    params: SamplingParams,
    prompt: str | None,
    prompt_file: Path | None,
    *,
    lanes: int | str,
    json: bool,
    trace: Path | None,
) -> int:
    """Generate from one prompt, and show what comes of it.

    Args:
        prompt: the text, or - for stdin; else ``prompt_file`` holds it.
        json: show completions as JSON alone.
        trace: where the trace of the one sample goes.

    Returns:
        The exit code: 0, 1 where the generation failed, 130 after an interrupt.

    Raises:
        RingkvError: a prompt, a file or an option that is refused; nothing was generated.
    """
    if trace is not None:
        check_output("--trace", trace, prompt_file)
        if params.n > 1:
            raise RingkvError(f"--trace: it records one sample; accepted is -n 1, not {params.n}")
    messages = _messages(options, read_text(prompt, prompt_file, "--prompt-file"))
    with options.engine(lanes) as engine, interrupt_cancels(engine) as interrupted:
        endings = engine.prompts.endings
        if params.n > 1:
            samples = engine.generate(messages, params, raw=options.raw)
            results = samples if isinstance(samples, list) else [samples]
        else:
            for event in engine.stream(messages, params, raw=options.raw, trace=trace is not None):
                if event.channel == "answer" and not json:
                    say(event.text)
            assert event.completion is not None  # the last event carries it
            results = [event.completion]
            if trace is not None and event.completion.trace is not None:
                Trace.of(engine, event.completion).save(trace)
    for done in results:
        if json:
            print_json(done.to_dict())
        else:
            say(f"{done.text}\n" if params.n > 1 else "\n")
        if options.stats:
            print_stats(done, endings)
        elif not options.quiet:
            note(summary(done))
        elif done.error is not None:
            note(f"ringkv: {done.error['message']}")
    if interrupted:
        return INTERRUPTED
    return 1 if any(done.finish_reason == "error" for done in results) else 0


def _messages(options: Options, text: str) -> str | list[dict[str, str]]:
    """What an engine gets: the text, or with a system message a conversation."""
    if not (options.raw or text.strip()):
        raise RingkvError.bad("prompt", text, "a text with words, or any with --raw")
    if options.system is None:
        return text
    if options.raw or not options.system.strip():
        raise RingkvError.bad("--system", options.system, "none with --raw" if options.raw else "a text with words")
    return [{"role": "system", "content": options.system}, {"role": "user", "content": text}]
