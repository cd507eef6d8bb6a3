"""One prompt answered before and after: what people look at first. Greedy, so that it can be compared."""

from __future__ import annotations

from typing import Any

from server_app.start import Start
from umbel.config import Config


def answer(config: Config, start: Start, state: dict[str, Any]) -> str:
    """Return the model's greedy answer to `eval.sample-prompt` with `state` loaded; loads the base weights."""
    import torch

    from umbel.models.adapter import attach
    from umbel.models.reshape import load_adapter
    from umbel.models.source import load_model, load_tokenizer
    from umbel.models.state import write_state

    tokenizer = load_tokenizer(start.spec)
    model: Any = load_model(start.spec)
    if config.train.mode == "lora":
        model = attach(model, start.settings)
        load_adapter(model, state, start.settings)
    else:
        write_state(model, state, config.train.mode)
    model.eval()
    prompt = config.eval.sample_prompt
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
    with torch.no_grad():
        out = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=config.eval.sample_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    return tokenizer.decode(out[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True).strip()
