"""Ids and labels: what is supervised, how a row ends, what truncation keeps (H03, H05, H06, H07, D11)."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from umbel.data import IGNORE, RowFormat, encode_rows, pad_rows
from umbel.data.encode import Encoded
from umbel.errors import ConfigError, ModelError

SHARED = Path(__file__).parents[4] / "shared" / "data"
QA = RowFormat.QUESTION_ANSWER


def row(question="Q?", answer="Yes."):
    return {"question": question, "answer": answer}


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def learned(tokenizer, encoded):
    return tokenizer.decode(encoded.input_ids[encoded.labels != IGNORE])


def whole(tokenizer, encoded):
    return tokenizer.decode(encoded.input_ids)


def one(rows, fmt, tokenizer, **options):
    result = encode_rows(rows, fmt, tokenizer, **{"max_length": 512, **options})
    assert len(result) == 1
    return result.rows[0]


@pytest.mark.parametrize(
    ("template", "text", "target"),
    [
        ("chat", "<user>Q?<eos>\n<assistant>Yes.<eos>", "Yes.<eos>"),
        ("gemma", "<bos><start>user\nQ?<end>\n<start>model\nYes.<end><eos>", "Yes.<end><eos>"),
        ("rewriting", "[user]Q?<eos>[assistant]Yes.<eos>", "Yes.<eos>"),
        (None, "User: Q?\nAssistant: Yes.<eos>", " Yes.<eos>"),
    ],
)
def test_h06_a_row_ends_with_exactly_one_supervised_eos(make_tokenizer, template, text, target):
    tokenizer = make_tokenizer(template)
    encoded = one([row()], QA, tokenizer)
    assert whole(tokenizer, encoded) == text
    assert learned(tokenizer, encoded) == target
    assert encoded.input_ids.dtype == encoded.labels.dtype == np.int32
    supervised = encoded.labels != IGNORE
    assert (encoded.labels[supervised] == encoded.input_ids[supervised]).all()  # not shifted


def test_h06_an_eos_already_in_the_data_is_not_doubled(make_tokenizer):
    tokenizer = make_tokenizer("chat")
    expected = one([row()], QA, tokenizer)
    for answer in ("Yes.<eos>", "Yes. <eos><eos> "):
        assert one([row(answer=answer)], QA, tokenizer).input_ids.tolist() == expected.input_ids.tolist()
    text = one([{"text": "Hello<eos><eos>"}], RowFormat.TEXT, tokenizer)
    assert whole(tokenizer, text) == "Hello<eos>"


def test_h06_llama_style_tokenizer_has_one_bos_and_one_supervised_eos(llama_like):
    encoded = one([row("q", "a")], QA, llama_like)
    tokens = llama_like.convert_ids_to_tokens(encoded.input_ids.tolist())
    assert tokens[0] == "<s>"
    assert tokens.count("<s>") == tokens.count("</s>") == 1
    assert llama_like.convert_ids_to_tokens(encoded.labels[encoded.labels != IGNORE].tolist()) == [
        "\u2581a",
        "</s>",
    ]


def test_h05_pad_equal_to_eos_masks_by_length():
    rows = [Encoded(np.array(ids, np.int32), np.array(ids, np.int32)) for ids in ([2, 3, 1], [2, 1])]
    batch = pad_rows(rows, pad_id=1)
    assert batch.input_ids.tolist() == [[2, 3, 1], [2, 1, 1]]
    assert batch.labels.tolist() == [[2, 3, 1], [2, 1, IGNORE]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_h05_d11_the_eos_stays_a_target_when_it_is_also_the_pad(make_tokenizer):
    tokenizer = make_tokenizer("chat")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    rows = encode_rows([row(), row(answer="A longer answer.")], QA, tokenizer, max_length=512).rows
    batch = pad_rows(rows, tokenizer.pad_token_id)
    for i, encoded in enumerate(rows):
        assert batch.labels[i, len(encoded.input_ids) - 1] == tokenizer.eos_token_id
        assert (batch.labels[i, len(encoded.input_ids) :] == IGNORE).all()


def test_all_assistant_turns_are_supervised_and_nothing_else(make_tokenizer):
    turns = (
        ("system", "S"),
        ("user", "Yes"),
        ("assistant", "Yes"),
        ("user", "B"),
        ("assistant", "C"),
        ("user", "D"),
    )
    tokenizer = make_tokenizer("chat")
    encoded = one([chat(*turns)], RowFormat.MESSAGES, tokenizer)
    assert (
        whole(tokenizer, encoded)
        == "<system>S<eos>\n<user>Yes<eos>\n<assistant>Yes<eos>\n<user>B<eos>\n<assistant>C<eos>"
    )
    assert learned(tokenizer, encoded) == "Yes<eos>C<eos>"


def test_a_template_that_rewrites_earlier_turns_still_has_every_answer_supervised(make_tokenizer):
    turns = (("user", "A"), ("assistant", "B"), ("user", "B"), ("assistant", "think|C"))
    tokenizer = make_tokenizer("rewriting")
    assert learned(tokenizer, one([chat(*turns)], RowFormat.MESSAGES, tokenizer)) == "B<eos>think|C<eos>"
    # An earlier answer that lost its beginning is not what the data says: it stays, unsupervised.
    turns = (("user", "A"), ("assistant", "why|B"), ("user", "X"), ("assistant", "C"))
    encoded = one([chat(*turns)], RowFormat.MESSAGES, tokenizer)
    assert whole(tokenizer, encoded) == "[user]A<eos>[assistant]B<eos>[user]X<eos>[assistant]C<eos>"
    assert learned(tokenizer, encoded) == "C<eos>"


def test_a_conversation_may_open_with_the_assistant(make_tokenizer):
    tokenizer = make_tokenizer("chat")
    turns = (("assistant", "Hello."), ("user", "A"), ("assistant", "B"))
    assert learned(tokenizer, one([chat(*turns)], RowFormat.MESSAGES, tokenizer)) == "Hello.<eos>B<eos>"


def test_a_template_whose_generation_prompt_is_not_in_the_history_is_followed(make_tokenizer):
    template = (
        "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'].split('|')[-1] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]<think>' }}{% endif %}"
    )
    tokenizer = make_tokenizer(None)
    turns = (("user", "Yes"), ("assistant", "Yes"), ("user", "Yes"), ("assistant", "Yes"))
    encoded = one([chat(*turns)], RowFormat.MESSAGES, tokenizer, template=template)
    assert learned(tokenizer, encoded) == "Yes<eos>Yes<eos>"
    starts = [i for i in np.flatnonzero(encoded.labels != IGNORE) if encoded.labels[i - 1] == IGNORE]
    turn_tokens = len("[user]Yes[assistant]Yes") + 2  # one token a byte, one an EOS
    assert starts == [turn_tokens - 4, 2 * turn_tokens - 4]


def test_an_answer_that_the_template_shortens_is_supervised_as_rendered(make_tokenizer):
    template = (
        "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'].split('|')[-1] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    tokenizer = make_tokenizer(None)
    turns = (("user", "A"), ("assistant", "why|B"), ("user", "C"), ("assistant", "why|D"))
    encoded = one([chat(*turns)], RowFormat.MESSAGES, tokenizer, template=template)
    assert learned(tokenizer, encoded) == "B<eos>D<eos>"


def test_a_token_that_straddles_prompt_and_answer_is_supervised(make_tokenizer):
    tokenizer = make_tokenizer(None, merges=[(":", "\u0120")])  # one token for ': ', half of it prompt
    encoded = one([row()], QA, tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(encoded.labels[encoded.labels != IGNORE].tolist())
    assert tokens == [":\u0120", "Y", "e", "s", ".", "<eos>"]


def test_characters_of_several_bytes_are_supervised_whole(make_tokenizer):
    tokenizer = make_tokenizer("chat")
    assert (
        learned(tokenizer, one([row("\u00e9?", "\u00fcber \U0001f600")], QA, tokenizer))
        == "\u00fcber \U0001f600<eos>"
    )


def test_a_tokenizer_without_offsets_gives_the_same_mask():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    turns = (("user", "A"), ("assistant", "Hi"), ("user", "B"), ("assistant", "You"))
    encoded = one([chat(*turns)], RowFormat.MESSAGES, tokenizer)
    assert (
        whole(tokenizer, encoded) == "User: A\nAssistant: Hi</s>User: B\nAssistant: You</s>"
    )  # its own space rule
    assert learned(tokenizer, encoded) == " Hi</s> You</s>"


def test_h03_a_prompt_that_leaves_no_room_drops_the_row_and_counts_it(make_tokenizer):
    rows = [{"prompt": "word " * 200, "completion": " 4"}, {"prompt": "other " * 200, "completion": " 4"}]
    result = encode_rows(rows, RowFormat.PROMPT_COMPLETION, make_tokenizer(None), max_length=16)
    assert len(result) == result.num_supervised == 0
    assert (result.counts.rows, result.counts.kept, result.counts.dropped_truncated) == (2, 0, 2)


def test_truncation_takes_the_prompt_from_the_left_and_keeps_the_answer(make_tokenizer):
    tokenizer = make_tokenizer("chat")
    full = one([row("0123456789" * 3, "Yes.")], QA, tokenizer)
    size = len(full.input_ids)
    result = encode_rows([row("0123456789" * 3, "Yes.")], QA, tokenizer, max_length=size - 10)
    assert result.counts.shortened == 1
    assert result.rows[0].input_ids.tolist() == full.input_ids[10:].tolist()
    assert learned(tokenizer, result.rows[0]) == "Yes.<eos>"


def test_truncation_keeps_the_bos(make_tokenizer):
    tokenizer = make_tokenizer(None, bos=True)
    encoded = one([row("0123456789" * 3, "Yes.")], QA, tokenizer, max_length=40)
    assert len(encoded.input_ids) == 40
    assert whole(tokenizer, encoded).startswith("<bos>")
    assert encoded.input_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert learned(tokenizer, encoded) == " Yes.<eos>"


def test_an_answer_cut_at_its_end_does_not_teach_to_stop_there(make_tokenizer):
    tokenizer = make_tokenizer("chat")
    encoded = one([row("Q?", "abc" * 50)], QA, tokenizer, max_length=40)
    assert len(encoded.input_ids) == 40
    assert encoded.input_ids[-1] == encoded.labels[-1] != tokenizer.eos_token_id


def test_h07_a_refused_system_role_is_folded_the_same_way_and_counted(make_tokenizer):
    tokenizer = make_tokenizer("gemma")
    turns = (("system", "Be brief."), ("user", "Q?"), ("assistant", "Yes."))
    result = encode_rows([chat(*turns), chat(*turns[1:])], RowFormat.MESSAGES, tokenizer, max_length=512)
    assert (
        whole(tokenizer, result.rows[0])
        == "<bos><start>user\nBe brief.\n\nQ?<end>\n<start>model\nYes.<end><eos>"
    )
    assert (result.counts.kept, result.counts.folded_system) == (2, 1)


def test_turns_that_the_template_refuses_are_dropped_and_counted(make_tokenizer):
    turns = (("user", "A"), ("user", "B"), ("assistant", "C"))
    result = encode_rows([chat(*turns)], RowFormat.MESSAGES, make_tokenizer("gemma"), max_length=512)
    assert (len(result), result.counts.dropped_refused) == (0, 1)


def test_unusable_rows_and_repetitions_are_counted(make_tokenizer):
    rows = [row(), row(), row(answer=None), row(question="  "), row(answer=4), {"other": "x"}, row("R?")]
    result = encode_rows(rows, QA, make_tokenizer("chat"), max_length=512)
    assert result.counts.as_dict() == {
        "rows": 7, "kept": 3, "dropped_truncated": 0, "dropped_empty": 4, "dropped_refused": 0,
        "shortened": 0, "folded_system": 0, "duplicates": 1,
    }  # fmt: skip
    assert result.source == [0, 1, 6]


def test_the_prompt_is_supervised_on_request(make_tokenizer):
    encoded = one([row()], QA, make_tokenizer("chat"), completion_only=False)
    assert encoded.labels.tolist() == [IGNORE, *encoded.input_ids[1:].tolist()]


def test_long_text_is_cut_into_chunks_where_every_token_but_the_first_is_a_target_once(make_tokenizer):
    tokenizer = make_tokenizer(None, bos=True)
    text = "".join(chr(97 + i % 26) for i in range(100))
    result = encode_rows([{"text": text}], RowFormat.TEXT, tokenizer, max_length=16)
    targets = np.concatenate([encoded.labels[encoded.labels != IGNORE] for encoded in result.rows])
    assert tokenizer.decode(targets) == text + "<eos>"
    assert result.num_supervised == 101
    assert max(len(encoded.input_ids) for encoded in result.rows) == 16
    assert all(encoded.labels[0] == IGNORE for encoded in result.rows)
    assert result.rows[0].input_ids[0] == tokenizer.bos_token_id
    assert (result.counts.kept, set(result.source)) == (1, {0})


def test_wrong_settings_are_named(make_tokenizer):
    with pytest.raises(ConfigError, match=r"max-length is too small, got 1\..*>= 2"):
        encode_rows([row()], QA, make_tokenizer("chat"), max_length=1)
    with pytest.raises(ConfigError, match=r"'vicuna'.*plain"):
        encode_rows([row()], QA, make_tokenizer("chat"), max_length=9, template="vicuna")
    with pytest.raises(ConfigError, match="needs a tokenizer with a chat template"):
        encode_rows([row()], QA, make_tokenizer(None), max_length=9, template="chat")
    with pytest.raises(ModelError, match="cannot render"):
        encode_rows([row()], QA, make_tokenizer(None), max_length=9, template="{{ raise_exception('no') }}")
    tokenizer = make_tokenizer("chat")
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="end-of-sequence"):
        encode_rows([row()], QA, tokenizer, max_length=9)


def test_prompt_at_inference_is_the_prompt_of_training(make_tokenizer):
    from umbel.data import resolve_format

    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q?"}]
    for name in ("chat", "gemma", None):
        tokenizer = make_tokenizer(name)
        prompt = resolve_format(tokenizer).render_prompt(turns)
        encoded = one(
            [{"messages": [*turns, {"role": "assistant", "content": "A"}]}], RowFormat.MESSAGES, tokenizer
        )
        assert whole(tokenizer, encoded) == prompt + learned(tokenizer, encoded)


@pytest.mark.parametrize("name", ["gsm8k_test.jsonl", "medquad/senior-health.jsonl", "tasks/sciq.jsonl"])
def test_d11_real_rows_end_with_a_supervised_eos(make_tokenizer, name):
    if not (SHARED / name).exists():
        pytest.skip(f"needs the real data file {SHARED / name}")
    tokenizer = make_tokenizer("chat")
    with (SHARED / name).open() as file:
        rows = [json.loads(line) for line in islice(file, 100)]
    fmt = RowFormat.PROMPT_COMPLETION if "prompt" in rows[0] else QA
    result = encode_rows(rows, fmt, tokenizer, max_length=100_000)
    assert result.counts.kept == len(rows)
    for index, encoded in zip(result.source, result.rows, strict=True):
        assert encoded.labels[-1] == tokenizer.eos_token_id
        answer = rows[index]["completion" if "completion" in rows[index] else "answer"].strip()
        assert learned(tokenizer, encoded) == answer + "<eos>"
