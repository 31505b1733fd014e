"""The supported model types, what an absent key means in each, and the keys that change nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One ``model_type``. What an absent key means is taken from transformers' configuration class."""

    architecture: str  # the class that checkpoints of this type name
    max_position: int  # of an absent max_position_embeddings
    kv_heads: int | None = None  # of an absent num_key_value_heads; None means the number of query heads
    head_dim: int | None = None  # of an absent head_dim; None means hidden_size / num_attention_heads
    theta: float = 10000.0  # of an absent rope_theta
    tie: bool = False  # of an absent tie_word_embeddings
    qk_norm: bool = False  # whether queries and keys are normalised before RoPE
    attention_bias: bool | None = None  # the value that every model has; None if the key of this name decides
    mlp_bias: bool | None = False  # the same
    window: int | None = None  # of an absent sliding_window
    window_flag: bool = True  # whether a window counts only if use_sliding_window is true
    window_scope: tuple[str, ...] = ()  # the keys that say which layers a window covers
    nope: bool = False  # whether some layers have no rotary embedding
    moe: bool = False  # whether the MLP is a mixture of experts


_BY_LAYER = ("layer_types", "max_window_layers")
FAMILIES = {
    "llama": Family("LlamaForCausalLM", 2048, mlp_bias=None, window_flag=False),
    "mistral": Family("MistralForCausalLM", 131072, kv_heads=8, attention_bias=False, window=4096, window_flag=False),
    # The biases of q, k and v are part of the architecture; there is no key for them.
    "qwen2": Family("Qwen2ForCausalLM", 32768, kv_heads=32, attention_bias=True, window=4096, window_scope=_BY_LAYER),
    "qwen3": Family(
        "Qwen3ForCausalLM", 32768, kv_heads=32, head_dim=128, qk_norm=True, window=4096, window_scope=_BY_LAYER
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", 32768, kv_heads=4, qk_norm=True, window=4096, moe=True),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        32768,
        kv_heads=4,
        theta=2000000.0,
        tie=True,
        mlp_bias=None,
        window_scope=("layer_types",),
        nope=True,
    ),
}

# Keys that may be present with these values only, because another value means another model.
FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1, 1.0),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "use_qk_norm": (False,),
    "pruned_heads": ({}, []),
}

_PROVENANCE = """
    _name_or_path _commit_hash transformers_version transformers.js_config architectures finetuning_task
    is_llama_config is_decoder unsloth_fixed unsloth_version task_specific_params tokenizer_class prefix
"""
_TRAINING = """
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop output_router_logits
    router_aux_loss_coef pretraining_tp problem_type id2label label2id num_labels tf_legacy_loss torchscript
    use_bfloat16 gradient_checkpointing
"""
_RUNTIME = """
    use_cache output_attentions output_hidden_states return_dict return_dict_in_generate output_scores
    chunk_size_feed_forward attn_implementation _attn_implementation _attn_implementation_autoset
    _flash_attn_2_enabled tie_encoder_decoder cross_attention_hidden_size max_sequence_length model_max_length
"""
_TOKENS = "bos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id"
# transformers 4 also wrote the defaults of generation into config.json. Only those in generation_config.json count.
_GENERATION = """
    do_sample temperature top_k top_p typical_p min_length max_length max_new_tokens num_beams num_beam_groups
    num_return_sequences diversity_penalty repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size early_stopping bad_words_ids forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""

# Keys that change neither the logits of these families nor any of our defaults.
HARMLESS = frozenset(" ".join((_PROVENANCE, _TRAINING, _RUNTIME, _TOKENS, _GENERATION)).split())
