"""What the types say, to mypy and at run time: ``.ci/run`` checks the first half, pytest the second."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from ringkv import Completion, Engine, Policy, RingConfig, SamplingParams, StreamEvent
from tiny import tiny_config, tiny_decoder, tiny_weights

if TYPE_CHECKING:
    from typing import assert_type

    from ringkv.engine.retention import Retention

    def _what_mypy_infers(engine: Engine, ring: RingConfig, params: SamplingParams) -> None:
        assert_type(ring.policy, Policy)
        assert_type(ring.retention, Retention)
        assert_type(ring.budget_tokens, int)
        messages = [{"role": "user", "content": "Hi"}]
        assert_type(engine.generate("Hi"), Completion)
        assert_type(engine.generate(messages), Completion)
        assert_type(engine.generate([1, 2, 3]), Completion)
        assert_type(engine.generate("Hi", params), Completion | list[Completion])
        assert_type(engine.generate([1, 2, 3], params, raw=True), Completion | list[Completion])
        assert_type(engine.generate(["Hi", "Ho"]), list[Completion])
        assert_type(engine.generate([[1, 2], [3]], params), list[Completion])
        assert_type(engine.generate([messages, messages], [params, params]), list[Completion])
        assert_type(engine.stream("Hi", params), Generator[StreamEvent, None, None])
        assert_type(engine.iterate(["Hi", [1, 2], messages]), Generator[tuple[int, Completion], None, None])


@pytest.fixture(scope="module")
def engine():
    config = tiny_config()
    with Engine(tiny_decoder(config, tiny_weights(config)), ring=RingConfig(24, 4)) as engine:
        yield engine


@pytest.mark.parametrize(
    "prompts, n, kind",
    [([1, 2], 1, Completion), ([1, 2], 2, list), ([[1, 2]], 1, list), ([[1, 2], [3]], 2, list), ([], 1, list)],
)
def test_generate_gives_what_its_types_say(engine, prompts, n, kind):
    assert isinstance(engine.generate(prompts, SamplingParams(n=n, max_tokens=2)), kind)


def test_streams_and_iterators_can_be_closed(engine):
    params = SamplingParams(max_tokens=3)
    for events in (engine.stream([1, 2], params), engine.iterate([[1, 2], [3]], params)):
        next(events)
        events.close()
