"""Llama keeps what every model package must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oracle import Array, forward

from attnquant.testing import ModelConformance, Setting


class TestLlama(ModelConformance):
    """Five layers, grouped queries, Llama 3's RoPE, a head of its own."""

    architecture = "LlamaForCausalLM"
    setting = Setting(2, 4)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 2,
        "dtype": "float32",
        "eos_token_id": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 96,
        "intermediate_size": 160,
        "max_position_embeddings": 1024,
        "mlp_bias": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 320,
    }

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        hidden, wide, vocab = 96, 160, 320
        queries, keys = 4 * 32, 2 * 32
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocab, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (vocab, hidden),
        }
        for layer in range(5):
            for name, shape in {
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "mlp.gate_proj": (wide, hidden),
                "mlp.up_proj": (wide, hidden),
                "mlp.down_proj": (hidden, wide),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items():
                shapes[f"model.layers.{layer}.{name}.weight"] = shape
        return shapes

    def reference(self, weights: Mapping[str, Array], tokens: Sequence[int]) -> Array:
        return forward(weights, self.config, tokens)
