"""A tiny model of every causal language model of transformers, built by the names in its configuration."""
import dataclasses
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.transformers.small_models import randomize

WINDOW = 6
# By field: the value for configurations that have it.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embedding_size", "embedding_dim",
                     "word_embed_proj_dim", "lru_width", "cross_attention_hidden_size", "hidden_size_global"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_inner", "dff",
                     "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp",
                     "ffn_hidden_size", "shared_intermediate_size", "expert_ffn_hidden_size",
                     "moe_shared_expert_intermediate_size",
                     "dense_intermediate_size", "block_ff_dim", "dim_ff", "feed_forward_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
                     "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
                     "encoder_attention_heads", "attention_heads", "num_decoder_attention_heads",
                     "num_encoder_attention_heads", "swa_num_attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "n_group", "kv_n_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "attention_head_dim", "dim_head", "d_head",
                     "v_head_dim", "qk_nope_head_dim", "index_head_dim", "linear_key_head_dim",
                     "linear_value_head_dim", "linear_head_dim", "global_head_dim", "hidden_size_per_layer_input",
                     "rotary_dim"), 8),
    "qk_rope_head_dim": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_head_dim": 12,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_experts_per_tok",
                     "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 4),
    "num_codebooks": 1, "encoder_hash_byte_group_vocab": 64, "topk_group": 2, "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions",
                     "context_length", "model_max_length"), 128),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size",
                     "local_attention", "window_size"), WINDOW),
    "type_vocab_size": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    **dict.fromkeys(("index_topk", "index_block_size", "index_topk_blocks"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads",
                     "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_head", "mamba_head_dim"), 16),
}
# The same for fields without a default.
OPTIONAL = {"num_key_value_heads", "head_dim", "pad_token_id", "bos_token_id", "eos_token_id", "type_vocab_size",
            "moe_intermediate_size"}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
LOCAL_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
# By model type: other values.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {**LOCAL_LAYERS, "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in LOCAL_LAYERS["layer_types"]}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 4}},
    "longcat_flash": {"head_dim": 4},
    "deepseek_v2": {"num_experts_per_tok": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_shared_experts": 1},
    "dory": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "n_input_layers": 1,
             "n_output_layers": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "num_kv_shared_layers": 2},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 2},
    "xlstm": {"embedding_dim": 64, "hidden_size": 64},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["local", "global"], 1]]},
    "granitemoehybrid": HYBRID,
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_groups": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "attention_head_size": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layer_types": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"], "num_hidden_layers": 2, "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(kind: type, **others: Any) -> Any:
    """A small configuration of that class."""
    default = {field.name: field.default for field in dataclasses.fields(kind)}
    given = {name: value for name, value in SIZES.items()
             if name in default and (default[name] is not None or name in OPTIONAL)}
    named = PART_OF.get(kind.model_type, {})
    for name in kind.sub_configs:
        sub = type(getattr(kind(), name, None)) if name not in named else getattr(transformers, named[name][0])
        if name in default and dataclasses.is_dataclass(sub):
            given[name] = tiny_config(sub, **(named[name][1] if name in named else {}))
    if "kv_lora_rank" in default and default.get("num_key_value_heads", 0) != 1:
        given["num_key_value_heads"] = given["num_attention_heads"]
    given.update(_layers(kind, default))
    given.update(SPECIAL.get(kind.model_type, {}))
    return kind(**{**given, **others})


def _layers(kind: type, default: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, at least two, those with full attention last."""
    if "layer_types" not in default:
        return {}
    kinds = getattr(kind(), "layer_types", None)
    if not kinds:
        return {}
    chosen = sorted(set(kinds), key=lambda name: (name == "full_attention", name))
    chosen = chosen if len(chosen) > 1 else chosen * 2
    found = {"layer_types": chosen, "num_hidden_layers": len(chosen)}
    if "mlp_layer_types" in default:
        mlp = sorted(set(getattr(kind(), "mlp_layer_types", None) or ["dense"]))
        found["mlp_layer_types"] = [mlp[i % len(mlp)] for i in range(len(chosen))]
    return found


# A subconfiguration without a default.
PART_OF = {"gemma4_assistant": {"text_config": ("Gemma4TextConfig", {"hidden_size_per_layer_input": 0,
                                                                    "vocab_size_per_layer_input": 0})}}
# The language model's own configuration, if AutoModelForCausalLM does not find it.
PARTS = {"dots3_note": "Dots3NoteTextConfig", "musicgen": "MusicgenDecoderConfig",
         "musicgen_melody": "MusicgenMelodyDecoderConfig"}


def tiny_model(name: str, **others: Any) -> Any:
    """Random weights, large enough for every part to matter."""
    torch.manual_seed(0)
    options = {"attn_implementation": "eager"}
    if name in PARTS:
        config = tiny_config(getattr(transformers, PARTS[name]), **others)
        return randomize(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])._from_config(config, **options))
    config = tiny_config(CONFIG_MAPPING[name], **others)
    return randomize(transformers.AutoModelForCausalLM.from_config(config, **options))
