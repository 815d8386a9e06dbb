"""The software stack of a row, by keywords and year, and what its words change of it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from math import inf

from published.attention import FUSED, LAYERS, attention_of, is_old, names_flash
from published.cells import Cells, unsourced
from published.degrees import LIBRARIES, ZERO, degrees_of, stage_said
from published.offload import of_unsloth, offloaded_layers
from shardwise.model.spec import ModelSpec
from shardwise.plan.stack import Stack, load_stack

CORE = ("megatron-core", "megatron-bridge")
"""Stacks on Megatron-Core and Transformer Engine."""

_FORKS = (
    r"megatron-deepspeed|bigscience|deepspeed[\d. ]* with its megatron-lm"
    r"|gpt-?neox(?![ -]?(20b|\d|tokeni|model|arch|vocab|like|style|sizes|config|family))"
)
"""Codes on Megatron-LM of 2021 and DeepSpeed."""
_RULES: tuple[tuple[str, str], ...] = (
    (
        r"maxtext|paxml|\bjax\b|levanter|xla\b|\bpax\b|\bt5x\b|\bflax\b|easylm|axlearn|mesh[ -]?tensorflow|pathways",
        "jax",
    ),
    (rf"bloom sizing|{_FORKS}", "megatron"),
    (r"torchtitan|torchao|pytorch/ao\b", "torchtitan"),
    (r"automodel(?!.*(\bte\b|transformer[ -]?engine))", "fsdp2"),  # with these, its kernels are Megatron-Core's
    (r"nanotron|ultra-?scale|picotron", "nanotron"),
    (r"llm-foundry|mosaic|composer|fms-fsdp|\bfsdp1?\b.*\bibm|\bibm\b.*fsdp|fairscale|fairseq", "fsdp1"),
    (r"deepspeed|ml-engineering|colossal", "deepspeed"),
    (
        r"megatron|\bnemo\b|dgxc|simumax|\bmcore\b|core 0\.|primus|mindspeed|metaseq"
        r"|automodel|modellink|megascale|gigatron|nxd training|neuronx-distributed|paddle|oneflow(?!-inc)|libai",
        "megatron",
    ),
    (r"internevo|internlm/", "megatron-core"),  # overlaps gradients and parameters of zero 1
    (r"torchtune|lit-?(gpt|llama|parrot)", "eager"),
    (r"transformer engine's layers", "megatron"),  # whose kernels they are, whatever shards them
    (r"\bfsdp2|fully_shard", "fsdp2"),
    (r"\bfsdp|full_shard|hybrid_shard", "fsdp"),
    (r"transformer[ -]?engine", "megatron"),
)
"""Keywords of the code that lays a job out -> stack, the first that is found; `megatron` is one of three, by year and
kernels, `fsdp` one of two, by year."""

TPU = r"tpu|trillium|ironwood|\bv\d([ep]|litepod)?-\d"
"""Names of Google's devices, whose published configurations tune what is recomputed."""
TRAINIUM = r"trainium|\btrn\d|neuron-?core"
"""Names of AWS's devices."""
GAUDI = r"gaudi|\bhl-?[23]25"
"""Names of Habana's devices."""
MEGATRON_FSDP = 2024.5
"""Year from which Megatron-Core shards parameters over data ranks by itself."""
GATHERED_SINGLY = 0.12
"""`network` of DeepSpeed's sharded parameters before `COALESCED`: each tensor was gathered by itself, into a list."""
COALESCED = 2022.0
"""Year from which it gathers them together and ahead (its pull request 1453: 1.7 times as fast on eight p4d)."""
PREFETCHES = 2023.0
"""Year from which gathers of DeepSpeed and FSDP1 are seen to run beside what computes."""
CORE_SINCE = 2023.0
"""Year from which Megatron-LM and NeMo are Megatron-Core, with its distributed optimizer and sequence parallelism."""
PLACEHOLDS = 2025.4
"""Year from which Transformer Engine keeps one empty gradient per shape of weight (2.3: its pull request 1651)."""
FUSED_CORE = 2024.25
"""Until when Megatron-Core's loss is operations one after the other (its `cross_entropy_loss_fusion` came with 0.6)."""
FUSED_GATE = 2024.1
"""Until when a gated activation is two kernels of PyTorch (Megatron-Core's `fused_bias_swiglu.py`, PaddlePaddle's
`swiglu`). The year is about: of neither was the note of its release at hand."""
WEIGHED = 2025.5
"""Year from which Megatron-Core's experts weigh their inner layer."""
FLEXIBLE = 2025.7
"""Year from which Megatron-Bridge's recipes dispatch tokens by DeepEP or HybridEP."""
OVERLAPPED_EXPERTS = 2026.4
"""Year from which half of Megatron-Core's exchange of tokens is seen to run beside computing."""
EXCHANGED, ONE_LIST = 2025.67, 2026.1
"""Years from which torchtitan's per-operator recompute keeps what is sent all to all (its pull request 1672): of
Llama 4, DeepSeek and gpt-oss, and of every model, when their lists became one (2357), which has products with a bias
too, each of them."""
_EXCHANGES_ALL = r"all-?to-?all (token )?dispatch|dispatch\w* (by |with )?all-?to-?all"
"""Words for Megatron-Core's dispatcher that sends a token to each of its experts by itself."""
_TURBO = r"primus-turbo"
"""Words for Primus-Turbo, whose grouped products are one kernel of all experts."""
_WEIGHS_THERE = r"dist[ _-]?moe"
"""Words for torchtitan's kernels of experts beside DeepEP's, which weigh as well what they sum up."""
_GRADS_IN = r"grad(ient)?s?( (are|accumulated|reduced|added up))* in (fp32|bf16)|(fp32|bf16) grad(ient)?s\b"
"""Words for the type in which Megatron-Core adds up and reduces gradients (`grad_reduce_in_fp32`)."""
DUALPIPE = 0.9
"""Share of the exchange of tokens that DualPipe puts beside the computing of the other direction (arXiv:2412.19437)."""
CHUNKED = {False: 2.5, True: 2.0}
"""Bytes per logit of a loss in chunks: all in 16 bits, and where it is not compiled a chunk in fp32."""
KEPT = 8.5
"""Bytes per logit of litgpt's: Fabric casts what a forward gives to fp32, and each chunk's log-softmax is kept."""
FUSED_LOSS = 8.0
"""Bytes per logit of one kernel for the loss, which has its gradient in the place of its input: the logits of
transformers, in fp32, and their copy without the last place."""
UNFUSED_LOSS = 12.0
"""Bytes per logit of transformers' loss: in fp32 the log-softmax, its gradient and that of what it was made from."""
IN_PLACE = 4.0
"""Bytes per logit of unsloth's own kernel, which writes the gradient over a copy of the logits, in 16 bits."""
ONCE = 2.0
"""Bytes per logit of JAX on a TPU: in 16 bits, once. XLA fuses what goes into a product there, so that the gradient of
the logits is made in both products that it is for (recipes of four sources would not fit with more)."""
SLICED = 0.5
"""Bytes per logit of a loss that never holds all of them."""
CUT = 2024.9
"""Year from which unsloth's is such a one (Cut Cross Entropy, arXiv:2411.09009)."""
KERNEL_LOSS = 5.0
"""Bytes per logit of llm-foundry's kernel (`fsdp1`)."""
LOW_LOSS = 8.0
"""Bytes per logit of one that nothing makes fp32: DeepSpeed's engine has no autocast, and of some models the code
leaves them in 16 bits, as do loops of pure bf16: these, what is left without the last place, its log-softmax and the
gradient."""
_LOW_LOSS = r"\bqwen[ -](1\.8|7|14|72)|gpt-?2|gpt-?j\b|gpt-?neo|\bopt\b|bloom|falcon|pythia"
TWICE_LOSS = 14.0
"""Bytes per logit of it from `TWICE` to `SHIFTED`: its caller holds them in 16 bits too."""
TWICE = 2024.8
"""Year from which a function of its own computes it (4.46, October 2024)."""
SHIFTED = 2025.15
"""Year from which labels are shifted and not the logits (4.49, pull request 35646): the caller's are the loss's own."""
CHUNKED_NLL = 2026.5
"""Year from which TRL's supervised fine-tuning cuts tokens into chunks before the head, and keeps no logits (its pull
request 5846, version 1.7)."""
_OTHER_LOSS = r"\b(dpo|grpo|ppo|kto|rloo|orpo|reward|distill\w*)\b|loss_type[ =:]+\W?(nll|dft)\b|\bwhole logits"
"""Words for its other trainers and losses."""
LOOP_LOSS = 14.0
"""Bytes per logit of a loop of its own: these, and the logits in 16 bits, which a variable of the loop holds."""
BUCKET = 2.5e8
"""Elements of each of DeepSpeed's two buffers below zero 3 where none are printed: its `reduce_bucket_size` is 5e8,
and there is a second one with `overlap_comm` alone; with it examples and trainers have 2e8 to 5e8."""
FOREACH = 2025.5
"""Until when the AdamW of transformers' Trainer goes over all parameters at once; then it is one kernel."""
LOSS_APART = 40.0
"""Bytes that a loss in primitives reads and writes per logit, which is in fp32: a cast 6, the log-softmax 8 to 16, the
gradients of what is chosen 4, of the log-softmax 16, of the cast 6 (measured with our own stack on an H200: 40)."""
LOSS_LOW = 16.0
"""The same of one that stays in 16 bits: no casts, and half of the rest."""
TORCH = ("torchtitan", "fsdp1", "eager")
"""Stacks whose blocks are those of PyTorch, as eager or compiled as the row says."""
NATIVE_LOSS = 10.0
"""Bytes per logit of Megatron-Core's own loss where it is compiled (`cross_entropy_fusion_impl` native): logits in 16
bits, a copy in fp32, and another that the compiler makes of what is written in place and summed up in one graph (its
`fused_cross_entropy.py` says so, and has it mended)."""
TE_LOSS_SINCE, TE_LOSSES = 2025.0, 2026.1
"""Years from which NeMo's and Megatron-Bridge's recipes have Transformer Engine's loss, and those of Qwen."""
_NATIVE_LOSS = r"nemotron|\bglm"
"""Models whose recipes keep Megatron-Core's own."""
_TUNED_RECIPES = r"perf(ormance)?[ _/-](script|recipe|summary|long)|dgxc"
"""Words for NVIDIA's performance scripts, which set Transformer Engine's loss and fuse gates (of Qwen too, whose
providers do not)."""
_LOW_WEIGHTS = r"(gathered|weights|param(eter)?s?) in fp8|fp8[ -](weights|param)"
"""Words for parameters that are in fp8 themselves."""
OWN_LOSS = 8.0
"""Bytes per logit of a loop of its own that is compiled, whose graph has the loss too: logits in 16 bits, and in fp32
what one kernel of them leaves."""
COMPILED_LOSS = 2025.4
"""Year from which torchtitan's compile takes in the loss, so that no fp32 copy of the logits is kept."""


def stack_of(cells: Cells, spec: ModelSpec, *, sharded: bool, nodes: int = 1) -> Stack:
    """The stack of a row on so many nodes. `sharded`: parameters are sharded over data ranks (zero 3)."""
    name = _name(cells, sharded=sharded, nodes=nodes)
    stack = _preset(name)
    if name in ("fsdp1", "torchtitan") and not (sharded or stage_said(cells)) and _loops(cells):
        stack = replace(stack, step=_preset("eager").step, micro_host=_preset("eager").micro_host)
        if not cells.compiled:  # the same blocks as on one device, started by the same loop
            stack = replace(stack, block_host=_preset("eager").block_host, backward_host=_preset("eager").backward_host)
    if name in TORCH and _looks_at_loss(cells):
        stack = replace(stack, micro_host=max(stack.micro_host, _preset("deepspeed").micro_host))
    if cells.has(_FORKS) and not cells.noted(r"megatron-lm of"):
        stack = replace(stack, splits_sends=False)  # DeepSpeed's own pipeline
    if engine(cells) == "eager" or cells.has("thunder") or cells.noted(NO_MASTER):
        stack = replace(stack, pure_master=False)
    if name in CORE and cells.year >= OVERLAPPED_EXPERTS:
        stack = replace(stack, overlap_expert=0.5)
    flexible = name == "megatron-bridge" and cells.year >= FLEXIBLE and not cells.noted(_EXCHANGES_ALL)
    once = flexible or cells.noted(r"deep-?ep\b|hybrid-?ep\b|flex dispatcher") is not None
    stack = replace(stack, once_per_node=once, once_per_rank=once, weighs_inside=name in CORE and cells.year >= WEIGHED)
    stack = replace(stack, keeps_exchanged=stack.keeps_exchanged and (once or _lists_exchange(cells)))
    if cells.has(_TURBO):
        stack = replace(stack, expert_host=0.0)
    if engine(cells) == "torchtitan":
        stack = replace(stack, weighs_wide=not (once or cells.noted(_WEIGHS_THERE)))
    if "dualpipe" in cells["pp_schedule"].lower():
        stack = replace(stack, overlap_expert=DUALPIPE)
    stack = replace(stack, attention=attention_of(cells, name, stack.attention, core=name in CORE))
    grouped = bool(spec.num_kv_heads) and spec.num_kv_heads < spec.num_heads
    if grouped and stack.attention == "flash1" and cells.year >= GROUPED and cells.has(LAYERS) and is_old(cells):
        stack = replace(stack, attention="unfused", wide_softmax=True)
        cells.assume("attention in primitives, as the memory-efficient kernel takes no grouped heads")
    if cells.noted(r"kernel:"):  # a sweep over kernels says which norm it ran
        stack = replace(stack, fused=cells.noted(r"rms ?(norm)? ?kernel") is not None)
    compiled = cells.compiled
    if compiled is None and name in (*TORCH, "deepspeed") and re.search(GAUDI, cells["gpu"].lower()):
        compiled = True
        cells.assume("compiled, as Gaudi's software makes graphs of what PyTorch runs")
    if stack.attention == "unfused" and (compiled or name == "jax"):  # compilers fuse the softmax
        stack = replace(stack, attention="fused-softmax")
    if compiled:
        stack = replace(stack, fused=True)
    elif name in TORCH and (compiled is False or engine(cells) not in ("torchtitan", "fsdp1")):
        stack = replace(stack, fused=False)
    if name in (*TORCH, "deepspeed") and cells.noted(r"(?<!without )(?<!no )fused kernels"):
        stack = replace(stack, fused=True, logit_bytes=FUSED_LOSS)
    stack = _of_its_time(cells, stack)
    said = cells.noted(_GRADS_IN) if name in CORE else None
    if said:
        stack = replace(stack, grad_bytes=4.0 if "fp32" in said.group() else 2.0)
    if name in CORE and cells.noted(_CASTS_EACH):
        stack = replace(stack, master=False, logit_bytes=LOOP_LOSS)
    if name in CORE and cells.has(_OVERLAPS_PRODUCTS):
        stack = replace(stack, overlap_tensor=_preset("megatron-bridge").overlap_tensor)
    if name in CORE and cells.year < PLACEHOLDS:
        stack = replace(stack, placeholds_grads=False)
    if name in CORE and cells.year < FUSED_CORE:
        stack = replace(stack, loss_bytes=_preset("megatron-2021").loss_bytes)
    stack = replace(stack, caches_low=_cached_low(cells, stack))
    if name in CORE and cells.year < FUSED_GATE:
        stack = replace(stack, splits_gate=True)
    if name == "megatron-bridge":
        stack = _of_bridge(cells, stack)
    if name == "deepspeed" and cells.year < STAGED:
        stack = replace(stack, casts_on_host=True)
    if name == "deepspeed" and cells.year < PREFETCHES:
        stack = replace(stack, overlap_data=0.0, gather_wait=0.0)
    if name == "fsdp1" and sharded and cells.year < PREFETCHES:
        stack = replace(stack, overlap_data=0.0)
    if name == "deepspeed" and sharded and cells.year < COALESCED:
        stack = replace(stack, network=GATHERED_SINGLY)
    if name == "torchtitan" and sharded and cells.has(_FLAT):
        stack = replace(stack, one_root=True)
    if name == "deepspeed" and (
        cells.noted(_OWN_LINEAR) or (cells.year < DIRECT and not (compiled or _by_others(cells)))
    ):
        stack = replace(stack, keeps_gathered=True)
    if not sharded and cells.noted(_LATE):
        stack = replace(stack, overlap_data=0.0)
    if name == "jax" and (cells.has(_TORCH_XLA) or _waits(cells)):
        stack = replace(stack, overlap_data=0.0)
    limited = cells.noted(r"capacity factor (?:of )?(\d+(?:\.\d+)?)")
    if name == "jax" and limited:
        stack = replace(stack, capacity=float(limited.group(1)))
    if name == "jax" and cells.has("torch"):  # each micro-batch is a graph of its own, which Python starts
        stack = replace(stack, scans=False)
    if re.search(_STATIC, unsourced(cells.notes)):
        stack = replace(stack, fragmentation=0.0, cached=0.0)
    if name == "torchtitan" and "fp4" in cells["precision"].lower():
        stack = replace(stack, keeps_products=0.0)  # the kernels of these are not in its list, and run again
    elif name == "torchtitan" and cells.year >= ONE_LIST:
        stack = replace(stack, keeps_biased=1.0)
    if name == "nanotron" and cells.year < GATHERS_AGAIN:
        stack = replace(stack, saves_gathered=True, runs_ahead=0.0)
    by_layers = cells.has(rf"{LAYERS}|{_TRAINERS}|mingpt") and not cells.has("lit-?gpt")
    wide = by_layers and stack.attention == "unfused" and re.search(_WIDE_SOFTMAX, cells["model"].lower())
    stack = replace(stack, wide_softmax=bool(wide))
    if cells.noted(_UNDROPPED) or spec.patch:  # vision transformers have none
        stack = replace(stack, drops_scores=False)
    by_layers = by_layers or (cells.has("nanogpt") and cells.year < NANOGPT)
    if by_layers and not stack.fused and re.search(_GELU_NEW, cells["model"].lower()):
        stack = replace(stack, gelu_apart=True)
    bucket = cells.noted(r"reduce_bucket_size[ =:]+([\d.]+(e\d+)?)")
    if name == "deepspeed" and not sharded and not cells.has("colossal"):
        stack = replace(stack, reduce_bucket=BUCKET)
    if name == "deepspeed" and bucket:
        alone = not sharded and cells.noted(_ONE_BUFFER)
        stack = replace(stack, reduce_bucket=float(bucket.group(1)) / (2 if alone else 1))
    if cells.noted(r"param(eter)?s?[ _-]offload|offload[_ ]param"):
        stack = replace(stack, offloads_weights=True)
    if name == "jax" and re.search(TPU, cells["gpu"].lower()):
        stack = replace(stack, logit_bytes=ONCE)
    if name == "jax" and cells.noted(_KEPT_ATTENTION):
        stack = replace(stack, keeps_attention=True)
    layers = offloaded_layers(cells)
    if layers is not None:
        stack = replace(stack, offloads_blocks=min(layers / spec.num_layers, 1.0))
    if _chunks(cells):
        stack = replace(stack, logit_bytes=KEPT if cells.has(r"lit-?gpt") else CHUNKED[compiled is True])
        cells.assume("the loss works in chunks of the logits, which torchtune keeps in 16 bits, and litgpt in 32")
    elif of_unsloth(cells) and name in TORCH:
        stack = replace(stack, logit_bytes=SLICED if cells.year >= CUT else IN_PLACE, fused=True)
    elif cells.noted(_WHOLE) and not cells.noted(r"fused[ -]linear|\bflce\b"):
        stack = replace(stack, logit_bytes=FUSED_LOSS, fused=True)
    elif cells.noted(_SLICED):
        stack = replace(stack, logit_bytes=SLICED, fused=compiled is not False or bool(cells.noted(_KERNELS)))
        cells.assume("the loss works in chunks and never holds all logits")
    elif cells.year >= CHUNKED_NLL and cells.has(r"\btrl\b") and not cells.noted(_OTHER_LOSS):
        stack = replace(stack, logit_bytes=SLICED)
        cells.assume("the loss of TRL's supervised fine-tuning works in chunks of 256 tokens, its default")
    elif stack.fused and engine(cells) is None and cells.year >= FUSED and _alone(cells, name, sharded=sharded):
        stack = replace(stack, logit_bytes=min(stack.logit_bytes, OWN_LOSS), fragmentation=0.0)
    elif name == "torchtitan" and stack.fused and cells.year >= COMPILED_LOSS:  # logits and their gradient, in 16 bits
        stack = replace(stack, logit_bytes=4.0 if engine(cells) == "torchtitan" else OWN_LOSS)
    if name in (*TORCH, "deepspeed"):
        stack = replace(stack, loss_bytes=_passes_of_loss(stack))
    if cells.noted(_MASKED):
        stack = replace(stack, logit_share=MASKED)
    wide = re.search(_WIDE_MASKS, unsourced(cells.text))
    if wide:
        stack = replace(stack, wide_masks=True)
    if _graphs_experts(cells, spec, name) or cells.noted(_GRAPHED):
        stack = replace(stack, launch=GRAPHED, micro_host=0.0, fill_host=0.0, gather_wait=0.0)
        stack = replace(stack, block_host=0.0, shard_host=0.0, expert_host=0.0, route_host=0.0)
        cells.assume("one launch by the host per step, as a CUDA graph holds it whole")
    return stack


def _cached_low(cells: Cells, stack: Stack) -> float:
    """Bytes per weight of copies in fp8: what multiplies in every order, as Blackwell does, has no transposed ones.

    Nor has a loop of its own the others, which tells Transformer Engine of no micro-batches. MXFP8 has two whatever
    multiplies, as its scales go along rows.
    """
    if cells.noted(_LOW_WEIGHTS) or cells.has("primus"):  # whose products are of its own library
        return 0.0
    once = cells.noted(_CASTS_EACH) or cells.has("thunder")
    every = re.search(r"b[23]00|5090|rtx ?pro", cells["gpu"].lower()) and "mx" not in cells["precision"].lower()
    return min(stack.caches_low, 1.0) if once or every else stack.caches_low


def _of_bridge(cells: Cells, stack: Stack) -> Stack:
    """The loss and the gate of NeMo's and Megatron-Bridge's recipes, which the performance scripts have otherwise."""
    if cells.year < FUSED_CORE:
        return replace(stack, logit_bytes=_preset("megatron-core").logit_bytes)
    tuned, qwen = cells.has(_TUNED_RECIPES), "qwen" in cells["model"].lower()
    kept = not tuned and (re.search(_NATIVE_LOSS, cells["model"].lower()) or (qwen and cells.year < TE_LOSSES))
    native = kept or cells.year < TE_LOSS_SINCE
    return replace(stack, logit_bytes=NATIVE_LOSS if native else stack.logit_bytes, splits_gate=qwen and not tuned)


def _passes_of_loss(stack: Stack) -> float:
    """Bytes per logit of PyTorch's loss; 0, as of what is compiled: kernels that hold few bytes of it move few."""
    if stack.fused or stack.logit_bytes < CHUNKED[False] or stack.logit_bytes == KERNEL_LOSS:
        return 0.0
    return LOSS_LOW if stack.logit_bytes == LOW_LOSS else LOSS_APART


def _alone(cells: Cells, name: str, *, sharded: bool) -> bool:
    """Whether a row is a loop of its own on one device, or on replicas of whole weights."""
    return name == "eager" or (name == "torchtitan" and not (sharded or stage_said(cells)) and _loops(cells))


def _waits(cells: Cells) -> bool:
    """Whether JAX computes nothing while it sends: on GPUs, where XLA's latency-hiding scheduler was off by default.

    NVIDIA's own runs and MaxText's scripts turned it on before.
    """
    on_gpu = not re.search(rf"{TPU}|{TRAINIUM}", cells["gpu"].lower())
    return on_gpu and cells.year < (SCHEDULED if cells.has(r"nvidia|dgxc|maxtext") else SCHEDULES)


def _graphs_experts(cells: Cells, spec: ModelSpec, name: str) -> bool:
    """Whether a CUDA graph holds the steps of a mixture: Megatron-Bridge's on Blackwell, from June 2026 on.

    Its grouped products take their sizes on the device there; hybrids with Mamba have no such graphs, nor has what
    sends tokens all to all, whose counts the host must have.
    """
    late = name == "megatron-bridge" and cells.year >= OVERLAPPED_EXPERTS and not cells.noted(_EXCHANGES_ALL)
    return late and spec.kind == "moe" and not spec.scan_dim and re.search(r"b[23]00", cells["gpu"].lower()) is not None


def _lists_exchange(cells: Cells) -> bool:
    """Whether torchtitan's list of what per-operator recompute keeps has the exchange of tokens, whatever sends it.

    DeepEP's has been there from the start.
    """
    own = re.search("qwen", cells["model"].lower())  # whose list was one of its own
    return cells.year >= (ONE_LIST if own else EXCHANGED)


def is_fork(cells: Cells) -> bool:
    """Whether a row is of a code on Megatron-LM and DeepSpeed, whose engine steps."""
    return re.search(rf"bloom sizing|{_FORKS}", unsourced(cells.text)) is not None


def _by_others(cells: Cells) -> bool:
    """Whether a trainer or a fork of Megatron builds the model, within DeepSpeed's `zero.Init`."""
    return library(cells) or cells.has(rf"{LAYERS}|{_FORKS}|megatron|lightning|colossal")


def _loops(cells: Cells) -> bool:
    """Whether a row is a loop of its own, which spends nothing of a trainer's each step.

    What cuts models too is a trainer by another name, unless it is said to compile.
    """
    own = cells.compiled is True or not _divides(cells, "tp", "pp", "cp")
    return own and cells.year >= NONE and engine(cells) is None and not library(cells)


def _of_its_time(cells: Cells, stack: Stack) -> Stack:
    """What PyTorch and CUDA of the row's date make of memory."""
    trainer = cells.has(r"(hf|transformers|sft|hugging ?face) ?trainer")
    plain = not re.search(r"8-?bit|adafactor|fused|apex", cells["optimizer"].lower())
    plain = plain and not cells.noted(r"(?<!no )(?<!not )fused adam") and not re.search(GAUDI, cells["gpu"].lower())
    if (
        stack.name in TORCH
        and plain
        and cells.year >= NONE
        and (cells.year < FOREACH if trainer else not engine(cells) or cells.has(r"\bforeach\b"))
    ):
        stack = replace(stack, fused_optimizer=False)  # their AdamW goes over all parameters at once
        stack = replace(stack, steps_singly=bool(re.search(_OWN_STEPS, cells["optimizer"].lower())))
    if (stack.name == "fsdp1" and cells.has(LAYERS)) or (stack.name == "torchtitan" and cells.has(_MODELS_LOSS)):
        stack = replace(stack, logit_bytes=UNFUSED_LOSS)
    stack = replace(stack, wide_buckets=cells.has(_WIDE) or stack.wide_buckets)
    low = stack.name == "deepspeed" and cells.year < TWICE and re.search(_LOW_LOSS, cells["model"].lower())
    stated = cells.noted(r"logits in 16 bits")
    if low or stated:
        stack = replace(stack, logit_bytes=LOW_LOSS)
    looped = engine(cells) == "fsdp2" if library(cells) or cells.has(LAYERS) else engine(cells) is None
    if stack.name == "eager" and looped and not (trainer or stated):
        stack = replace(stack, logit_bytes=LOOP_LOSS)
    if stack.logit_bytes == UNFUSED_LOSS and TWICE <= cells.year < SHIFTED and cells.has(LAYERS):
        stack = replace(stack, logit_bytes=TWICE_LOSS)
    if stack.name == "megatron-flash" and cells.has(r"megatron"):
        stack = replace(stack, grad_bytes=4.0)
    if stack.name == "megatron-2021" and not (is_fork(cells) and cells.year < LAZY):
        stack = replace(stack, context=_preset("megatron-core").context if is_fork(cells) else 0.0)
    if stack.name == "megatron-2021" and cells.year >= NONE:
        stack = replace(stack, fragmentation=_preset("deepspeed").fragmentation, cached=0.0)
    if cells.year < LAZY:
        stack = replace(stack, context=max(stack.context, KERNELS))
    if stack.name == "fsdp1" and cells.year < LIMITED and not cells.noted(_HELD_BACK):
        stack = replace(stack, gathers_ahead=True)
    extends = cells.noted(r"expandable[_ ]segments") is not None
    if extends or not cells.noted(DEVICE + "|reserved"):
        stack = replace(stack, cached=0.0)
    elif stack.name in (*TORCH, "deepspeed") and cells.noted(VARIED) and not cells.noted(r"(?<!not )\bpacked"):
        stack = replace(stack, cached=HOLES, most_cached=inf)
    if stack.name in TORCH and stack.attention == "unfused" and not extends:
        stack = replace(stack, cached=max(stack.cached, SCORES))
    late = cells.year >= LAZY  # before, the context has all kernels anyway
    if late and stack.name in ("eager", "fsdp1", "deepspeed") and (library(cells) or cells.has(LAYERS)):
        stack = replace(stack, context=stack.context + LIBRARY)
    return replace(stack, zeroes_grads=(cells.year < NONE and stack.name in TORCH) or cells.noted(_NEVER) is not None)


_MODELS_LOSS = r"(hf|transformers|sft|hugging ?face) ?trainer|\btrl\b|axolotl|llama[- ]?factory|\b(ms-)?swift\b"
"""Words for trainers whose loss is that of transformers' models, whatever shards them."""
_CASTS_EACH = r"\bautocast\b"
"""Words for a loop of its own around Transformer Engine's layers, which cast weights in fp32 for each product."""
_OVERLAPS_PRODUCTS = r"(?<!no )(?<!without )\btp[ _-](comm[ _-])?overlap|megatron-lm readme"
"""Words for Megatron-Core's switch `--tp-comm-overlap`, with which its README of 2024 was measured."""
_WIDE_SOFTMAX = r"llama|mistral|mixtral|\byi\b|gemma"
"""Models whose attention in primitives has its softmax in fp32, as transformers has them."""
GROUPED = 2025.05
"""Year from which transformers leaves groups of heads to torch's attention (4.48), which has a kernel for them on
Ampere and later alone, and on others works in fp32."""
_KEPT_ATTENTION = (
    r"(all but|(keeps|saves|stores)|and|outputs? of)( the)? [\w' ,]*attention('s output)?"
    r"|\bcontext[ =:]+(device|offload)"
)
"""Words for recompute that keeps what attention gives."""
_UNDROPPED = r"attention without dropout|(no|without) attention dropout|attention dropout[ =:]*(of )?0(\.0*)?(?![.\d])"
"""Words for attention without dropout."""
_GELU_NEW = r"gpt-?2|gpt-?j\b|gpt-?neo(?!-?x)|codegen|\bphi-?[12]|mingpt"
"""Models whose GELU is its formula in primitives, as transformers and minGPT have them."""
NANOGPT = 2023.45
"""Year until which nanoGPT's is so too."""
_WIDE_MASKS = r"tensorflow|\bmxnet\b"
"""Words for frameworks whose dropout multiplies by a mask of numbers; TensorFlow's BERT has GELU's formula besides."""
_FLAT = r"\bfsdp-?1\b|full_shard|(?<!hybrid_)shard_grad_op"
"""Words for FSDP1 in runs that are as torchtitan's else."""
_LATE = r"gradients (are )?(all-?)?reduced[^;]* (behind|after) the backward pass"
"""Words for replicas whose gradients wait for the last of them."""
_NEVER = r"gradients (are )?never (set to zero|zeroed|dropped)|zero_grad\(set_to_none[ =]+false"
"""Words for gradients that stay between steps."""
NO_MASTER = r"(no|without) (fp32 )?(mixed[ -]precision )?master|(no|without) fp32 cop(y|ies)(?! of (?!(the )?weights))"
"""Words for weights in 16 bits that no copy in fp32 is of (Transformer Engine's FusedAdam, unless it is told to)."""
_MASKED = r"(logits|predictions|head|loss)( of| over| on)?( the)? masked (tokens|positions|words)( only| alone)?"
"""Words for BERT's head over what is masked alone."""
MASKED = 20 / 128
"""Share of the tokens that is (its `max_predictions_per_seq`: 20 of 128, 80 of 512)."""
_WIDE = r"fp32 buckets"
"""Words for data ranks that add gradients up in fp32 beside weights in 16 bits."""
_SLICED = (
    r"(?<!without )(?<!no )\bliger|fused ce\b|tiled (loss|logits)|chunked (ce|cross|loss)|cut cross|"
    r"loss (works |computed )?in (\d+ )?chunks"
)
"""Words for a loss that never holds all logits."""
_WHOLE = r"(?<!without )(?<!no )\bliger('s)? (ce\b|cross[ -]?entropy)"
"""Words for Liger's kernel for the loss alone, behind a head that gives all logits."""
_KERNELS = r"(?<!without )(?<!no )\bliger|fused ce\b|cut cross"
"""Those of libraries that have kernels for the rest of a block too."""
NONE = 2023.2
"""Year until which PyTorch's loops set gradients to zero, which keeps them, and not to None, and step one parameter
after the other (torch 2.0)."""
DEVICE = r"nvidia-smi|rocm-smi|amd-smi|nvml|gpustat|device[- ]level|rocm memory"
"""Words for what the driver shows."""
VARIED = (
    r"samples as they are|alpaca (as it is|of|samples)|(varying|variable|different|natural) (sequence )?lengths|"
    r"lengths vary|\b(not|un|without |no )[ -]?pack(ed|ing)\b|pad(ded|ding) to the longest|dynamic padding|"
    r"longest sample"
)
"""Words for micro-batches of other lengths each time."""
HOLES = 1.6
"""Share of what comes and goes that those leave in blocks of other sizes: see `Stack.cached`."""
SCORES = 0.1
"""The same where attention is in primitives, whose scores stand in several types: those blocks fit nothing else."""
LIBRARY = 0.5e9
"""Bytes of the device that the kernels of a Hugging Face trainer's libraries take beside PyTorch's own."""
_HELD_BACK = r"limit_all_gathers[ =]+true|rate limiter (on|enabled)|with (the )?(fsdp )?rate limiter"
LIMITED = 2023.7
"""Year until which FSDP1 gathers as far ahead as its host gets (torch 2.1 limits it unless told otherwise)."""
LAZY = 2022.75
"""Year until which CUDA loads every kernel of its libraries at the start (before 11.7)."""
KERNELS = 0.76e9
"""Bytes that they take, beyond a device's `context`: 1,343 MiB in all on a V100 (transformers' docs of 2022)."""
DIRECT = 2026.57
"""Year until which DeepSpeed has its own linear, which keeps no gathered weight, for models alone that are built within
its `zero.Init` (its pull request 8189)."""
STAGED = 2024.3
"""Year from which DeepSpeed's offloaded optimizer below zero 3 sends weights in fp32, which the device casts (its pull
request 5301, April 2024)."""
_OWN_LINEAR = r"mem(ory)?_efficient_linear[ =:]+(false|off)|(outside|before) [^;]{0,40}\bzero\.init\b"
"""Words for what turns it off, and for a trainer's model that is built too early for it."""
TUNED = 2024.58
"""Year from which torchtune's loss works in chunks (its pull request 1390); before, on all logits in fp32."""
_ONE_BUFFER = r"overlap_comm[ =:]+(off|false|no\b)|(no|without) overlap_comm"
"""Words for DeepSpeed without its second buffer below zero 3."""
_OWN_STEPS = r"of (its|their) own"
"""Words for an optimizer of a course or a loop, a `for` over parameters."""
_TORCH_XLA = r"(py)?torch[ _/-]?xla"
"""Words for PyTorch on XLA, whose FSDP waits for what it sends (PyTorch's blog on GPT-2 of up to 128 B on TPU v4)."""
_STATIC = r"\boneflow(?!-inc)|\blibai\b"
"""Words for OneFlow, which lays memory out before it runs, so that no holes arise, and nothing is kept for later."""
SCHEDULED, SCHEDULES = 2023.7, 2025.0
"""Years from which NVIDIA's and MaxText's JAX, and any, hides on GPUs what it sends: XLA's
`xla_gpu_enable_latency_hiding_scheduler`."""
GATHERS_AGAIN = 2024.6
"""Year from which nanotron's products with sequence parallelism gather their input again in the backward pass."""
_GRAPHED = (
    r"(?<!no )cuda graphs? of the (whole|entire|full) (step|iteration)"
    r"|(?<!no )\bfull[ -]((step|iteration)[ -])?(cuda[ -]?graphs?|cg)\b"
)
"""Words for a CUDA graph that holds a step."""
GRAPHED = 1e-6
"""Seconds from a kernel to the next in a CUDA graph, which the device starts by itself."""


def _chunks(cells: Cells) -> bool:
    """The recipes of litgpt and torchtune cut the logits; torchtune's not where a row tries what each of them saves."""
    stepwise = cells["activation_checkpoint"].lower() == "none" and not cells.noted(r"chunked")
    return cells.has(r"lit-?gpt") or (cells.has(r"torchtune") and not stepwise and cells.year >= TUNED)


@cache
def _preset(name: str) -> Stack:
    return load_stack(name)


def megatron_era(cells: Cells) -> str:
    """Which of the Megatron stacks: before flash attention, with it, or Megatron-Core with Transformer Engine."""
    core = "megatron-bridge" if cells.has(r"megatron-bridge|\bnemo\b|dgxc") else "megatron-core"
    if is_old(cells):
        return "megatron-2021"
    low = re.search(r"fp[48]|float8", cells["precision"].lower())  # of those, Transformer Engine alone multiplies so
    if cells.has(rf"bloom sizing|{_FORKS}") and not low:
        if cells.year >= CORE_SINCE and re.search(GAUDI, cells["gpu"].lower()):
            return core  # Habana's fork has its overlap, and the device sends beside what computes
        vendor = cells.year >= 2023.5 and re.search(r"mi[23]\d\d", cells["gpu"].lower())
        late = vendor or (cells.year >= 2023.5 and cells.has("neox"))  # which bring a fused attention
        return "megatron-flash" if late or names_flash(cells) else "megatron-2021"
    if (cells.year >= CORE_SINCE or low) and not _flash_sweep(cells):
        return core
    return "megatron-flash" if names_flash(cells) or _flash_sweep(cells) else "megatron-2021"


def _name(cells: Cells, *, sharded: bool, nodes: int) -> str:
    found = framework(cells)
    if found == "megatron" and cells.year < FUSED and graphs(cells) and not _divides(cells, "tp", "pp", "cp"):
        found = None  # whose data parallelism is its own
    if found == "library":
        found = "eager" if nodes == 1 else "fsdp2" if cells.has(_OF_LAYERS) else "deepspeed"
        cells.assume(f"stack {found}, as the row names a trainer only")
    if found in ("megatron", "deepspeed") and sharded and cells.year < MEGATRON_FSDP and cells.has("deepspeed"):
        return "deepspeed"  # whose engine shards parameters, whatever lays out the rest
    if found == "megatron" or (found == "deepspeed" and _divides(cells, "tp", "pp") and not cells.has(_OF_LAYERS)):
        return megatron_era(cells)
    if found == "fsdp2" and (cells.devices or 1) == 1:
        cells.assume("stack eager, as nothing is sharded on one device")
        return "eager"
    if found in ("fsdp", "fsdp2"):
        name = "torchtitan" if found == "fsdp2" else _torch_era(cells)
        cells.assume(f"stack {name}, by its date and layout")
        return name
    if found == "fsdp1" and cells.year >= 2025:
        return "torchtitan"
    if found == "eager" and nodes > 1:
        cells.assume(f"stack {_torch_era(cells)}, not compiled: eager's constants are those of one node")
        return _torch_era(cells)
    if found:
        return found
    known = degrees_of(cells)
    if (cells.devices or 1) == 1:
        name = "eager"
    elif sharded and not _divides(cells, "pp") or not (cells["zero_stage"] or cells["ep"] or any(known.values())):
        name = _torch_era(cells)  # PyTorch's FSDP and DDP
    elif cells["compile"]:
        name = _torch_era(cells)  # whoever says whether it was compiled has blocks of PyTorch
    elif not _divides(cells, "tp", "pp", "cp") and (cells.count("ep") or 1) == 1 and _of_torch(cells):
        name = "deepspeed" if _says(cells, rf"{ZERO}2\b") else _torch_era(cells)
    else:
        name = megatron_era(cells)
    cells.assume(f"stack {name}, by its date and layout")
    return name


_OF_LAYERS = r"\bauto-?tp\b|\btp_plan\b|\bdtensors?\b"
"""Words for `tp` that divides layers of PyTorch's models as they are: that of DeepSpeed, transformers and PyTorch."""
_GRAPHS = r"horovod|tensorflow|\bmxnet\b|\bkeras\b|\bchainer\b|paddle"
"""Other frameworks, whose replicas are reduced as DDP's are."""


def graphs(cells: Cells) -> bool:
    """Whether the row names another framework than PyTorch and JAX, outside the path of its source."""
    return re.search(_GRAPHS, unsourced(cells.text)) is not None


def _of_torch(cells: Cells) -> bool:
    """Whether a row without a framework says what Megatron does not have: DDP, or gradients in shards."""
    return stage_said(cells) == 2 or _says(cells, r"\bddp\b|distributed[ _]?data[ _]?parallel") or graphs(cells)


def _says(cells: Cells, pattern: str) -> bool:
    return re.search(pattern, f"{cells['zero_stage'].lower()} ; {cells.text}") is not None


def _torch_era(cells: Cells) -> str:
    return "torchtitan" if cells.year >= 2024.5 or _divides(cells, "tp", "cp") else "fsdp1"


def engine(cells: Cells) -> str | None:
    """The stack of the code that the row names; of Google's devices JAX; None: none that lays a job out."""
    text = _without_sources(cells)
    found = next((stack for pattern, stack in _RULES if re.search(pattern, text)), None)
    return "jax" if found is None and re.search(TPU, cells["gpu"].lower()) else found


_TRAINERS = r"hugging ?face('s)? (transformers )?(trainer|accelerate)|(hf|transformers) trainer|\baccelerate\b"
"""Those of Hugging Face, whose rows are often in repositories of other codes."""


def _without_sources(cells: Cells) -> str:
    """The row's words; where they name a trainer, without paths, whose names are no code that ran."""
    said = unsourced(cells.text)
    return said if re.search(rf"{_TRAINERS}|{LIBRARIES}", said) else cells.text


_OF_TRAINER = r"(hf|transformers|sft|hugging ?face('s)?( transformers)?) ?trainer|\btrl\b|axolotl|llama[- ]?factory"
"""Words for the Trainer of transformers and what is built on it."""
LOOKS = 2021.8
"""Year from which it asks after each micro-batch whether the loss is a number, for which the host waits for the device
(`logging_nan_inf_filter`, its pull request 13619; 7 % of a run's time by its issue 33693)."""


def _looks_at_loss(cells: Cells) -> bool:
    """Whether a micro-batch starts when the one before is done: on XLA and Habana that is left out."""
    lazy = re.search(rf"{GAUDI}|{TPU}", cells["gpu"].lower()) or cells.has(_TORCH_XLA)
    return not lazy and cells.year >= LOOKS and cells.has(_OF_TRAINER)


def library(cells: Cells) -> bool:
    """Whether the row names a trainer that leaves the layout to another code."""
    return cells.has(rf"{LIBRARIES}|hugging ?face")


def framework(cells: Cells) -> str | None:
    """The engine's stack; `library` where the row names a trainer only; None: no keyword."""
    found = engine(cells)
    if found or not library(cells):
        return found
    return "deepspeed" if stage_said(cells) and cells.has(ZERO) else "library"


def _divides(cells: Cells, *axes: str) -> bool:
    known = degrees_of(cells)
    return any((known[axis] or 1) > 1 for axis in axes)


def _flash_sweep(cells: Cells) -> bool:
    """A sweep that names its kernel is not Megatron-Core's own choice of kernels."""
    return cells.noted(r"kernel:") is not None and cells.year < 2024.5
