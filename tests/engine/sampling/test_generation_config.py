"""What generation_config.json asks for is done as transformers does it, or named in the result: CASES E5.

The oracle is transformers' ``generate`` on the same folder, whose file says all and whose caller says nothing.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ringkv import Completion, Engine, RingConfig, RingkvError, SamplingParams
from ringkv.engine.sampling import values
from ringkv.engine.sampling.values import DEFAULTS, Sampling
from scripted import Script, byte_tokenizer
from tiny import tiny_config, tiny_decoder, tiny_weights

RING = RingConfig(budget=40, window=8, policy="full")
PROMPT = byte_tokenizer().encode("why is the sky blue")
LENGTH = 12

Generation = dict[str, Any]
Both = Callable[[Mapping[str, Any]], tuple[list[int], Completion]]


@pytest.fixture(scope="module")
def both(
    tiny_checkpoint: Callable[..., Path], tiny_chat_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Both:
    """The new tokens of transformers, and our result, for a folder with this generation_config.json."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder = tmp_path_factory.mktemp("generation") / "tiny"
    # No padding, of which transformers draws and we do not.
    shutil.copytree(tiny_checkpoint("qwen3", seed=5, vocab_size=SIZE, eos_token_id=byte_tokenizer().eos_ids[0]), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_chat_checkpoint / name, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = torch.tensor([PROMPT])

    def run(generation: Mapping[str, Any]) -> tuple[list[int], Completion]:
        (folder / "generation_config.json").write_text(json.dumps(generation))
        model.generation_config = GenerationConfig.from_pretrained(folder)
        if model.generation_config.eos_token_id is None:  # the model's own eos is what we stop at too
            model.generation_config.eos_token_id = model.config.eos_token_id
        said = model.generate(prompt, attention_mask=torch.ones_like(prompt), tokenizer=tokenizer)
        with Engine.from_pretrained(folder, ring=RING, dtype="float32", backend="torch") as engine:
            return said[0, len(PROMPT) :].tolist(), engine.generate(PROMPT)

    return run


SIZE = byte_tokenizer().size
# Letters only, so that stop strings are texts.
LETTERS = byte_tokenizer().encode("abcdefghijklmnopqrstuvwxyz")
BASE: Any = {"do_sample": False, "max_new_tokens": LENGTH, "suppress_tokens": sorted({*range(SIZE)} - {*LETTERS})}


@pytest.fixture(scope="module")
def plain(both: Both) -> list[int]:
    """The greedy tokens where the file says nothing more."""
    theirs, ours = both(BASE)
    assert ours.token_ids == theirs
    assert len(theirs) == LENGTH
    assert len(set(theirs[:6])) == 6
    return theirs


def applied(plain: list[int], rng: random.Random) -> Generation:
    """A file with some of what is applied, and of what asks for nothing."""
    text = byte_tokenizer().decode(plain)
    suppressed = rng.choice([plain[:1], plain[2:5], plain, []])
    every: Generation = {
        "repetition_penalty": rng.choice([1.3, 5.0, 0.7]),
        "suppress_tokens": sorted({*BASE["suppress_tokens"], *suppressed, -1, 10**6}),
        "begin_suppress_tokens": rng.choice([plain[:1], plain, [], [-7]]),
        "eos_token_id": rng.choice([plain[3], [plain[0], plain[4]], None]),
        "min_new_tokens": rng.choice([0, 1, 5, 9]),
        "max_new_tokens": rng.choice([1, 7, LENGTH]),
        "min_length": rng.choice([0, None]),
        "top_k": rng.choice([1, 50, None]),
        "top_p": 0.3,
        "temperature": 7.0,
        "typical_p": rng.choice([1.0, 0.4]),
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "use_cache": True,
        "stop_strings": rng.choice([text[4:6], [text[1:2], "zz"], text[:3], "nowhere", None]),
    }
    chosen = {name: every[name] for name in rng.sample(list(every), rng.randrange(2, 9))}
    return BASE | chosen


@pytest.mark.parametrize("seed", range(40))
def test_what_is_applied_gives_the_tokens_of_transformers(both: Both, plain: list[int], seed: int) -> None:
    generation = applied(plain, random.Random(seed))
    theirs, ours = both(generation)
    assert ours.token_ids == theirs, generation
    assert [text for text in ours.warnings if "generation_config" in text] == []


# Keys that change what transformers generates here, each alone, and what else it needs.
ACTING: dict[str, Callable[[list[int]], Generation]] = {
    "repetition_penalty": lambda plain: {"repetition_penalty": 5.0},
    "suppress_tokens": lambda plain: {"suppress_tokens": [*BASE["suppress_tokens"], plain[3]]},
    "begin_suppress_tokens": lambda plain: {"begin_suppress_tokens": plain[:1]},
    "eos_token_id": lambda plain: {"eos_token_id": plain[4]},
    "min_new_tokens": lambda plain: {"min_new_tokens": 6, "eos_token_id": plain[2]},
    "max_new_tokens": lambda plain: {"max_new_tokens": 3},
    "stop_strings": lambda plain: {"stop_strings": byte_tokenizer().decode(plain[3:5])},
    "bad_words_ids": lambda plain: {"bad_words_ids": [plain[3:5]]},
    "sequence_bias": lambda plain: {"sequence_bias": [[plain[3:4], -50.0]]},
    "no_repeat_ngram_size": lambda plain: {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": lambda plain: {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": lambda plain: {"encoder_repetition_penalty": 9.0},
    "forced_eos_token_id": lambda plain: {"forced_eos_token_id": LETTERS[-1]},
    "exponential_decay_length_penalty": lambda plain: {
        "exponential_decay_length_penalty": [1, 40.0],
        "eos_token_id": LETTERS[-1],
    },
    "num_beams": lambda plain: {"num_beams": 4},
    "min_length": lambda plain: {"min_length": len(PROMPT) + 6, "eos_token_id": plain[2]},
    "max_length": lambda plain: {"max_length": len(PROMPT) + 3, "max_new_tokens": None},
    "max_time": lambda plain: {"max_time": 1e-9},
    "watermarking_config": lambda plain: {"watermarking_config": {"bias": 40.0}},
}


@pytest.mark.parametrize("key", ACTING)
def test_what_changes_the_tokens_of_transformers_is_applied_or_named(both: Both, plain: list[int], key: str) -> None:
    asked = ACTING[key](plain)
    theirs, ours = both(BASE | asked)
    without, _ = both(BASE | {name: value for name, value in asked.items() if name != key})
    assert theirs != without
    said = [text for text in ours.warnings if text.startswith("generation_config.json asks for ")]
    if key in values._NOT_APPLIED:
        assert len(said) == 1
        assert f" {key} = " in said[0]
        assert said[0].endswith(": not supported, so it was not applied")
    else:
        assert said == []
        assert ours.token_ids == theirs
        sampling = {name: entry["source"] for name, entry in ours.sampling.items()}
        ours_name = {theirs: ours for ours, theirs in values._KEYS.items()}.get(key, key)
        assert sampling.get(ours_name, "generation_config") == "generation_config"


def test_every_key_that_transformers_knows_has_its_place() -> None:
    """Applied, named in vain or silent: one of them, and no key besides. A new version may bring more."""
    from transformers import GenerationConfig

    config = GenerationConfig()
    theirs = {key for key in {**config.to_dict(), **vars(config)} if not key.startswith("_")}
    mine = {values._KEYS.get(name, name) for name in DEFAULTS} | {*values.SUPPRESSED, "do_sample"}
    places = [mine - {"presence_penalty"}, set(values._NOT_APPLIED), values._SILENT]
    assert {key for place in places for key in place} == theirs | {"max_matching_ngram_size"}
    assert sum(map(len, places)) == len({key for place in places for key in place})


def test_values_that_ask_for_nothing_are_silent() -> None:
    """transformers' own defaults, which older versions wrote out, and null for every key that it knows."""
    from transformers import GenerationConfig

    config = GenerationConfig()
    defaults = config._get_default_generation_params() | {"max_length": None, "transformers_version": "4.30.0"}
    more = {"sequence_bias": {}, "bad_words_ids": [], "guidance_scale": 1.0, "penalty_alpha": 0.0, "top_h": 1.0}
    for drawn in (True, False):
        for generation in (defaults, more, dict.fromkeys(vars(config)), {"_from_model_config": True}):
            sampling = Sampling.resolve(SamplingParams(), {**generation, "do_sample": drawn})
            assert sampling.warnings == (), generation


NAMED: list[tuple[Generation, dict[str, Any], str | None]] = [
    ({"typical_p": 0.9, "num_beams": 4}, {}, "typical_p = 0.9, num_beams = 4"),
    ({"typical_p": 0.9, "top_h": 0.4, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3}, {"temperature": 0}, None),
    ({"typical_p": 0.9, "do_sample": False}, {}, None),
    ({"typical_p": 0.9, "do_sample": False}, {"temperature": 1.0}, "typical_p = 0.9"),
    ({"max_length": 4096}, {}, "max_length = 4096"),
    ({"max_length": 4096}, {"max_tokens": 5}, None),
    ({"max_length": 4096, "max_new_tokens": 7}, {}, None),
    ({"min_length": 9}, {}, "min_length = 9"),
    ({"min_length": 9, "min_new_tokens": 2}, {}, None),
    ({"min_length": 9}, {"min_tokens": 3}, None),
    ({"num_return_sequences": 3}, {}, "num_return_sequences = 3"),
    ({"num_return_sequences": 3}, {"n": 2}, None),
    # No key of transformers: nobody knows what it is for, unless it is switched off or transformers' own affair.
    ({"temprature": 0.2, "stop": "x", "chat_format": None}, {}, "temprature = 0.2, stop = 'x'"),
    ({"max_tokens": 5, "min_tokens": 4, "n": 2}, {}, "max_tokens = 5, min_tokens = 4, n = 2"),
    ({"_commit_hash": "abc", "_from_model_config": True}, {}, None),
    ({"a\nb": "x" * 999}, {}, r"'a\nb' = '" + "x" * 77 + "..." + "x" * 78 + "'"),
]


@pytest.mark.parametrize("generation, given, wanted", NAMED)
def test_what_is_not_applied_is_named(generation: Generation, given: dict[str, Any], wanted: str | None) -> None:
    said = Sampling.resolve(SamplingParams(**given), generation).warnings
    text = f"generation_config.json asks for {wanted}: not supported, so it was not applied"
    assert said == (() if wanted is None else (text,))


def test_a_warning_stands_in_every_result() -> None:
    engine = engine_of({"no_repeat_ngram_size": 3})
    text = "generation_config.json asks for no_repeat_ngram_size = 3: not supported, so it was not applied"
    every = engine.generate([[1, 2], [3]], SamplingParams(n=2, max_tokens=2))
    assert [done.warnings for done in every] == [[text]] * 4
    last = list(engine.stream([1], SamplingParams(max_tokens=2)))[-1]
    assert last.completion is not None
    assert last.completion.warnings == [text]


def engine_of(generation: Generation | None, ring: RingConfig | None = None) -> Engine:
    config = tiny_config(layers=1)
    decoder = tiny_decoder(config, tiny_weights(config, torch.float32))
    return Engine(decoder, ring=ring or RingConfig(40, 8, "streaming", "all"), generation_config=generation)


@pytest.mark.parametrize("do_sample", [False, None, True])
@pytest.mark.parametrize("temperature", [None, 0.0, 0.8])
def test_do_sample_false_is_temperature_0_unless_the_user_says_otherwise(
    do_sample: bool | None, temperature: float | None
) -> None:
    """As in transformers, where ``generate(do_sample=True, temperature=...)`` takes the file's filters into force."""
    theirs = {"do_sample": do_sample, "temperature": 0.3, "top_k": 7, "repetition_penalty": 1.1}
    resolved = Sampling.resolve(SamplingParams(temperature=temperature), theirs)
    got = {name: (resolved.values[name], resolved.sources[name]) for name in ("temperature", "top_k", "top_p")}
    greedy = do_sample is False and temperature is None
    wanted = (0.0 if greedy else 0.3, "generation_config") if temperature is None else (temperature, "user")
    assert got["temperature"] == wanted
    assert got["top_k"] == ((0, "default") if greedy else (7, "generation_config"))
    assert got["top_p"] == (0.95, "default")
    assert resolved.values["repetition_penalty"] == 1.1
    assert resolved.greedy == (greedy or temperature == 0)


def test_a_greedy_file_is_repeatable_without_a_seed() -> None:
    engine = engine_of({"do_sample": False}, RingConfig(40, 8, "random", "all"))
    first, second = (engine.generate([1, 2], SamplingParams(max_tokens=90, ignore_eos=True)) for _ in range(2))
    assert first.ring["seed"] == second.ring["seed"] == 0
    assert first.token_ids == second.token_ids
    assert first.ring["evictions"] > 0


def test_the_users_values_win() -> None:
    theirs = {"max_new_tokens": 9, "min_new_tokens": 4, "stop_strings": ["a", "b"], "top_k": 3}
    params = SamplingParams(max_tokens=5, min_tokens=1, stop="c", top_k=0)
    resolved = Sampling.resolve(params, theirs)
    for name, value in {"max_tokens": 5, "min_tokens": 1, "stop": ("c",), "top_k": 0}.items():
        assert (resolved.values[name], resolved.sources[name]) == (value, "user")
    left = Sampling.resolve(SamplingParams(), theirs)
    for name, value in {"max_tokens": 9, "min_tokens": 4, "stop": ("a", "b"), "top_k": 3}.items():
        assert (left.values[name], left.sources[name]) == (value, "generation_config")
    assert Sampling.resolve(SamplingParams(ignore_eos=True), theirs).values["stop"] == ()


def test_stop_strings_of_the_file_cut_the_text() -> None:
    script = Script(lambda _: byte_tokenizer().encode("one END two"))
    script.engine.prompts.generation_config = {"stop_strings": "END", "do_sample": False}
    done = script.engine.generate("Well?", SamplingParams(max_tokens=11))
    assert (done.text, done.finish_reason, done.stop_reason) == ("one ", "stop", "END")
    assert done.sampling["stop"] == {"value": ("END",), "source": "generation_config"}
    script.engine.prompts.generation_config = {"stop_strings": ["zz", "<|im_start|>"], "do_sample": False}
    end = script.tokenizer.control_tokens["<|im_start|>"]
    tagged = Script(lambda _: [*byte_tokenizer().encode("one "), end])
    tagged.engine.prompts.generation_config = script.engine.prompts.generation_config
    done = tagged.engine.generate("Well?", SamplingParams(max_tokens=11))
    assert (done.text, done.finish_reason, done.stop_reason) == ("one ", "stop", "<|im_start|>")
    on = script.engine.generate("Well?", SamplingParams(max_tokens=11, ignore_eos=True))
    assert (on.text, on.finish_reason) == ("one END two", "length")


def test_stop_strings_need_a_tokenizer() -> None:
    engine = engine_of({"stop_strings": ["x"]})
    with pytest.raises(RingkvError, match=r"^stop \(stop_strings of generation_config\): this engine has no tokenizer"):
        engine.generate([1], SamplingParams(max_tokens=1))
    assert engine.generate([1], SamplingParams(max_tokens=1, ignore_eos=True)).completion_tokens == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_suppressed_ids_are_never_drawn_in_any_lane(temperature: float) -> None:
    """Nor, as the first token, those that are suppressed at the beginning: their rows of the head would win."""
    config = tiny_config(layers=1)
    decoder = tiny_decoder(config, tiny_weights(config, torch.float32))
    loud, first = [3, 4, 5], [6, 7, 8, 9]
    generation = {"suppress_tokens": [*loud, 500], "begin_suppress_tokens": first}
    engine = Engine(decoder, ring=RingConfig(40, 8, "streaming", "all"), lanes=2, generation_config=generation)
    decoder.head.weight[first] *= 100
    decoder.head.weight[loud] *= 1000
    params = SamplingParams(temperature=temperature, top_p=1, max_tokens=20, ignore_eos=True, on_repetition="ignore")
    every = engine.generate([[1], [1, 2], [9, 9, 9]], params.replace(seed=2, logit_bias={11: 1.0}, n=2))
    assert not {id for done in every for id in done.token_ids} & {*loud}
    assert not {done.token_ids[0] for done in every} & {*first}
    assert {id for done in every for id in done.token_ids[1:]} & {*first}
    for name, value in (("suppress_tokens", (*loud, 500)), ("begin_suppress_tokens", tuple(first))):
        assert every[0].sampling[name] == {"value": value, "source": "generation_config"}
    for field in ({"logit_bias": {4: 9.0}}, {"stop_token_ids": [4]}):
        with pytest.raises(RingkvError, match=r"token id = 4: accepted is an id that generation_config does not supp"):
            engine.generate([1], SamplingParams(**field))


@pytest.mark.parametrize("key", values.SUPPRESSED)
def test_ids_that_no_token_can_have_suppress_nothing(key: str) -> None:
    assert values.suppressed({key: [3, -1, 10**9]}, key) == (3, 10**9)
    assert values.suppressed({key: None}, key) == values.suppressed({}, key) == ()


@pytest.mark.parametrize("key", values.SUPPRESSED)
@pytest.mark.parametrize("ids", ["x", 5, [[5]], [5.0], ["5"], [True], {"5": 1}, [None]])
def test_suppressed_ids_that_are_none_are_refused(key: str, ids: Any) -> None:
    with pytest.raises(RingkvError, match=rf"^generation_config\.json: {key} = .*: accepted is a list of token ids$"):
        engine_of({key: ids})


WRONG: list[tuple[str, Any, str, Any]] = [
    ("temperature", -1, "temperature", 1.0),
    ("top_k", 2.5, "top_k", 0),
    ("max_new_tokens", 0, "max_tokens", 4),
    ("max_new_tokens", "9", "max_tokens", 4),
    ("min_new_tokens", -1, "min_tokens", 1),
    ("stop_strings", [""], "stop", "x"),
    ("stop_strings", 5, "stop", "x"),
    ("stop_strings", ["y" * 10**6, 5], "stop", "x"),
    ("do_sample", "no", "temperature", 1.0),
    ("do_sample", 0, "temperature", 1.0),
]


@pytest.mark.parametrize("key, value, name, own", WRONG)
def test_a_value_that_cannot_be_is_refused_unless_the_user_gives_it(key: str, value: Any, name: str, own: Any) -> None:
    with pytest.raises(RingkvError, match=rf"^generation_config\.json: {key} = [^\n]{{1,400}}: accepted is ") as error:
        Sampling.resolve(SamplingParams(), {key: value})
    assert str(error.value).endswith(f"give {name} yourself") or key == "do_sample"
    assert Sampling.resolve(SamplingParams(**{name: own}), {key: value}).sources[name] == "user"


def test_filters_of_a_greedy_file_are_not_looked_at() -> None:
    assert Sampling.resolve(SamplingParams(), {"do_sample": False, "top_k": -1, "temperature": "x"}).greedy


def test_a_checkpoint_without_the_file_says_so_in_its_sources() -> None:
    done = engine_of(None).generate([1, 2], SamplingParams(max_tokens=3, top_k=5))
    sources = {name: entry["source"] for name, entry in done.sampling.items()}
    assert {name for name, source in sources.items() if source == "user"} == {"max_tokens", "top_k"}
    assert set(sources.values()) == {"user", "default"}
    assert sources.keys() == {*DEFAULTS, *values.OTHERS}


def test_the_files_limit_is_kept_under_full_where_it_fits() -> None:
    engine = engine_of({"max_new_tokens": 6}, RingConfig(budget=40, window=8, policy="full"))
    done = engine.generate([1] * 30, SamplingParams(ignore_eos=True))
    assert done.sampling["max_tokens"] == {"value": 6, "source": "generation_config"}
    done = engine.generate([1] * 45, SamplingParams(ignore_eos=True))
    assert done.sampling["max_tokens"] == {"value": 3, "source": "ring"}
