"""From SamplingParams and generation_config.json to what a lane really samples with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringkv.engine.config import SamplingParams
from ringkv.errors import RingkvError, is_int
from ringkv.kernels.sample import GREEDY_BELOW
from ringkv.models.keys import Keys, refusal, short

# What holds where neither the user nor generation_config.json says anything.
DEFAULTS: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "max_tokens": 32768,
    "min_tokens": 0,
    "stop": (),
}
# What else a request carries is the user's or SamplingParams' own default.
OTHERS: tuple[str, ...] = (
    "logit_bias",
    "n",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "thinking",
    "max_thinking_tokens",
    "thinking_message",
    "on_repetition",
    "min_repeat_count",
    "min_repeat_span",
)

FILE = "generation_config.json"
# What the file calls otherwise than SamplingParams does.
_KEYS = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop_strings"}
# What the file alone can ask for: ids that are never drawn, and ids that are not drawn as the first token.
SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")
_FILTERS = ("temperature", "top_p", "top_k", "min_p")
# What the file may ask for in vain, each with the values that ask for nothing.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "constraints": (),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_length": (),
    "max_time": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "token_healing": (False,),
    "top_h": (1,),
    "typical_p": (1,),
    "watermarking_config": (),
}
# Keys that are not in force where a field has a value; the lengths among them count the prompt too.
_GIVES_WAY = {"max_length": "max_tokens", "min_length": "min_tokens", "num_return_sequences": "n"}
_ONLY_WHERE_DRAWN = {"epsilon_cutoff", "eta_cutoff", "top_h", "typical_p"}
# What changes no token of a model of this kind.
_SILENT = {
    # special tokens (``ending_tokens`` reads eos_token_id)
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"),
    # caches, compilation and what transformers returns
    *("cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile"),
    *("low_memory", "max_cache_len", "prefill_chunk_size", "transformers_version", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
    # tokens that are drafted first, which are the same tokens
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind"),
    *("is_assistant", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("prompt_lookup_num_tokens", "speculation_type", "target_lookbehind", "use_mtp"),
    # details of a search with several beams, and logits that are not finite, which end a text here
    *("diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups", "remove_invalid_values"),
    "renormalize_logits",
}
_UNTOUCHED = SamplingParams()


@dataclass(frozen=True)
class Sampling:
    """Effective values of one request, each with where it came from.

    Attributes:
        values: name -> value, every field of SamplingParams but the seed, and those of ``SUPPRESSED`` that the
            checkpoint names.
        sources: name -> "user", "generation_config", "default" or "ring".
        warnings: what the checkpoint asks for and does not get.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    @classmethod
    def resolve(cls, params: SamplingParams, generation_config: Mapping[str, Any]) -> Sampling:
        """The user's value, else the checkpoint's, else the default.

        A value counts as the user's where it is not what SamplingParams has by itself. ``do_sample: false`` in the
        file means temperature 0, and its filters are not in force, unless the user gives a temperature. With
        ``ignore_eos`` the file's stop strings are not in force either.

        What the file asks for beside that is named in a warning, unless its value asks for nothing or the key changes
        no token. A key that transformers does not know is named too, unless it is null or begins with "_".

        Raises:
            RingkvError: a value of the file that is in force and not accepted, by its name there.
        """
        theirs = _in_force(params, generation_config)
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for name in (*DEFAULTS, *OTHERS):
            value, source = getattr(params, name), "user"
            if value == getattr(_UNTOUCHED, name):
                if name in theirs:
                    value, source = theirs[name], "generation_config"
                else:
                    value, source = DEFAULTS.get(name, value), "default"
            values[name], sources[name] = value, source
        for name in SUPPRESSED:
            if ids := suppressed(generation_config, name):
                values[name], sources[name] = ids, "generation_config"
        sampling = cls(values, sources)
        return dataclasses.replace(sampling, warnings=tuple(sampling._asked_in_vain(generation_config)))

    @property
    def greedy(self) -> bool:
        """Whether every token is the likeliest."""
        return bool(self.values["temperature"] < GREEDY_BELOW)

    def limited(self, max_tokens: int) -> Sampling:
        """The same with the ``max_tokens`` that the ring allows."""
        values, sources = {**self.values, "max_tokens": max_tokens}, {**self.sources, "max_tokens": "ring"}
        return dataclasses.replace(self, values=values, sources=sources)

    def report(self) -> dict[str, dict[str, Any]]:
        """name -> {value, source}."""
        return {name: {"value": value, "source": self.sources[name]} for name, value in self.values.items()}

    def _asked_in_vain(self, generation_config: Mapping[str, Any]) -> list[str]:
        known = {*DEFAULTS, *_KEYS.values(), *SUPPRESSED, "do_sample"} - _KEYS.keys() | _SILENT
        if self.greedy:
            known |= _ONLY_WHERE_DRAWN
        known |= {key for key, name in _GIVES_WAY.items() if self.sources[name] != "default"}
        asked = [
            f"{key if key.isprintable() and len(key) < 80 else short(key)} = {short(value)}"
            for key, value in generation_config.items()
            if value is not None
            and key not in known
            and not key.startswith("_")
            and not any(value == nothing for nothing in _NOT_APPLIED.get(key, ()))
        ]
        return [f"{FILE} asks for {', '.join(asked)}: not supported, so it was not applied"] if asked else []


def suppressed(generation_config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The ids that a key of ``SUPPRESSED`` lists; a negative one, which is no token's, suppresses nothing.

    Raises:
        RingkvError: the value is not a list of ints.
    """
    ids = generation_config.get(key)
    if ids is None:
        return ()
    if not isinstance(ids, list | tuple) or not all(is_int(id) for id in ids):
        raise refusal(f"{FILE}: {key}", ids, "a list of token ids")
    return tuple(id for id in ids if id >= 0)


def _in_force(params: SamplingParams, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of the fields of SamplingParams that the user leaves to it, by their names."""
    found: dict[str, Any] = {}
    left = [name for name in DEFAULTS if getattr(params, name) == getattr(_UNTOUCHED, name)]
    keys = Keys(generation_config, f"{FILE}: ")
    # transformers would take 0 for a cache in one place and not in another.
    keys.choice("use_cache", (True, False, None), None)
    if "temperature" in left and keys.choice("do_sample", (True, False, None), None) is False:
        found["temperature"] = 0.0
        left = [name for name in left if name not in _FILTERS]
    for name in left:
        key = _KEYS.get(name, name)
        value = generation_config.get(key)
        if value is None or (name == "stop" and params.ignore_eos):
            continue
        try:
            found[name] = getattr(SamplingParams(**{name: value}), name)
        except RingkvError as error:
            accepted = str(error).rpartition(": accepted is ")[2]
            raise refusal(f"{FILE}: {key}", value, f"{accepted}; give {name} yourself") from None
    return found
