"""Small real tokenizers, built in memory: no file, no network."""

from __future__ import annotations

import pytest

CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
GEMMA_LIKE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<start>' + ('model' if m['role'] == 'assistant' else 'user') + '\\n' + m['content'] | trim + '<end>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start>model\\n' }}{% endif %}"
)
# Earlier answers lose what stands before '|': their own rendering is then no prefix of the whole one.
REWRITING = (
    "{% for m in messages %}"
    "{% set text = m['content'] if loop.last or m['role'] == 'user' else m['content'].split('|')[-1] %}"
    "{{ '[' + m['role'] + ']' + text + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
TEMPLATES = {"chat": CHAT, "gemma": GEMMA_LIKE, "rewriting": REWRITING, None: None}


def _byte_tokenizer(template=None, merges=(), bos=False):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<bos>", "<eos>", "<start>", "<end>"]
    symbols = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        extra_special_tokens=["<start>", "<end>"],
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer():
    """Return a builder of byte-level tokenizers whose pad is their EOS: (template, merges, bos)."""
    return _byte_tokenizer


@pytest.fixture(scope="session")
def llama_like():
    """A Llama-style fast tokenizer: metaspace words, BOS added by a post-processor, no template."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [
        "<unk>",
        "<s>",
        "</s>",
        "\u2581User",
        "\u2581Assistant",
        ":",
        "\n",
        "\u2581",
        "\u2581q",
        "\u2581a",
        "q",
        "a",
    ]
    core = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0, byte_fallback=False))
    core.normalizer = normalizers.Sequence([normalizers.NFC()])
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace()
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
