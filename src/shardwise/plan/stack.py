"""`Stack`: what a software stack makes of a plan: its kernels, its copies of the parameters, its overlap.

A plan says where things are; two stacks give the same plan different memory and speed. Each field is physical, and
has one value per stack, never per model or per run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import inf
from typing import Any, Literal

from shardwise.errors import UsageError
from shardwise.findings import nearest
from shardwise.plan.plan import Plan
from shardwise.records import from_dict, hash_of

AttentionKernel = Literal["unfused", "fused-softmax", "triton", "flash1", "flash2", "flash3"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Kernels, copies and overlap of a training stack of an era."""

    name: str
    about: str = ""
    attention: AttentionKernel = "flash2"
    fused: bool = True
    """Element-wise chains run as one kernel (compiled, or hand-written)."""
    compiles: bool = False
    """They do so in the blocks of a plan with `compile`; those of others run operator by operator."""
    fused_norms: bool = False
    """Norms are one pass over memory each, though the rest is not fused."""
    fused_rope: bool = False
    """So are rotations."""
    cut: Literal["even", "balanced", "greedy"] = "balanced"
    """How it cuts a pipeline into stages; see `plan.ranks.division.cut`."""
    # memory: bytes per parameter
    master: bool = False
    """Weights live in the compute dtype beside an fp32 master copy (Megatron); False: fp32 weights, cast for use."""
    pure_master: bool = True
    """Where the plan's parameters are in bf16, the optimizer keeps an fp32 copy."""
    grad_bytes: float = 4.0
    """Bytes of a gradient that is accumulated."""
    spare_grads: bool = False
    """A gradient in the compute dtype lives beside the accumulated one."""
    placeholds_grads: bool = False
    """Products add their gradients up themselves, and give autograd an empty tensor of each weight's shape, one for all
    blocks, which stays (Transformer Engine's `get_dummy_wgrad`, from its pull request 1651 on)."""
    bucket_grads: bool = False
    """That gradient is in the buckets that data ranks reduce, and not there without them."""
    caches_low: float = 0.0
    """Bytes that fp8 products keep of each of their weights in that type, beside it: as it is, and transposed for what
    multiplies by no other (Transformer Engine, whose products have their own for every micro-batch of a step, where
    parameters are not in fp8 themselves: its pull request 244)."""
    splits_gate: bool = False
    """A gated activation is two kernels, though the rest is fused: the product keeps what the first gives, and experts
    that weigh inside what the second gives as well (Megatron-Core without its `bias_activation_fusion`)."""
    logit_bytes: float = 10.0
    """Bytes per token and vocabulary entry at the peak of the loss (logits, fp32 copy, gradient, ...)."""
    keeps_shards: bool = False
    """zero 1 and 2: weights are shards between steps, and gathered beside them within one (FSDP2); False: whole."""
    splits_experts: bool = True
    """Where `ep` is 1, `tp` divides the experts' weights; False: each rank has all of them, and works on its share of
    the tokens."""
    eager: bool = False
    """Every primitive is a kernel of its own and keeps its inputs, and the host's memory is the device's (CPUs): see
    `plan.eager.kernels`."""
    residual_bytes: float = 0.0
    """Bytes of an element of the residual stream; 0: the compute dtype. Where it is wider, and nothing is fused, each
    product casts what it is fed for itself (`torch.autocast`)."""
    gathers_wide: bool = False
    """Data ranks gather weights in fp32, without a mixed-precision policy, and autocast casts them for each product:
    the backward pass keeps those casts, which are no part of what is freed behind a block."""
    wide_softmax: bool = False
    """Attention in primitives has its softmax in fp32, and casts what that gives (transformers' LLaMA and its kin)."""
    wide_masks: bool = False
    """Dropout keeps its mask in numbers of what it drops, not in bytes (TensorFlow, MXNet)."""
    logit_share: float = 1.0
    """Share of the tokens of which the loss has logits (BERT's: the masked ones); what they take of memory."""
    drops_scores: bool = True
    """Attention in primitives has dropout, and keeps what that makes of its probabilities and the mask beside them;
    False: none, or of p = 0, which gives back what it is given."""
    gelu_apart: bool = False
    """GELU is its tanh formula in primitives, which keep four tensors (transformers' `gelu_new`), and not a kernel."""
    saves_gathered: bool = False
    """Under sequence parallelism a product keeps its gathered input for the backward pass, not its shard of it."""
    saves_low: bool = False
    """fp8 and fp4 products keep their inputs in that dtype, not in the activations'."""
    stops_early: bool = False
    """What is recomputed ends with the last tensor that a backward pass needs: a block's last product is not run again
    (PyTorch's checkpoints that are not reentrant, and XLA, to which it is dead code)."""
    keeps_attention: bool = False
    """A recomputed block keeps what attention gives, which does not run again (MaxText's `context: device`, or to the
    host `offload`)."""
    keeps_products: float = 1.0
    """Per-operator recompute keeps this share of the products' outputs, and recomputes the rest; 0.5: every second."""
    keeps_biased: float = 1.0
    """And this share of those that add a bias, which are an operator of their own (`addmm`)."""
    keeps_experts: bool = True
    """It keeps those of experts; False: grouped products are not in its list, and run again."""
    keeps_exchanged: bool = False
    """And what ranks send each other of experts' tokens, there and back: those operators are in its list."""
    zeroes_grads: bool = False
    """Gradients are set to zero between steps, not to None: they are there in every forward pass."""
    copies_grads: bool = False
    """Data ranks of whole parameters reduce buckets that are copies of the gradients (DDP)."""
    wide_buckets: bool = False
    """Those are in fp32, in which micro-batches add up, where the weights are in 16 bits too."""
    reduce_bucket: float = 0.0
    """Elements of each of the two flat buffers that gradients are reduced from below zero 3, and of the one of zero 3
    (DeepSpeed's `reduce_bucket_size` with `overlap_comm`); 0: as many as `hidden_size` squared, which is nothing."""
    widens_grads: bool = False
    """The update works on a copy of a rank's share of the gradients in fp32."""
    flattens_grads: bool = False
    """They are copied into one tensor in their own type before (DeepSpeed from zero 1 on)."""
    most_updated: float = inf
    """zero 3: so many parameters of a rank are updated at once (DeepSpeed's `sub_group_size`)."""
    fused_optimizer: bool = True
    """False: the update makes a temporary of all that it updates (PyTorch's `foreach`), as wide as a state."""
    casts_on_host: bool = False
    """Offloaded weights come back to the device in their own type, and not first in that of their master copy
    (DeepSpeed below zero 3, before its pull request 5301)."""
    steps_singly: bool = False
    """But of one parameter at a time (a loop over them)."""
    fragmentation: float = 0.05
    """Reserved by the caching allocator over allocated, as a share of what comes and goes within a step."""
    context: float = 0.0
    """Bytes of the device that its kernels and communicators take beside the allocator, over what any stack does (CUDA
    before 11.7 loaded every kernel of every library at start)."""
    grads_apart: bool = False
    """`fully_shard` reduces gradients on a stream of their own: what they leave there at the end of a step is not given
    to the activations of the next, until memory runs out."""
    cached: float = 0.0
    """Freed blocks that nothing else fits into, as a share of the most that comes and goes: the allocator gives them
    back before memory runs out, and shows them until then (without PyTorch's `expandable_segments`)."""
    most_cached: float = inf
    """Bytes of them at most: what comes and goes in equal sizes in every step needs no more blocks after a few."""
    gathers_ahead: bool = False
    """zero 3: nothing holds back the host, whose gathers of all blocks are on their way at once (FSDP1 before
    `limit_all_gathers`)."""
    most_gathered: float = inf
    """zero 3: so many parameters of blocks are gathered at most, or a product and the next where these have more, by
    what gathers each product for itself: XLA, and DeepSpeed, which keeps what is used again within 1e9 parameters (its
    `max_reuse_distance`, half on the way to the loss and half on the way back); inf: whole blocks."""
    keeps_gathered: bool = False
    """zero 3: autograd keeps what a forward pass gathers until the backward pass has used it, unless the block is
    computed again: PyTorch's linear saves a view of its weight (DeepSpeed without its `memory_efficient_linear`)."""
    one_root: bool = False
    """zero 3: what is outside of blocks is gathered together, in the flat parameter of FSDP1's root."""
    offloads_weights: bool = True
    """Offloaded states include the shards of the weights; False: those stay on the device."""
    offloads_grads: bool = True
    """And the gradients; False: those add up on the device, and are copied for the step."""
    adds_on_host: bool = False
    """Of offloaded states gradients add up on the host: see `costs.hosts.moved_bytes`."""
    runs_ahead: float = 0.0
    """Whole activations `[tokens, dim]` that the allocator keeps for streams that have not caught up with the host,
    where collectives run on a stream of their own: see `stalls.held_ahead`."""
    # time
    launch: float = 5e-6
    """Seconds of the host per kernel; a block cannot run faster than its kernels are launched."""
    launches_hide: bool = True
    """Collectives of the tp axis run while a host that is slower than its device launches what follows; False: it
    launches nothing meanwhile, and both add up."""
    block_host: float = 0.0
    """Seconds of the host per block and forward pass outside launches: the interpreter, hooks, autograd's records."""
    backward_host: float = 0.5
    """Of that, what the backward pass takes."""
    softmax_host: float = 0.0
    """The same for a block whose softmax falls back to primitives: see `kernels.attention_kernel`."""
    tensor_host: float = 0.0
    """The same for a block that `tp` splits by DTensor, where it is not compiled: each operator's shardings are worked
    out in Python (0.34 ms per product: PyTorch's pull request 107305)."""
    shard_host: float = 0.0
    """The same for a block that `fully_shard` holds (zero 1 to 3, and mixed precision): a copy, a cast and a hook per
    parameter; in the backward pass, which reduces too, 1.2 times as long."""
    expert_host: float = 0.0
    """The same for each expert of a rank, where each has kernels of its own."""
    route_host: float = 0.0
    """The same for a block's routing of tokens to experts: sorting, counts."""
    waits_for_counts: bool = False
    """The host needs those counts: what it launches behind them waits for the device to get there."""
    picks_back: float = 1.6
    """Where nothing is fused: the backward pass of picking experts' tokens by index, over the forward's: PyTorch adds
    the gradients of picked rows up by sorting their indices, at a tenth of what memory gives."""
    loss_bytes: float = 0.0
    """Bytes that the loss reads and writes per logit, forward and backward; 0: 1.4 times `logit_bytes`."""
    micro_host: float = 0.0
    """Seconds per micro-batch outside the blocks: fetching, scheduling, synchronising with the host."""
    scans: bool = False
    """Micro-batches are a loop inside one compiled program (JAX's `lax.scan`), which the host starts once per step;
    those of a pipeline are not."""
    fill_host: float = 0.0
    """The same of a micro-batch on each rank that a pipeline fills before its last."""
    unpadded: bool = False
    """Sizes that are no multiples of 8 (a vocabulary of 50,257) stay as they are: see `kernels.unaligned_share`."""
    efficiency: float = 1.0
    """Matrix products against the device's curve: library, layouts, tile choice of the era."""
    overlap_data: float = 0.9
    """Share of the gradient reduction and parameter gathering that can hide behind compute."""
    overlap_tensor: float = 0.0
    """Share of tensor-parallel communication that hides behind its product."""
    overlap_expert: float = 0.0
    weighs_inside: bool = False
    """Experts weigh their inner layer by the router's shares, so that nothing keeps what they give."""
    weighs_wide: bool = False
    """What experts give is weighed in fp32, by operators of their own that keep it so: torchtitan compiles what is
    around the sending of tokens to experts, and not that (its issue 1940)."""
    once_per_node: bool = False
    """A token crosses once to each node that has experts of its choice, and is handed on there (DeepEP:
    arXiv:2412.19437, section 3.2.2); else once per choice."""
    once_per_rank: bool = False
    """And once to a rank, whatever it chooses of that rank's experts (DeepEP's kernels inside a node)."""
    expert_parts: int = 1
    """Neighbouring ranks over which each expert is divided, where its parts are counted as experts."""
    expert_tile: int = 0
    """Rows of a tile of experts' products, where tiles are laid over the rows of all: the one with a boundary in it is
    computed for each of both experts (megablox on TPUs: MaxText's `wi_tile_fwd_batch_seq`)."""
    capacity: float = 0.0
    """Tokens that an expert takes of a sequence, over an even share, where they go to it and come back by products with
    masks (MaxText's `capacity_factor` without megablox); 0: they are sorted, or picked by index."""
    splits_sends: bool = False
    """Ranks of `tp` each send a share of what goes to the next stage, which gathers it (arXiv:2104.04473, section 4.1);
    else each sends it whole, where sequences are not sharded."""
    overlap_pipeline: float = 0.5
    """Share of the sends between stages that hides, beyond the first and last micro-batch."""
    reduces_whole: bool = False
    """zero 1 and 2: each rank is sent the sum of all gradients, and keeps its share (DeepSpeed's
    `use_multi_rank_bucket_allreduce`, its default); False: of its share alone."""
    reduce_bytes: float = 0.0
    """Bytes of a gradient on the wire, where the plan names no type; 0: the compute dtype."""
    bucket: float = 0.0
    """Parameters that go in one message below zero 3, per data rank and for at least 40 of them (Megatron-Core's rule:
    40 million, or a million per rank); 0: a message per block, as `fully_shard` sends."""
    network: float = 1.0
    """Share of the fast links' bandwidth that its collectives reach while kernels run: see `links.collective_time`."""
    step: float = 0.01
    """Seconds per step outside the model: data, logging, clipping's synchronisation."""
    offloads_blocks: float = 1.0
    """Share of the blocks whose saved tensors move where a plan offloads them (Megatron's
    `cpu_offloading_num_layers`)."""
    copies_alone: bool = False
    """Nothing computes while they move (`torch.autograd.graph.save_on_cpu`); else as `overlap_data` of it."""
    stall: float = 0.0
    """Seconds that an exchange between nodes stalls once a job is large: see `stalls.stalled`."""
    retry: float = 0.0
    """Seconds per micro-batch in which its allocator gives blocks back and takes others, on a device that live tensors
    nearly fill (`timing.CROWDED`)."""
    tensor_wait: float = 0.0
    """Seconds per block, tp rank and micro-batch that the host loses in a pipeline whose receives wait for the device:
    its queue is empty, so that each collective starts behind the slowest of the ranks' hosts."""
    gather_copies: float = 0.0
    """Bytes per parameter and step that `fully_shard` moves on a device that shares no shards: casts, copies into and
    out of buffers, and those that take the place of its collectives."""
    cast_copies: float = 0.0
    """The same per micro-batch where one process, or autocast on any, casts its weights, and their gradients back."""
    scales_grads: bool = False
    """Clipping multiplies gradients in a pass of its own."""
    adds_bytes: float = 0.0
    """Bytes per weight and micro-batch that adding its gradient to the accumulated one moves, where the product that
    makes it does not: 2 read, 4 read and 4 written for 16 bits into fp32."""
    reduces_late: float = 0.0
    """zero 1 and 2: gradients are reduced behind the last backward pass, and nothing hides them: how many times as long
    as elsewhere that takes; 0: as they are ready, which overlaps."""
    gather_wait: float = 0.0
    """zero 3: seconds per block and direction that a gather cannot hide (stream synchronisation, copies)."""

    def __hash__(self) -> int:
        return hash_of(self)

    def starts(self, count: int, stages: int = 0) -> int:
        """How often the host starts a micro-batch in a step. `stages`: of a rank of a pipeline; 0: without one.

        >>> load_stack("eager").starts(8), load_stack("jax").starts(8), load_stack("jax").starts(8, 2)
        (8, 1, 16)
        """
        return count * stages or (1 if self.scans else count)

    @property
    def hides_copies(self) -> float:
        """Share of a pass behind which saved tensors move to the host and back."""
        return 0.0 if self.copies_alone else self.overlap_data


def stacks() -> list[str]:
    """Names that `load_stack` knows."""
    return list(_table())


def load_stack(name: str) -> Stack:
    """A stack by name.

    Raises:
        UsageError: an unknown name, with the nearest.

    >>> load_stack("shardwise").attention
    'flash2'
    """
    if name not in _table():
        raise UsageError(f"stack {name!r}: unknown; {nearest(name, stacks())}")
    return from_dict(Stack, {"name": name, **_table()[name]})


def stack_of(plan: Plan, stack: Stack | None = None) -> Stack:
    """What a stack does under a plan; None: Shardwise's own.

    >>> stack_of(Plan.parse("bf16")).fused, stack_of(Plan.parse("bf16 / compile")).fused
    (False, True)
    """
    stack = stack or load_stack("shardwise")
    return _uncompiled(stack) if stack.compiles and not plan.compile else stack


@cache
def _uncompiled(stack: Stack) -> Stack:
    return replace(stack, fused=False)


def stack_on(device: str | None) -> Stack:
    """Shardwise's own stack on a device: of a CPU (`cpu`, or a cluster's device of such a name), or of any other.

    >>> stack_on("cpu").name, stack_on("cuda").name
    ('shardwise-cpu', 'shardwise')
    """
    return load_stack("shardwise-cpu" if (device or "").startswith("cpu") else "shardwise")


@cache
def _table() -> Mapping[str, dict[str, Any]]:
    return tomllib.loads(files("shardwise.plan").joinpath("stacks.toml").read_text(encoding="utf-8"))
