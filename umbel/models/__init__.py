"""Base models, their adapters and what of them is exchanged and exported.

| file | what it answers |
|---|---|
| `source.py` | where a model comes from: built in, a package, a directory, a GGUF file, the hub |
| `builtin.py` | two tiny seeded models and a byte-level tokenizer that need no download |
| `gguf.py` | a GGUF file turned once into a safetensors directory |
| `fingerprint.py` | what two sites compare before round 1 |
| `lora.py` | the adapter's settings, the rank and the scale of each layer |
| `targets.py` | which layers get an adapter, and which lists are refused |
| `adapter.py` | LoRA attached to a frozen base, and its first values |
| `state.py` | the arrays that travel, under canonical names |
| `export.py` | adapter, merged model or full model on disk |
| `names.py` | what a tensor is called, with and without PEFT around the model |
| `packing.py` | whether several rows may share one forward row |
| `loss.py` | the next-token loss at supervised positions |

PyTorch, Transformers and PEFT are imported inside the functions, so that a process which only reads a
`ModelSpec` pays for none of them.
"""
