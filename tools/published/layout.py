"""The plan and the workload of a row: axes, batch, schedule, precision, recompute and offload from its cells."""

from __future__ import annotations

import re
from dataclasses import replace
from math import gcd

from published.adapters import INT8, adapters_of, adapts, trained_share
from published.cells import Cells, unsourced
from published.degrees import Sizes, batch_of, degrees_of, expert_degree, sizes_of, stage_of, stage_said
from published.offload import offload_of
from published.recompute import recompute_of
from published.stacks import CORE, NO_MASTER, TORCH, engine, framework, graphs, is_fork, library
from shardwise.hardware.cluster import Cluster, Rates
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Axes, Batch, Communication, Context, Float8, Plan, Schedule, Tensor
from shardwise.plan.stack import Stack
from shardwise.plan.workload import Workload

_SHARDING = {
    **dict.fromkeys(("torchtitan", "shardwise", "fsdp1", "deepspeed", "jax", "eager"), 3),
    **dict.fromkeys(CORE, 1),
}
"""zero where a row does not say, by stack; others 0."""


def zero_of(cells: Cells, stack: str, sizes: Sizes, room: float, trained: float = 1.0) -> int:
    """What data ranks shard: the cell, else the words of the row, else the stack's default.

    `room`: bytes of the device per parameter that a rank would hold, were nothing sharded.
    """
    stated, said = stage_of(cells), stage_said(cells)
    if stated is not None:
        return stated
    if sizes.data * sizes.cp == 1:
        return 0
    if sizes.shard > 1:
        return 2 if said == 2 else 3
    if said is not None:
        return said
    if room < 2 + 4 * trained:
        cells.assume("zero 3, as the weights and gradients of a rank are larger than the device")
        return 3
    if library(cells) and engine(cells) is None:
        zero = 3 if room < 2 + 14 * trained else 0
        cells.assume(f"zero {zero}, as a rank's weights and states {'do not ' if zero else ''}fit its device")
        return zero
    known = stack in CORE or (framework(cells) is not None and not (stack in ("eager", "fsdp1") and graphs(cells)))
    zero = _SHARDING.get(stack, 0) if known else 0
    cells.assume(f"zero {zero}, the stack's default")
    return zero


def inner_degree(cells: Cells, spec: ModelSpec) -> int:
    """Tensor parallelism inside experts: what the notes say; before 2025 Megatron-Core's was that of all layers."""
    if not spec.num_experts or expert_degree(cells) == 1:
        return 1
    noted = cells.noted(r"\betp ?=?(\d+)")
    if noted:
        return max(int(noted.group(1)), 1)
    return degrees_of(cells)["tp"] or 1 if cells.year < 2025.25 and cells.has(r"megatron|nemo|dgxc") else 1


def split_experts(cells: Cells, spec: ModelSpec) -> ModelSpec:
    """Experts that ranks share, as more and narrower ones: the same products, parameters and tokens sent."""
    inner = inner_degree(cells, spec)
    if inner == 1 or spec.ffn_dim % inner:
        return spec
    cells.assume(f"experts divided by {inner} ranks counted as {inner} times as many, as much narrower")
    chosen = spec.experts_per_token * inner
    return replace(spec, num_experts=spec.num_experts * inner, experts_per_token=chosen, ffn_dim=spec.ffn_dim // inner)


def axes_of(cells: Cells, sizes: Sizes, zero: int, ep: int) -> Axes:
    """The mesh. Under zero 1 and 2 the data ranks are all in `dp_shard`, which says what is sharded over them."""
    replicate, shard = sizes.replicate, sizes.shard
    if shard == 1 and (zero > 0 or ep > 1):
        replicate, shard = 1, replicate
    if ep > 1 and (shard * sizes.cp * sizes.tp) % ep:
        cells.assume(f"ep {ep} does not divide the ranks that it re-uses; taken as 1")
        ep = 1
    return Axes(pp=sizes.pp, dp_replicate=replicate, dp_shard=shard, cp=sizes.cp, tp=sizes.tp, ep=ep)


def _whole(spec: ModelSpec, sizes: Sizes, ep: int) -> float:
    """Parameters of a rank, were nothing sharded over data ranks."""
    experts = spec.num_moe_layers * spec.num_experts * spec.ffn_params
    return ((spec.num_params - experts) / sizes.tp + experts / max(ep, sizes.tp)) / sizes.pp


def seq_len_of(cells: Cells, spec: ModelSpec, stack: str) -> int:
    """Tokens of a sequence: the cell, the notes, or the default of stack and model."""
    stated = cells.count("seq_len")
    if stated:
        return stated
    noted = cells.noted(r"seq(?:uence)?(?:[ _-]?len(?:gth)?)?[ =:]+(\d{3,7})")
    usual = 8192 if engine(cells) == "torchtitan" else min(spec.max_seq_len, 8192)
    length = int(noted.group(1)) if noted else usual
    cells.assume(f"sequences of {length}")
    return length


_PURE = (
    r"bf16 params and optimizer|pure bf16|weights (are )?in (bf16|16 bits)|mixed[ _-]precision[ =:]+no\b|"
    rf"{NO_MASTER}"
)
"""How notes say that weights and states are in 16 bits."""


WIDE = 2026.0
"""Year from which TRL loads weights in fp32 where it is not told otherwise (its pull request 4778)."""


AUTO = 2026.0
"""Year from which transformers loads weights in the type of the checkpoint (5.0: its pull request 42805)."""
_TOLD = r"\btrl\b|llama[- ]?factory|from scratch|random|pre-?train"
"""Words for trainers that load or cast them to fp32 (`WIDE`), and for weights that no checkpoint has."""
_IN_FP32 = r"gpt-?2\b|bert|\bt5\b|\bvit\b"
"""Models that were published in fp32."""


def _as_loaded(cells: Cells) -> bool:
    """Whether a trainer's loop on whole weights trains them in the 16 bits in which it loads them.

    So does axolotl, in the type that it computes in, and since `AUTO` the Trainer of transformers.
    """
    late = cells.year >= AUTO and cells.has(r"(hf|transformers|hugging ?face) trainer") and not cells.has(_TOLD)
    return cells.has("axolotl") or (late and not re.search(_IN_FP32, cells["model"].lower()))


def precision_of(cells: Cells, stack: str, rates: Rates) -> tuple[str, str]:
    """(plan's precision, dtype of the products where it differs). `rates`: mixed is fp16 where bf16 has no unit."""
    text = cells["precision"].lower()
    half = "fp16" if stack == "megatron-2021" or rates.fp16 > rates.bf16 else "bf16"
    pure = "true" in text or "pure" in text or cells.noted(_PURE) is not None
    trainer = stack in ("eager", "deepspeed", "fsdp1", "torchtitan")
    wide = stack != "deepspeed" and cells.year >= WIDE and cells.has(r"\btrl\b")
    tunes = cells.has(r"torchtune|thunder") or (trainer and adapts(cells) and not wide)
    loaded = "bf16" in text and stack == "eager" and _as_loaded(cells)
    if (loaded or (tunes and re.search(r"bf16|fp16", text))) and "mixed" not in text:  # weights, frozen or not, states
        pure = True
    if not text and cells.noted(r"(?<!no )(?<!without )\b(mx)?fp8 (hybrid|training|mixed|recipe)|\b(with|in) fp8\b"):
        return "bf16", "fp8"
    if not text:
        cells.assume(half)
        return half, ""
    if "fp4" in text and stack in TORCH:
        cells.assume("products in fp4 counted as those of fp8, beside what PyTorch's own kernels take to quantize")
        return "bf16", "fp8"
    if "fp4" in text:
        return "bf16", "fp4"
    if re.search(r"fp8|float8|\be[45]m[32]\b", text):
        return ("bf16-pure" if cells.has(r"thunder") else "bf16"), "fp8"
    if re.search(INT8, text):
        cells.assume("products of 8-bit integers counted as those of fp8")
        return "bf16", "fp8"
    if "bf16" in text or "bfloat16" in text:
        return ("bf16-pure" if pure else "bf16"), ""
    if re.search(r"fp16|float16|half", text):
        return ("bf16-pure", "fp16") if pure and trainer else ("fp16", "")
    if "tf32" in text:
        return "fp32", "tf32"
    if re.search(r"(fp|float)32|single", text) and stack in CORE and rates.tf32 > rates.fp32:
        cells.assume("products of fp32 in tf32, as Transformer Engine's are")
        return "fp32", "tf32"
    if re.search(r"(fp|float)32|single", text):
        return "fp32", ""
    return half, ""  # `mixed`, `amp`, `16-mixed`


def optimizer_of(cells: Cells, spec: ModelSpec, stack: str, precision: str) -> str:
    """Name of the optimizer among those that `Workload` knows."""
    text = f"{cells['optimizer'].lower()} ; {cells.notes}"
    if re.search(r"8-?bit (adam|optim)|adam\w*[ -]8-?bit|8bit", text):
        return "adamw-8bit"
    for name in ("muon", "lion", "adafactor"):
        if name in cells["optimizer"].lower():
            return name
    if re.search(r"\bsgd\b", cells["optimizer"].lower()):
        return "sgd-momentum"
    if stack == "megatron-bridge" and spec.kv_rank and not cells["optimizer"]:
        cells.assume("moments of Adam in bf16, as in Megatron-Bridge's recipes of models with latent attention")
        return "adamw-bf16"
    return "adamw-bf16" if precision == "bf16-pure" or "bf16 states" in text else "adamw"


_EXCHANGES = r"\b(deep|hybrid)-?ep\b|(?<!no )(?<!without )expert[ -]parallel|(fsdp\d?|hsdp|tp|dp) ?\+ ?ep\b"
"""Says that ranks share the experts."""


_EVEN = r"balanc|forced|fake gate|mock data|even rout|capacity factor|tokens? dropp|drop and pad|cuda graphs? of the"
"""Words for tokens that ranks have as many of: a benchmark's router, tokens dropped beyond a number, a graph of sizes
that are known before it runs."""
UNEVEN = 1.4
"""Tokens of the busiest rank over the mean where routers choose: what is sent and multiplied follows it. Read off five
sources that print a real router or train a checkpoint, all too fast without it."""


def _imbalance(cells: Cells, stack: str, ep: int) -> float:
    """Of the ranks that share experts: benchmarks of Megatron-Core force balance, trainers and torchtitan do not."""
    trains = stack in (*TORCH, "deepspeed") or cells.has(r"\bswift\b|real router")
    if ep == 1 or not trains or cells.noted(_EVEN):
        return 1.0
    cells.assume(f"routers of their own: the busiest rank has {UNEVEN} times the mean of the tokens")
    return UNEVEN


_UNREDUCED = r"requires_gradient_sync|\bno_sync\b"
"""Words for `fully_shard` and DDP that reduce behind the last micro-batch alone: until then gradients are whole."""
_RESHARDS = r"reshard_after_forward[ =:]+true"
_ACCUMULATES = r"(hf|transformers|sft|hugging ?face) trainer|\baccelerate\b|\btrl\b|axolotl|llama[- ]?factory"
"""Words for Accelerate's loops, which reduce FSDP's gradients so too unless `sync_each_batch` is set."""
ACCUMULATES = 2023.4
"""Year from which the Trainer of transformers is one of those (4.30)."""
WHOLE_GRADIENTS = "zero 1 whose weights reshard: Accelerate's gradients stay whole until the last micro-batch"
"""Of a row of one of those."""


def _keeps_whole(cells: Cells, stack: Stack, trained: float) -> bool:
    """Whether Accelerate adds whole gradients up: none of adapters, which are small and whose weights are frozen."""
    by_trainer = stack.name in ("fsdp1", "torchtitan") and trained == 1 and cells.has(_ACCUMULATES)
    return by_trainer and cells.year >= ACCUMULATES and not cells.noted(r"sync_each_batch")


def _steadied(cells: Cells, stack: Stack, cluster: Cluster, sizes: Sizes, zero: int) -> int:
    """`zero` as it is from micro-batch to micro-batch, and that of optimizers which share out states at every stage."""
    if zero == 3 and sizes.pp > 1 and stack.name in ("torchtitan", "shardwise") and not cells.noted(_RESHARDS):
        cells.assume("zero 1: in a pipeline FSDP2 gathers once per step and reduces behind the last micro-batch")
        return 1
    if zero == 3 and sizes.pp > 1 and stage_of(cells) is None:
        cells.assume("zero 2: in a pipeline weights stay gathered from micro-batch to micro-batch")
        return 2
    if (
        not zero
        and is_fork(cells)
        and sizes.data > 1
        and precision_of(cells, stack.name, cluster.device.rates)[0] == "bf16"
    ):
        cells.assume("zero 1: DeepSpeed's optimizer of bf16 shares out its states whatever the stage is")
        return 1
    return zero


def plan_of(cells: Cells, spec: ModelSpec, cluster: Cluster, stack: Stack, seq_len: int) -> tuple[Plan, Workload]:
    """The layout and the work of a row.

    Raises:
        Skip: where the row does not say enough; ConfigError, PlanError: where what it says cannot be.
    """
    sizes = sizes_of(cells, cluster.per_node)
    ep = expert_degree(cells) * inner_degree(cells, spec) if spec.num_experts else 1
    if spec.num_experts and ep == 1 and not cells["ep"] and cells.has(_EXCHANGES):
        ep = gcd(spec.num_experts, sizes.data * sizes.cp * sizes.tp)
        cells.assume(f"ep {ep}, as the row names an exchange between experts and no degree")
    trained = trained_share(cells, spec)
    zero = zero_of(cells, stack.name, sizes, cluster.device.memory / _whole(spec, sizes, ep), trained)
    total, count = batch_of(cells, sizes, seq_len)
    late = zero == 3 and sizes.pp == 1 and count > 1
    whole = late and _keeps_whole(cells, stack, trained)
    late = whole or (late and cells.noted(_UNREDUCED) is not None)
    if whole:
        cells.assume(WHOLE_GRADIENTS)
    elif late:
        cells.assume("zero 1 whose weights reshard: gradients are reduced behind the last micro-batch alone")
    zero = _steadied(cells, stack, cluster, sizes, 1 if late else zero)
    axes = axes_of(cells, sizes, zero, ep)
    precision, compute = precision_of(cells, stack.name, cluster.device.rates)
    if compute in ("fp8", "fp4") and not getattr(cluster.device.rates, compute):
        cells.assume(f"products in 16 bits: the device has no {compute} unit")
        compute = ""
    work = Workload(
        seq_len=seq_len,
        global_batch=total,
        optimizer=optimizer_of(cells, spec, stack.name, precision),
        compute=compute,
        trained=trained,
        adapters=adapters_of(cells, spec, stack.name, 4.0 if precision == "fp32" else 2.0, sharded=zero == 3),
        imbalance=_imbalance(cells, stack.name, axes.ep),
    )
    plan = Plan(
        axes=axes,
        zero=zero,  # type: ignore[arg-type]
        batch=Batch(global_size=total, micro_batches=count),
        schedule=_schedule(cells, spec, stack.name, (sizes.pp, count)),
        precision=precision,  # type: ignore[arg-type]
        float8=_float8(cells, compute),
        recompute=recompute_of(cells, spec, stack, sizes.pp),
        offload=offload_of(cells, zero),
        communication=replace(
            _communication(
                cells, stack.name, precision, accumulates=zero == 3 and count > 1, ranks=sizes.data * sizes.cp
            ),
            **({"reshard_after_forward": True} if late else {}),  # what frees weights is as with zero 3
        ),
        tensor=Tensor(
            sequence=_sequence(cells, stack.name, sizes.tp),
            loss=sizes.tp > 1 and stack.name != "megatron-flash" and not cells.has(_WHOLE_LOGITS),
        ),
        context=_context(cells, sizes.cp),
        compile=cells.compiled is True,
    )
    return plan, work


def _context(cells: Cells, cp: int) -> Context:
    """How ranks of `cp` see the whole sequence: in a ring, unless notes say that they exchange it for heads."""
    said = unsourced(cells.notes) if cp > 1 else ""
    return Context(kind="ulysses") if re.search(r"\bulysses\b", said) else Context()


_WHOLE_LOGITS = r"logits (are )?gathered|gather(s|ed) (the |all )?logits"
"""Codes whose ranks of `tp` each have all logits: the head's output is gathered before the loss."""
PLAIN = "1F1B without interleaving"
"""Of a row that says nothing of it, run by a stack that has it, whose ranks would be idle for a third of the time."""
_PLAINLY = (
    r"(no|without|non).{0,3}interleav|\b(plain |simple )?1f1b\b(?! ?\(?interleav)|(?<!zero )(?<!zero-)\bbubbles?\b"
)
"""Words by which notes say so: who counts the bubble has not interleaved it away."""
IDLE = 1 / 3
"""Bubble over work: whoever has more interleaves the stages, where the stack can."""


def turns_of(spec: ModelSpec, pp: int) -> list[int]:
    """Stages per rank of which an interleaved schedule can be made: all as large, or but for embedding and head.

    >>> turns_of(preset("llama-405b"), 16)  # of 126 blocks
    [2, 4, 8]
    """
    layers = next((n for n in (spec.num_layers, spec.num_layers + 2) if n % pp == 0), 0)
    return [turns for turns in range(2, layers // pp + 1) if layers // pp % turns == 0]


def _schedule(cells: Cells, spec: ModelSpec, stack: str, flow: tuple[int, int]) -> Schedule:
    """`flow`: ranks of the pipeline, and micro-batches."""
    text, turns, (pp, count) = cells["pp_schedule"].lower(), cells.count("vp") or 1, flow
    if pp == 1:
        return Schedule()
    if not text and not cells["vp"]:
        noted = cells.noted(
            r"\bvpp? ?[=:]? ?(\d+)|virtual[ _-]pipeline\D{0,40}[ =:](\d+)"
            r"|(\d+) (?:virtual|model) (?:pipeline )?(?:stages|chunks)"
        )
        turns = int(next(n for n in noted.groups() if n)) if noted else 1
        text = (
            "interleaved"
            if cells.noted(r"(?<!no )(?<!non-)interleaved ?(1f1b|pipeline|schedule)|1f1b[ -]interleaved")
            else ""
        )
    if re.search(r"zb-?v|zbv|zero.?bubble.?v", text):
        return Schedule(kind="zero-bubble-v", stages_per_rank=2)
    if "dualpipe" in text:
        return Schedule(kind="dualpipe-v", stages_per_rank=2)
    if re.search(r"zero.?bubble|\bzb", text):
        return Schedule(kind="zero-bubble", stages_per_rank=max(turns, 1))
    if re.search(r"gpipe|\bafab\b|all[- ]forward[- ]all[- ]backward", text):
        return Schedule(kind="gpipe")
    if re.search(r"loop|bfs|breadth", text):
        return Schedule(kind="looped-bfs", stages_per_rank=max(turns, 2))
    if re.search(r"(?<!non-)interleav|\bvpp\b|virtual|depth[- ]first", text) and turns == 1:
        turns = next(iter(turns_of(spec, pp)), 2)
        cells.assume(f"{turns} stages per rank, the least that divide its layers")
    if turns > 1:
        return Schedule(kind="interleaved", stages_per_rank=turns)
    can = stack in (*CORE, "megatron-flash", "torchtitan") and not cells.noted(_PLAINLY)
    if not text and not cells["vp"] and can and (pp - 1) / count > IDLE:
        cells.assume(PLAIN)
    return Schedule(kind="1f1b")


_SEQUENCE = r"(?:\bsequence[ _-]?parallel(?:ism)?|\bsp\b)"
"""As notes name it."""


def _sequence(cells: Cells, stack: str, tp: int) -> bool:
    """Sequence parallelism: what the notes say, else the stack's default."""
    if tp == 1:
        return False
    if cells.noted(rf"{_SEQUENCE}( is| was)?[ :=]*(no|not|none|false|off|disabled|0)\b|\b(no|without|w/o) {_SEQUENCE}"):
        return False
    if cells.noted(rf"{_SEQUENCE}(?![ :=]*\d)"):  # with a number it is a degree, of what others call context
        return True
    default = stack in (*CORE, "nanotron", "torchtitan", "shardwise", "jax")
    cells.assume(f"sequence parallelism {'on' if default else 'off'}, the stack's default")
    return default


def _float8(cells: Cells, compute: str) -> Float8:
    if compute != "fp8":
        return Float8()
    text = cells["precision"].lower()
    gather = re.search(r"(fp8|float8) all-?gather", f"{text} ; {cells.notes}") is not None
    if "gw_hp" in text:
        return Float8(recipe="rowwise-hp")
    if "rowwise" in text or "mx" in text:
        return Float8(recipe="rowwise")
    return Float8(recipe="tensorwise", all_gather=gather)


_WIDE_SUMS = r"reduce_dtype[ =:]+(torch\.)?(fp32|float32)|grad(ient)?s? (are )?reduced in fp32"


def _communication(cells: Cells, stack: str, precision: str, *, accumulates: bool, ranks: int) -> Communication:
    """Gradients on the wire: in 16 bits where the stack reduces them so; what stays gathered between micro-batches."""
    if cells.noted(r"reshard[ _]after[ _]forward[ =:]+(false|no\b|never)|never reshards?\b|(no|without) reshard"):
        return Communication(reshard_after_forward=False)
    if accumulates and cells.has(r"lit-?gpt|lightning (ai|fabric)"):
        cells.assume("weights stay gathered between micro-batches, whose gradients Fabric does not reduce")
        return Communication(reshard_after_forward=False)
    if ranks > 1 and stack in TORCH and precision == "bf16-pure" and cells.noted(_WIDE_SUMS):
        return Communication(reduce_dtype="fp32")
    own_type = ranks > 1 and stack in TORCH and precision == "bf16-pure"  # in which PyTorch reduces a gradient
    if own_type or cells.noted(r"mode pure") or stack == "deepspeed":
        return Communication(reduce_dtype="fp16" if precision == "fp16" else "bf16")
    if stack == "megatron-2021" and precision == "fp16":
        return Communication(reduce_dtype="fp16")
    return Communication()
