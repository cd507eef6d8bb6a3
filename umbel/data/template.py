"""From a conversation to one text and the spans of it that are learned.

The text is what the tokenizer's chat template renders, cut after the end of the last assistant turn. Span i
is assistant turn i without its header, with its end-of-turn mark:

    span_i = [ len(render(m[:i], generation prompt)), len(render(m[:i+1])) )    both prefixes of the text

Where a template rewrites earlier turns (so that these are no prefixes), the turn's own content is searched
behind what the renderings share; an earlier answer whose words were rewritten is not supervised. A template
that refuses the system role, or drops its text, is found out once by a probe: then every site folds system
text into the next user turn, as `system + blank line + user`. The answer depends on the template alone, never
on the rows a site happens to have.

A tokenizer without a template gets PLAIN_TEMPLATE:

    SYSTEM

    User: QUESTION
    Assistant: ANSWER<eos>

Literal special tokens inside a row's text are not escaped, except that an EOS which a row already ends with
is removed, since the template writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from umbel.data.formats import Message, Messages
from umbel.errors import ConfigError, ModelError

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token + '\\n' }}"
    "{% else %}{{ message['role'] | capitalize + ': ' + message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_PROBE = "umbel-system-probe"
Span = tuple[int, int]


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become text: a tokenizer, its template (None = its own) and the system rule."""

    tokenizer: Any
    template: str | None
    folds_system: bool

    @property
    def is_plain(self) -> bool:
        """Whether the text lacks the BOS that a tokenizer's own template would write."""
        return self.template == PLAIN_TEMPLATE

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """Return the text of the turns; raises what the template raises."""
        return str(
            self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        )

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Return the text that a model continues with an assistant turn, folded like in training."""
        return self.render(self._prepare(messages), generation_prompt=True)

    def spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]] | None:
        """Return (text, learned spans in characters), or None if the template refuses these turns."""
        turns = self._prepare(messages)
        try:
            text = self.render(turns)
            spans = self._find_spans(text, turns)
        except Exception:  # a template raises whatever its author chose: roles out of order, unknown roles
            return None
        return None if not spans else (text[: spans[-1][1]], spans)

    def _prepare(self, messages: Sequence[Message]) -> Messages:
        turns = fold_system(messages) if self.folds_system else list(messages)
        eos = self.tokenizer.eos_token
        return [_without_eos(turn, eos) if turn["role"] == "assistant" else turn for turn in turns]

    def _find_spans(self, text: str, turns: Messages) -> list[Span]:
        spans: list[Span] = []
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            span = self._find_span(text, turns, i, after=spans[-1][1] if spans else 0)
            if span is not None:
                spans.append(span)
            elif i == len(turns) - 1:
                return []
        return spans

    def _find_span(self, text: str, turns: Messages, i: int, after: int) -> Span | None:
        content = turns[i]["content"]
        # Templates may index the first turn, so a conversation that opens with the assistant has no prompt.
        prompt = self.render(turns[:i], generation_prompt=True) if i else None
        done = self.render(turns[: i + 1]).rstrip()
        if prompt is not None and text.startswith(prompt):
            start = len(prompt)
        else:
            shared = len(_common_prefix(text, self.render(turns[:i]).rstrip())) if i else 0
            start = text.find(content, max(shared, after))
            if start < 0:
                return None
        if text.startswith(done) and len(done) > start:
            return start, len(done)
        found = text.find(content, start)
        if found < 0:
            return None
        mark = done[done.rfind(content) + len(content) :] if content in done else ""
        end = found + len(content)
        return start, end + len(mark) if text.startswith(mark, end) else end


def resolve_format(tokenizer: Any, template: str = "auto") -> ChatFormat:
    """Return the format for `template`: auto (the tokenizer's own, else plain), chat, plain, or a Jinja text.

    Raises ModelError for a tokenizer without EOS or a template that cannot render one question and answer,
    ConfigError for an unknown name or a missing template.
    """
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "The tokenizer has no end-of-sequence token, got None. Allowed: any token of its vocabulary. "
            "Set its eos_token: without one a model never learns to stop."
        )
    has_own = bool(getattr(tokenizer, "chat_template", None))
    if template == "plain" or (template == "auto" and not has_own):
        chosen: str | None = PLAIN_TEMPLATE
    elif template in ("auto", "chat") and has_own:
        chosen = None
    elif "{{" in template or "{%" in template:
        chosen = template
    else:
        problem = (
            "needs a tokenizer with a chat template" if template == "chat" else "is not a known template"
        )
        raise ConfigError(
            "data.template",
            problem,
            got=template,
            allowed="auto, chat (the tokenizer's own), plain, or a Jinja text",
            remedy="Use auto.",
        )
    return ChatFormat(tokenizer, chosen, _must_fold(ChatFormat(tokenizer, chosen, False)))


def fold_system(messages: Sequence[Message]) -> Messages:
    """Return the turns with each system text put before the next user turn's, a blank line between."""
    folded: Messages = []
    pending: list[str] = []
    for turn in messages:
        if turn["role"] == "system":
            pending.append(turn["content"])
        elif turn["role"] == "user" and pending:
            folded.append({"role": "user", "content": "\n\n".join([*pending, turn["content"]])})
            pending = []
        else:
            folded.append(turn)
    return folded


def _must_fold(chat: ChatFormat) -> bool:
    pair: Messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        chat.render(pair)
    except Exception as error:
        raise ModelError(
            f"The chat template cannot render a question and an answer, got {type(error).__name__}: {error}. "
            f"Allowed: a template with these two roles. Set data.template to plain or correct the template."
        ) from error
    try:
        return _PROBE not in chat.render([{"role": "system", "content": _PROBE}, *pair])
    except Exception:  # the refusal is the answer, whatever its type
        return True


def _without_eos(turn: Message, eos: str) -> Message:
    content = turn["content"]
    while eos and content.endswith(eos):
        content = content.removesuffix(eos).rstrip()
    return {"role": turn["role"], "content": content}


def _common_prefix(first: str, second: str) -> str:
    size = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
    return first[:size]
