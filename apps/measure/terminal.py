"""``ringkv bench``, ``ringkv score`` and ``ringkv calibrate`` at a terminal."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from rich.table import Table

from ringkv.apps.console import print_json, show
from ringkv.apps.measure import peer
from ringkv.apps.measure.bench import Bench, copy_bandwidth, machine
from ringkv.apps.options import Options, check_output, listed, number, read_text
from ringkv.apps.process import note, say
from ringkv.engine import calibrate, fixed_seeds
from ringkv.errors import RingkvError, size
from ringkv.files import write_whole


def run_bench(
    options: Options, budgets: str, lanes: str, policies: str, *, tokens: Any, prompt: Any, compare: str | None
) -> None:
    """Measure every combination of lists, as ``listed`` reads them; the last line is JSON.

    Args:
        policies: a semicolon parts them where one has a colon, else a comma.
        compare: a peer that reads the same tokens, or None.

    Raises:
        RingkvError: what is not accepted, or does not fit the memory.
    """
    if compare is not None:
        peer.check_peer(compare)
    each = [
        dataclasses.replace(options, budget=number(budget), policy=policy)
        for budget in listed(budgets)
        for policy in listed(policies, ";" if set(policies) & set(":;") else ",")
    ]
    numbers: list[Any] = [number(count) for count in listed(lanes)]
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
            loaded = peer.load_peer(options.model, engine.model.device, engine.model.dtype, options.revision)
            peers = peer.compare(engine, loaded, wanted.ids(engine.model.config), runs)
        about: dict[str, Any] = {"bench": "ringkv", **engine.about(), "device": str(engine.model.device)}
    print_bench(rows, peers)
    about |= {"prompt": prompt, "tokens": tokens, "cards": cards, "rows": rows, "peers": peers}
    print_json(about | {"machine": machine() | options.given("threads")})


def run_score(options: Options, text: str, *, json: bool) -> None:
    """Print the log-likelihood of a text under the ring, in nats; as JSON with what it was computed with.

    Raises:
        RingkvError: a text of fewer than two tokens, or one that policy full cannot hold.
    """
    with options.engine(1) as engine:
        ids = engine.encode(text)
        scores = engine.score(ids, None if options.seed is None else [options.seed]).flatten()
        total, ring, about = float(scores.double().sum()), engine.ring.config, engine.about()
    nats, warnings = -total / len(scores), fixed_seeds(options.seed)
    perplexity = math.exp(min(700.0, nats))  # beyond that it is no float
    if json:
        figures = {
            "tokens": len(ids),
            "log_likelihood": total,
            "nll_per_token": nats,
            "perplexity": perplexity,
            **about,
            "ring": {"budget": ring.budget, "window": ring.window},
            "policy": ring.policy.name,
            "warnings": warnings,
        }
        print_json(figures)
    else:
        say(f"{nats:.4f} nats a token, perplexity {perplexity:.2f}, {len(ids)} tokens\n")
        for warning in warnings:
            note(f"warning: {warning}")


def run_calibrate(options: Options, text: Path, output: Path) -> None:
    """Compute the statistics of a model's queries over a text, and save them for ``triattention``.

    Raises:
        RingkvError: a text of fewer than two tokens, or a file that cannot be read or written.
    """
    check_output("--output", output, text)
    content = read_text(None, text, "--text")
    with dataclasses.replace(options, policy="triattention", budget=128, window=64).engine(1) as engine:
        ids = engine.encode(content)
        if len(ids) < 2:
            raise RingkvError(f"--text {str(text)!r}: {len(ids)} tokens; accepted are two or more, better thousands")
        with engine.alone() as runner:
            data = calibrate(runner, ids)
    write_whole(output, data, "--output")
    say(f"{len(ids)} tokens, {output}\n")


def print_cards(rows: list[dict[str, Any]]) -> None:
    """What a step must read and the least time of that, on stdout."""
    table = Table("policy", "budget", "lanes", "MB a step", "copy GB/s", "floor ms", box=None, pad_edge=False)
    for row in rows:
        cost = (row["step_bytes"] / 1e6, row["bandwidth_gb_s"], row["floor_ms"])
        table.add_row(*_which(row), *(f"{value:.1f}" for value in cost))
    show(table)


def print_bench(rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> None:
    """What was measured, on stdout."""
    speeds = ("prefill tok/s", "first ms", "early ms", "late ms", "tok/s")
    head = ("policy", "budget", "lanes", *speeds, "GB/s", "of floor", "evicted", "peak")
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        measured = (f"{row['achieved_gb_s']:.1f}", f"{row['floor_share']:.0%}", str(row["evictions"]))
        peak = "" if row["peak_bytes"] is None else size(row["peak_bytes"])
        table.add_row(*_which(row), *_speeds(row), *measured, peak)
    for row in peers:
        table.add_row(f"{row['peer']} {row['dtype']}", "", str(row["lanes"]), *_speeds(row))
    show(table)


def _which(row: dict[str, Any]) -> tuple[str, ...]:
    return row["policy"], str(row["budget"]), str(row["lanes"])


def _speeds(row: dict[str, Any]) -> list[str]:
    return [f"{row[name]:.1f}" for name in ("prefill_tok_s", "first_token_ms", "early_ms", "late_ms", "tok_s")]
