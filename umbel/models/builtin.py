"""Two tiny seeded models and a byte-level tokenizer, built in memory: no download, the same on every machine.

`builtin:tiny-llama` has grouped-query attention (4 heads, 2 key/value heads) and an untied head;
`builtin:tiny-gpt2` has Conv1D layers and a tied head. Together they cover the shapes that adapter code gets
wrong. Matrices are N(0, 0.05^2) drawn from Philox under their parameter names, so no library's initialiser or
random stream decides the values; norms are 1 and biases 0.

The tokenizer maps byte b to id b and adds three special ids: 256 bos, 257 eos, 258 pad. It adds no special id
to a text by itself. These models know nothing: they are for tests, demonstrations and dry runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from umbel.models.problem import model_error
from umbel.seeds import generator

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SEED = 20250
STANDARD_DEVIATION = 0.05
NUM_BYTES = 256
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")
MAX_TOKENS = 1024

_COMMON = {"vocab_size": NUM_BYTES + len(SPECIAL_TOKENS), "initializer_range": STANDARD_DEVIATION}
_IDS = {"bos_token_id": NUM_BYTES, "eos_token_id": NUM_BYTES + 1, "pad_token_id": NUM_BYTES + 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny-llama": {
        **_COMMON,
        **_IDS,
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": False,
    },
    "tiny-gpt2": {
        **_COMMON,
        **_IDS,
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": MAX_TOKENS,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
    },
}

# Deep enough for a head, a body and a tail.
SETTINGS["tiny-llama-4"] = {**SETTINGS["tiny-llama"], "num_hidden_layers": 4}

# A turn is "role: text", a site's reply ends with eos, every other turn with a newline. The text with
# add_generation_prompt is a prefix of the text with the answer, which is what masking the prompt relies on.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def settings_of(name: str) -> dict[str, Any]:
    """Return the architecture settings of `name`, without the `builtin:` prefix; ModelError if unknown."""
    if name not in SETTINGS:
        allowed = ", ".join(f"builtin:{known}" for known in sorted(SETTINGS))
        raise model_error(
            "model.name is no built-in model",
            got=f"builtin:{name}",
            allowed=allowed,
            remedy="Use one of these, a directory, a .gguf file or a hub id.",
        )
    return SETTINGS[name]


def builtin_config(name: str) -> PretrainedConfig:
    """Return the Transformers config of a built-in model."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**settings_of(name))
    config.use_cache = False
    return config


def builtin_model(name: str, *, attention: str) -> PreTrainedModel:
    """Return the float32 model with its seeded weights; the caller's random state is left untouched."""
    import torch
    from transformers import AutoModelForCausalLM

    config = builtin_config(name)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                draw = generator(SEED, "builtin", name, key).standard_normal(parameter.shape)
                parameter.copy_(torch.from_numpy(draw * STANDARD_DEVIATION))
    return model


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return the byte-level tokenizer: 259 ids, lossless for any text, chat template included."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    bos, eos, pad = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _byte_symbols() -> list[str]:
    """Return the printable character that byte-level BPE uses for each byte (the GPT-2 convention).

    Printable Latin-1 bytes stand for themselves; the other 68 take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]
