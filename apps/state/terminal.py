"""``ringkv state``: what the file of a snapshot holds, as a table or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringkv.apps.console import fields_table, print_json, show
from ringkv.engine import Snapshot
from ringkv.errors import size


def show_state(path: Path, json: bool) -> None:
    """Show it on stdout.

    Raises:
        RingkvError: the file holds no snapshot, or is torn.
    """
    snapshot = Snapshot.load(path)
    facts = facts_of(snapshot) | {"file_bytes": path.stat().st_size}
    if json:
        print_json(facts)
        return
    about, tokens = snapshot.about, facts["tokens"]
    given = {name: value for name, value in facts["params"].items() if value not in (None, (), "", False)}
    dtypes = about.get("dtype")
    dtype = " weights, computed in ".join(map(str, dtypes if isinstance(dtypes, list) else [dtypes]))
    rows = {
        "model": f"{about.get('model')} (digest {about.get('digest')}, {dtype}, backend {about.get('backend')})",
        "ring": f"budget {about.get('budget')} + window {about.get('window')}, sinks {about.get('sinks')}, "
        f"{about.get('kv_dtype')}, of an engine with {about.get('lanes')} lanes",
        "policy": str(about.get("policy")),
        "tokens": f"{tokens['prompt']} prompt, {tokens['answer']} new, of which {tokens['forced']} were put in",
        "live": f"{facts['kept']} at the most in a layer, {facts['evictions']} evictions",
        "state": facts["state"],
        "sampling": ", ".join(f"{name} {value}" for name, value in given.items()),
        "seed": f"{snapshot.seed}, sample {snapshot.sample}",
        "size": f"{size(facts['bytes'])} of lane, {size(facts['file_bytes'])} in all; ringkv {about.get('ringkv')}",
    }
    show(fields_table(rows))


def facts_of(snapshot: Snapshot) -> dict[str, Any]:
    """What there is to say of a snapshot, in JSON types."""
    kept, evicted = (snapshot.lane.get(f"host.{name}") for name in ("counts", "evicted"))
    state = f"ended ({snapshot.ended})" if snapshot.ended else "in the middle of its answer"
    if not snapshot.tokens:
        state = "its prompt is read" if snapshot.tail == "answer" else f"read up to a {snapshot.tail} message"
    return {
        "about": dict(snapshot.about),
        "params": vars(snapshot.params),
        "seed": snapshot.seed,
        "sample": snapshot.sample,
        "state": state,
        "tokens": {
            "prompt": len(snapshot.prompt),
            "answer": len(snapshot.tokens),
            "forced": len(snapshot.forced),
        },
        "kept": None if kept is None or not kept.numel() else int(kept.max()),
        "evictions": None if evicted is None or not evicted.numel() else int(evicted.max()),
        "bytes": snapshot.nbytes,
    }
