"""Everything a user can set: nested frozen dataclasses, one per owner. The command line and YAML are generated from
them.

A component receives only its own part. `None` or "auto" means that `resolve` decides, once, and logs what it decided.
Nothing mutates a config or os.environ. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DEFAULT_PORT = 30000


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how its weights are read."""

    model_path: str = "demo"
    """Hugging Face folder, GGUF file, or "demo" for the Gemma 3 270M of the `demo` extra."""
    tokenizer_path: str | None = None
    """Folder or tokenizer.json; default: beside the model, or inside the GGUF."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """"dummy" fills random weights from config.json alone."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute and KV dtype; auto: what the checkpoint says, bfloat16 for GGUF."""
    quantization: Literal["none", "int8", "gguf"] = "none"
    """On a CPU, in bfloat16. int8: round linear layers and embedding to 8 bits as they load; twice as fast to decode.
    gguf: compute with a GGUF file's own blocks as they are; rounds nothing, as small as the file, decodes like int8 and
    reads prompts more slowly.
    """
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; default: what the model and the KV pool allow."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA if there is one."""
    num_threads: int | None = None
    """Compute threads on the CPU; default: one a core."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs; without, their kernels are launched one by one."""
    seed: int = 0
    """Seed of dummy weights and of requests that bring none."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV pool and the prefix cache."""

    page_size: int = 16
    """Tokens in one KV page."""
    kv_cache_memory: str | None = None
    """KV pool size of each rank, such as "2GiB"; default: a share of free memory."""
    mem_fraction: float | None = None
    """On a CPU, the share of the memory free after loading that the KV pool may take (default 0.5); on a GPU, the share
    of its memory that the engine may take in all (default 0.9). kv_cache_memory overrides it."""
    mem_sharers: int = 1
    """Engines that share this memory: each takes its part of mem_fraction. `diptych pd` sets it."""
    prefix_caching: bool = True
    """Keep the pages of finished requests for prompts that begin alike."""
    attention_backend: Literal["auto", "flashinfer", "cpu", "reference"] = "auto"
    """Attention implementation; auto: the fastest that runs here."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What runs in a step."""

    max_num_seqs: int | None = None
    """Sequences in one batch at most; default 64 on a CPU, 512 on a GPU."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step, which also bounds prefill chunks; default 1024 on a CPU, 8192 on a GPU."""
    max_inflight_steps: int | None = None
    """Steps submitted before the oldest one's tokens are read: 1 synchronous, 2 overlapped (the default),
    pp_size with pipeline stages (then the default, and each sequence is in one of them)."""
    schedule_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of the waiting queue; "priority" runs higher Request.priority first, first come first served within one."""
    max_queued_requests: int = 1024
    """Waiting requests beyond which new ones get 503."""
    request_timeout: float | None = None
    """Seconds after which a request without a deadline of its own is ended; default: never."""
    check_invariants: bool = False
    """Check the page books after every step instead of only when idle (slow; for tests)."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Over how many ranks (processes, each with a device of its own) one engine is spread: tp_size x pp_size."""

    tp_size: int = 1
    """Ranks that share every layer: each holds a slice of its weights (also --tp, --tensor-parallel-size)."""
    pp_size: int = 1
    """Pipeline stages, each with its part of the layers on tp_size ranks (also --pp, --pipeline-parallel-size)."""
    dp_size: int = 1
    """Groups into which attention divides a stage's ranks, each with sequences of its own; divides tp_size (also --dp,
    --data-parallel-size)."""
    ep_size: int = 1
    """Ranks of a stage that hold different experts of a mixture; divides tp_size (also --ep,
    --expert-parallel-size)."""
    nnodes: int | None = None
    """Machines over which the ranks are spread evenly, in order; default: one, or what LeaderWorkerSet says."""
    node_rank: int | None = None
    """Which of them this is; node 0 serves HTTP, the others only compute. Default: 0, or what LeaderWorkerSet says."""
    dist_init_addr: str | None = None
    """host:port of node 0, where the others find it; the next port is used, too. The same on every node."""
    dist_timeout: float = 120.0
    """Seconds that a rank waits for another that lives; a dead or stopped one is noticed at once."""

    @property
    def world_size(self) -> int:
        """Ranks of the engine, on all nodes."""
        return self.tp_size * self.pp_size


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Guessing several tokens and verifying them in one step; the output is the same without."""

    speculative_algorithm: Literal["none", "NGRAM", "STANDALONE", "EAGLE"] = "none"
    """Who guesses. NGRAM: what followed the last tokens when they occurred before in prompt or output. STANDALONE: a
    smaller model with the same vocabulary. EAGLE: a head trained for the model, fed with its hidden states."""
    speculative_draft_model_path: str | None = None
    """The smaller model: Hugging Face folder, GGUF file or "demo"; or the folder of the EAGLE head."""
    speculative_num_draft_tokens: int = 5
    """Tokens guessed for a sequence in one step at most."""
    speculative_adaptive: bool = True
    """Guess fewer, or none, where acceptance and load say that it does not pay."""

    @property
    def is_on(self) -> bool:
        """Whether anything is guessed."""
        return self.speculative_algorithm != "none"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on top of the model."""

    lora_paths: tuple[str, ...] = ()
    """Adapters to load at start: name=folder, a folder alone (then also its name), or JSON with lora_name, lora_path
    and pinned (also --lora-modules)."""
    max_loras: int = 8
    """Different adapters in one step, which is what has a place on the device; more may be loaded. 0: none (also
    --max-loras-per-batch)."""
    max_lora_rank: int = 64
    """Largest rank of an adapter."""


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Prefill and decode apart: what this engine advertises, and how it deals with its peers."""

    role: Literal["unified", "prefill", "decode"] = "unified"
    """What this engine does for requests that name a peer; every engine can do all of a request itself."""
    disaggregation_bootstrap_port: int = 8998
    """Port of a prefill engine's registry, where decode engines find it; 0 takes a free one."""
    peer_host: str = "127.0.0.1"
    """Address at which peers reach this engine's control socket and registry."""
    peer_port: int = 0
    """Port of the control socket; 0 takes a free one."""
    allowed_bootstrap_hosts: str = "127.0.0.1,localhost"
    """Hosts that a client's bootstrap_host may name, separated by commas."""
    local_prefill: bool = True
    """Whether a decode engine computes a prompt itself when its prefill engine cannot."""
    local_prefill_tokens: int = 0
    """Uncached prompt tokens up to which a decode engine does not bother its prefill engine."""
    max_rooms: int = 1024
    """Requests that may be in transfer at a time."""
    room_timeout: float = 30.0
    """Seconds that one side of a room waits for the other."""
    transfer_timeout: float = 120.0
    """Seconds from asking for a prompt to having its KV."""
    write_timeout: float = 5.0
    """Seconds beyond what its size can take at all after which a posted write is taken for stuck, and its room given
    up."""
    heartbeat_interval: float = 0.5
    """Seconds between signs of life to a peer."""
    heartbeat_timeout: float = 2.0
    """Seconds of silence after which a peer is taken for lost."""
    cluster_key: str | None = None
    """Secret shared by all engines; required as soon as peer_host is not a loopback address."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP face."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = DEFAULT_PORT
    """Port to listen on; 0 takes a free one."""
    served_model_name: str | None = None
    """Name in /v1/models; default: the model's folder or file name."""
    api_key: str | None = None
    """Bearer token that /v1 and native routes demand; health and metrics stay open."""
    chat_template: str | None = None
    """Jinja template, or a file holding one; default: the model's own, else a plain one."""
    tool_call_parser: Literal["auto", "none", "hermes", "llama3", "mistral"] = "auto"
    """Format of tool calls in the model's text; auto goes by the chat template."""
    reasoning_parser: Literal["none", "think", "deepseek_r1", "qwen3"] = "none"
    """How reasoning is marked in the model's text."""
    metrics_prefix: Literal["diptych", "vllm", "sglang"] = "vllm"
    """Whose names /metrics uses, so that existing dashboards work."""
    drain_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    max_body_size: str = "32MiB"
    """Largest HTTP body accepted."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Verbosity of the log on standard error."""
    log_requests: bool = True
    """One line a finished request, with its stage times."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All of it; sections map to owners."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
