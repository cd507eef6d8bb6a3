"""Models named by their shape alone, for training from scratch: `config:gpt2-medium`, `config:llama-3.2-1b`.

The entries are the published architectures' settings (GPT-2: Radford et al. 2019, table 2; Llama: Grattafiori et al.
2024, arXiv 2407.21783, and the 3.2 release), without weights and without tokenizer. GPT-2's matrix is tied, as is
that of Llama 3.2 1B: it counts and travels once. Dropout is 0: one pass over the data needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from umbel.models.problem import model_error

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PREFIX = "config:"


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _llama(width: int, inner: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        **more,
    }


_BYTES = {"vocab_size": 259, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
_LLAMA3 = {
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-tiny": {**_gpt2(64, 2, 4), **_BYTES, "n_positions": 256},
    "llama-tiny": _llama(64, 128, 2, 4, 2, **_BYTES, max_position_embeddings=512),
    "llama-150m": _llama(768, 2048, 12, 12, 4, **_LLAMA3 | {"vocab_size": 50304}),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, **_LLAMA3, head_dim=64),
}
SHAPES["llama-150m"] |= {"bos_token_id": 50256, "eos_token_id": 50256}


def shape_config(name: str) -> PretrainedConfig:
    """Return the Transformers config of `config:<name>`; ModelError if there is none."""
    from transformers import AutoConfig

    if name not in SHAPES:
        raise model_error(
            "model.name is no known shape",
            got=PREFIX + name,
            allowed=", ".join(PREFIX + known for known in sorted(SHAPES)),
            remedy="Use one of these, or a directory that holds a config.json.",
        )
    config = AutoConfig.for_model(**SHAPES[name])
    config.use_cache = False
    return config
