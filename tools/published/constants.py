"""Tables of every constant that a prediction rests on, read from where they stand."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from importlib.resources import files
from typing import Any

from shardwise.plan.stack import Stack, load_stack, stacks

ESTIMATORS = (
    "ranks/activations", "time_terms/blocktime", "frozen", "costs/hosts", "costs/kernels", "costs/links", "memory",
    "schedule", "time_terms/simulate", "ranks/stages", "timing", "updating", "workload",
)  # fmt: skip
"""Modules of `shardwise.plan` whose numbers the page shows."""


def tables() -> str:
    """Devices, links, stacks and the estimators' own numbers, as Markdown."""
    data = tomllib.loads(files("shardwise.hardware").joinpath("devices.toml").read_text(encoding="utf-8"))
    links = data.pop("link")
    parts = [
        "### Devices",
        "Nominal rates (dense), memory and bandwidth are the vendors'. `best`, `depth`, `low` (fp8, fp4), `stream` "
        "and the shares of the attention kernels were fitted to the measurements for a100, h100, h100-96g, b200, "
        "gb200, gb300 and mi300x, one value per device; h200 computes as h100 does, b300 as gb300, being the "
        "same silicon; gh200 at 0.77 of it, as four superchips of 680 W on a board are seen to; a100-64g is "
        "Leonardo's A100 with 124 of its multiprocessors, and rates to match; h100-64g MareNostrum 5's H100, with four "
        "of the five stacks of HBM2e that the PCIe card has; mi350x is mi355x with 1,000 W for "
        "1,400, so at its clocks by the root of that; trainium's is read off AWS's pages; mi325x has fp8 "
        "at the share that mi300x has; v100, mi250x, and what mi350x and mi355x reach in 8 bits, are read off rows of "
        "`elsewhere.csv`, mi250x and mi350x off one source each; t4 and l4 do not hold their nominal clocks at 70 "
        "W, and GeForce boards since Ada run above theirs; fused attention on these is by benchmarks of kernels (RTX "
        "4090: apache/tvm's `tl_doc/flash_perf.md`; RTX 5090), as products have half of the units' rate there. Of the "
        "others they are estimates, after the nearest of these. `units` are its multiprocessors. What a process has of "
        "a device before its first tensor is by 34 runs of one script on 14 devices, which nvidia-smi shows apart by "
        "0.6 GiB. FlashAttention 2 on Ampere rises with the length up to 16,000 tokens (arXiv:2307.08691, figures 4 to "
        "6; runs of 2,000 to 717,000 tokens): "
        "`rise` is the keys at which it reaches half of its share. The kernels in Triton that FSDP1's jobs ran in 2023 "
        "do not: llm-foundry's runs of 2,048 to 65,536 tokens. Of products in 16 "
        "bits with rows of no multiple of 8 Hopper keeps 0.36 (measured on an H200), Ampere's A100, A800 and A30 0.77 "
        "(vTrain's head: 25 % of the rate with an odd vocabulary, 65 % with half of it), with odd ones half of that.",
        _devices(data),
        "### Links",
        "Bandwidth that a long message reaches, per device and one way, and the latency of a step of a collective. "
        "nvlink3 to 5 and efa are fitted; InfiniBand is what its adapters carry; the others are estimates. Each "
        "message pays its latencies, so efa's is near what NCCL's tuner and its plugin say (164 µs). The latency "
        "of nvlink3 was fitted to two stacks apart: 26 µs by vTrain and BLOOM, 20 µs by the study of Aleph Alpha. It "
        "holds what ranks wait for each other. In rings through several nodes a device's own copying (`network` of a "
        "stack) goes on beside the sending, and times per byte combine by a power (`BESIDE` below).",
        table(
            ("link", "GB/s", "µs"),
            [(k, f"{v['bandwidth'] / 1e9:g}", f"{v['latency'] * 1e6:g}") for k, v in links.items()],
        ),
        "### Stacks",
        "What a software stack of an era makes of a plan. Kernels and copies are those that its code has; shares of "
        "overlap, efficiencies and host costs were fitted, one value per stack; `shardwise` has torchtitan's, whose "
        "engine is the same, and `shardwise-cpu` what `make bench` measured on two cores. `fragmentation` and "
        "`context` of the Megatron stacks before 2024, and the logits of megatron-flash, follow which runs ran out of "
        "memory and what nvidia-smi showed; nanotron's `tensor_wait`, `runs_ahead` and `stall` are read off one "
        "sweep's times per micro-batch and reserved bytes, where they are the same for both of its models, whatever "
        "the stages; so is its `launches_hide`: its small blocks take the time of their launches and of their "
        "collectives together, those of the Megatron stacks the longer of both. `loss_bytes` of megatron-2021 are the "
        "passes of its cross entropy over the logits, counted one by one (a free fit gives 48). Its fused softmax "
        "takes four heads at a time: where a micro-batch has another number of them on a rank, primitives do it, whose "
        "`softmax_host` is read off the 24 such rows of one sweep (-30 % without it, where 842 others are at 0).",
        "`eager` was measured on one node: over several, torchtune and litgpt take torchtitan's numbers, or fsdp1's "
        "before July 2024, uncompiled, and trainers that name no engine take deepspeed's.",
        "The Trainer of transformers, and what is built on it, asks after each micro-batch whether its loss is a "
        "number, for which the host waits (`logging_nan_inf_filter`, since October 2021; not on XLA, nor on Habana): "
        "its `micro_host` is that of deepspeed, whose loop is the same (six sources nearer, none farther).",
        "`overlap_tensor` of Megatron-Core is between the quarter and the half of what `tp` sends that its backward "
        "pass hides by default (with and without sequences sharded), read off eleven sources; with the switch for more "
        "it is that of Megatron-Bridge's recipes, which set it. "
        "`fragmentation` and `cached` of Megatron-Core are what five runs on 64 to 592 B200 have reserved over what "
        "they allocated (1.03 to 1.05), and its `context` what nvidia-smi shows beside that in three sources. "
        "`torchtitan` holds the gradients on the stream that reduces them (`grads_apart`), as measured of the same "
        "engine; seven runs of torchao and eleven of torchtitan are nearer with it, by 8 to 2 and 12 to 7 %. "
        "The logits of `eager` and `deepspeed` are counted, as the loss of `transformers` is written: in fp32 the "
        "log-softmax, its gradient, and that of what it was made from, which the backward pass has at once (measured "
        "as 12.1 and 12.4 bytes by how peaks of two sources grow with tokens); 14 in a loop of its own, whose "
        "variable holds the logits in 16 bits too, as the caller of `transformers`' loss does from 4.46 to 4.48. One "
        "kernel for it has 8; unsloth's own 4, and from late 2024 it never holds all of them (0.5). So are "
        "`copies_grads` (the buckets of "
        "PyTorch's DDP are copies of the gradients) and `deepspeed`'s gradients, which are in 16 bits until a rank's "
        "share of them is copied to fp32 for the update (`widens_grads`): its code in `stage_1_and_2.py` and "
        "`stage3.py`, which flattens them before (`flattens_grads`), with zero 3 for 1e9 parameters at a time "
        "(`most_updated`, its `sub_group_size`). Megatron-LM of 2021 copies those of fp16 runs so too (`optimizer.py`, "
        "freed by the next step's `zero_grad`), and half of its holes are whole blocks (`cached`), which runs on V100 "
        "needed back.",
        "`torchtitan`'s recompute by operator keeps every second product and none of experts, as its list says, and "
        "runs the others again; its `tensor_host` is what blocks of DTensors took on a CPU beyond plain ones (torch "
        "2.13: 3.5 ms forward, 5.1 with sequences sharded; backward 1.8 and 3.3); `block_host` of `eager` and "
        "`deepspeed`, whose blocks are those of `transformers`, is "
        "read off steps of few tokens (Qwen-1.8B to 14B on an A100, BERT-large on a V100; "
        "`tools/published/elsewhere.csv`).",
        "A row's date changes these (`tools/published/attention.py`, `stacks.py`). Before October 2022 no stack "
        "has flash attention, before March 2023 (torch 2.0) loops of plain PyTorch have no fused kernel at all, before "
        "December 2023 the models of `transformers` have none unless a row names it "
        "(its version 4.36), before July 2024 those on Transformer Engine have no kernels for Hopper, "
        "and FSDP1's jobs run kernels in Triton. From 2026 torch's attention "
        "runs cuDNN's kernels. Before June 2026 attention with learned sinks "
        "runs at the rate of FlashAttention 2, and from then on half of Megatron-Bridge's exchange of tokens between "
        "experts is hidden: both are read off the rows of its releases before and after. Of memory: before October "
        "2022 (CUDA 11.7) the context holds all kernels of its libraries, 0.76 GB beyond a device's own (1,343 MB on "
        "a V100, by the docs of `transformers`); before March 2023 (torch 2.0) PyTorch's loops keep gradients of zero "
        "between steps, and from then on their AdamW makes a temporary of all parameters, in Hugging Face's Trainer "
        "until July 2025 (`adamw_torch_fused`); before August 2024 nanotron keeps what it gathers (its pull requests "
        "203 and 208). The gradients of rows of 2022 to 2023 that name Megatron are in fp32, and the memory beside "
        "the tensors of megatron-2021 is that of DeepSpeed's forks alone: from October 2022 on that of Megatron-Core, "
        "whose groups they have, and from torch 2.0 on the holes of other stacks (26 runs of Sailor, of 2025: median "
        "24 to 11 %). Loops of their own around Transformer Engine's layers, under autocast, have weights in fp32 and "
        "a loop's loss. Whole weights in fp32 under autocast have "
        "norms, softmax and the residual stream in fp32 (`torch.amp`'s list of operators; Paddle's recipes "
        "list them as of 16 bits). Before September 2023 "
        "FSDP1 gathers as far ahead as its host gets, which is all blocks (torch 2.1 holds back by default).",
        "What PyTorch runs on Gaudi is compiled (its bridge makes graphs), and Gaudi's fork of Megatron-DeepSpeed is "
        "megatron-core. PyTorch's fp4 counts as fp8, its gradients of weights in bf16 are reduced in bf16, and a full "
        "CUDA graph holds the step. A row that says whether it compiled and names no framework ran PyTorch's own. "
        "DeepSpeed's engine, where a row names it, sharded parameters until Megatron-Core did so itself (mid-2024); "
        "before 2022 it gathered each tensor by itself, which `network` of 0.12 stands for: 1.7 times as slow on eight "
        "p4d, by its pull request 1453. TFLOP/s and MFU are counted as a stack's code of the date does: with the half "
        "of attention that is masked until early 2025 in Megatron-Core, September in NeMo and Megatron-Bridge, July "
        "in MaxText (its pull request 1988), January 2026 in verl (4959). Trainers on JAX accumulate no gradients "
        "unless a row says so; Transformer Engine multiplies fp32 in tf32. Where a loop of its own is compiled, its "
        "loss is too: 8 bytes per logit. `step` of jax errs least over eleven sources, each of the same weight. "
        "`picks_back` of PyTorch's stacks is read off four sources of experts that are not compiled; `overlap_data` of "
        "megatron-2021 is what its code does: it reduces when the backward pass is over.",
        "`cached` and `most_cached`: freed blocks that fit nothing else, which reserved memory and what nvidia-smi "
        "shows include until memory runs out; read off runs of Megatron-Core (7 to 17 GiB beyond what is counted, "
        "here and in `elsewhere.csv`) and of DeepSpeed. Tensors below 10 MiB leave none, as PyTorch's allocator cuts "
        "them out of segments that others use too (`kMinLargeAlloc`; of a model of 350 M on V100 DeepSpeed shows 1.2 "
        "to 1.4 GiB less than with them). DeepSpeed's flat copies of gradients for the update take the place of freed "
        "logits, or of what a feed-forward makes, where that was as large (two sources of long sequences). Where a row "
        "says that its samples are neither packed nor of "
        "one length, 1.6 times what comes and goes (two sources); none with `expandable_segments`, and where the row "
        "does not say that its number is reserved or the device's. Where attention is in primitives, PyTorch's loops "
        "and trainers keep a tenth of what comes and goes: scores in several types, whose blocks fit nothing else "
        "(eight of ten sources are nearer with it). The libraries of Hugging Face's trainers take 0.5 GB of a device "
        "beside PyTorch's own kernels (nvidia-smi, nine sources: 0.3 to 1.7 GiB more than was counted). "
        "`placeholds_grads`: from its version 2.3 of mid-2025 Transformer Engine, which adds gradients of weights up "
        "by itself, keeps one empty gradient per shape of weight for autograd (its `get_dummy_wgrad`), 2 bytes per "
        "parameter of a block. "
        "Offloaded, Megatron leaves weights and summed "
        "gradients on the device.",
        "At the loss no block is computed again yet, so its memory is not beside the logits; what such a block took "
        "in the forward pass is free, but in other sizes than the loss asks for, and reserved until memory runs out. A "
        "peak whose kind no word says is the device's where PyTorch's loops or trainers ran. A loop of its own that is "
        "compiled leaves no holes (so an H200 was measured, docs/benchmarks.md). Where MaxText's row on a TPU of "
        "mid-2024 or later does not say what is recomputed, and all of it would not fit, what blocks are given waits "
        "on the host, as its configurations have it. XLA lays memory out before it runs, so that no holes arise; on a "
        "TPU it fuses what goes into a product, and holds logits once, in 16 bits (recipes of four sources would not "
        "fit with more). An AdamW that a row calls one with `foreach` makes its temporary whatever shards the weights, "
        "as FSDP1's flat ones are. `most_gathered`: what XLA and DeepSpeed gather are products, not "
        "blocks. `keeps_gathered`: until July 2026 autograd keeps all that DeepSpeed's zero 3 gathers for blocks that "
        "are not computed again, where the model is built outside its `zero.Init` (its pull request 8189), as loops of "
        "their own do, or its own linear is turned off. `keeps_exchanged`: torchtitan's per-operator recompute keeps "
        "what ranks send each other of experts' tokens (its pull request 1672 of September 2025; of Qwen3 from "
        "February 2026 on, 2357; what DeepEP sends from the start). `keeps_biased`: products with a bias are an "
        "operator of their own, of which that list has none before 2357, and then each. A loss in chunks fuses nothing "
        "else where a row is not compiled, and Liger's cross entropy alone leaves the logits whole. `keeps_attention`: "
        "of rows of JAX that say so. `mlp` among Megatron's recomputed modules is none of a mixture's layers but the "
        "few dense ones. JAX below 0.8 on a TPU has the attention of before 2026. GELU of GPT-2, GPT-J, CodeGen and "
        "Phi in `transformers`, and of minGPT, is its formula in primitives.",
        "Where a row does not say it, LLaMA-Factory, ms-swift, XTuner, and since August 2025 TRL and verl recompute "
        "every block; since July 2026 TRL's supervised fine-tuning computes its loss in chunks of 256 tokens (its pull "
        "request 5846); axolotl, and since transformers 5 its Trainer, train whole weights in the 16 bits in which "
        "they load them.",
        "Adapters (LoRA): a frozen product keeps nothing of its input; each adapter keeps a copy of its own, 3 "
        "bytes per element in 16 bits, with the mask of its dropout; without dropout (torchtune, LLaMA-Factory, "
        "unsloth, Megatron) it shares the input, but from June 2024 PEFT casts it for each (its version 0.12). They "
        "sit on queries and values where a row says nothing else (on every projection in axolotl, LLaMA-Factory, "
        "unsloth, ms-swift, xtuner). litgpt has one adapter for queries, keys and values, a head apart from the "
        "embedding, and keeps the log-softmax of every chunk of the loss.",
        "Frozen weights below adapters (QLoRA) are packed where a row says so: `PACKED` below has their bytes and what "
        "making one whole moves, for each pass and again where blocks are recomputed. Tables, norms and the head are "
        "not; PEFT's `prepare_model_for_kbit_training` casts them to fp32, and the residual stream with them (TRL, "
        "axolotl, Hugging Face's Trainer; not under FSDP). `load_in_4bit` packs no scales, QLoRA's recipes, torchtune "
        "and unsloth do. Products of bitsandbytes kept their inputs until its version 0.43.2 (July 2024; litgpt stays "
        "with 0.42), LLM.int8's still do, with a copy in 8 bits. PyTorch's own operators take GPTQ's weights apart "
        "(auto-gptq), and autograd keeps the whole ones; Triton's kernels do not.",
        "From January 2026 TRL loads weights in fp32 where a row of adapters does not say otherwise (its pull "
        "request 4778): frozen weights under autocast are fp32, and their casts are there until the backward pass "
        "has used them. Of the models of `transformers`, BLOOM, MPT, CodeGen, GPT-J and GPT-Neo have no fused "
        "attention at any date unless a row names one.",
        _stacks(),
        "### In the formulas",
        "Numbers that hold for every device and stack.",
        table(("where", "name", "value", "what it is"), formula_constants(ESTIMATORS)),
        "Numbers that act only where a stack has `stall` or `runs_ahead`, as nanotron has; read off one sweep. The "
        "first three are a threshold: jobs near it are the worst rows above.",
        table(("where", "name", "value", "what it is"), formula_constants(("time_terms/stalls",))),
    ]
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])


def _devices(data: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, entry in data.items():
        rates, curve, attention = entry["rates"], entry.get("curve", {}), entry.get("attention", {})
        rows.append(
            (
                name,
                f"{entry['memory'] / 1e9:g}",
                f"{entry['bandwidth'] / 1e12:g}",
                " / ".join(f"{rates.get(dtype, 0) / 1e12:g}" for dtype in ("bf16", "fp8", "fp4") if rates.get(dtype)),
                " / ".join(f"{curve[key]:g}" for key in ("best", "units", "depth") if key in curve),
                f"{entry.get('low_best', '')}",
                f"{entry.get('stream', '')}",
                " / ".join(
                    f"{attention[kernel]:g}" for kernel in ("flash1", "flash2", "flash3") if kernel in attention
                ),
                " / ".join(f"{attention[key]:g}" for key in ("triton", "rise") if key in attention),
                f"{entry['local']}, {entry['network']}",
            )
        )
    head = (
        "device",
        "GB",
        "TB/s",
        "TFLOP/s bf16 / fp8 / fp4",
        "best / units / depth",
        "low",
        "stream",
        "flash 1 / 2 / 3",
        "Triton / rise",
        "links",
    )
    return table(head, rows)


def _stacks() -> str:
    loaded = [load_stack(name) for name in stacks()]
    defaults = {f.name: f.default for f in fields(Stack)}
    rows: list[tuple[str, ...]] = []
    for name in (f.name for f in fields(Stack) if f.name not in ("name", "about")):
        rows.append((f"`{name}`", *(_cell(getattr(stack, name), defaults[name]) for stack in loaded)))
    about = "\n".join(f"- `{stack.name}`: {stack.about}" for stack in loaded)
    return f"{about}\n\n" + table(("", *(stack.name for stack in loaded)), rows)


def _cell(value: object, default: object) -> str:
    text = (
        {True: "yes", False: "no"}[value]
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
    return text if value == default else f"**{text}**"


def formula_constants(modules: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """(module, name, value, docstring) of every number in capitals at the top of an estimator's module."""
    found = []
    for module in modules:
        text = files("shardwise.plan").joinpath(f"{module}.py").read_text(encoding="utf-8")
        body = ast.parse(text).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            name, value = node.targets[0].id, ast.get_source_segment(text, node.value) or ""
            if name.isupper() and _has_numbers(node.value) and len(value) < 500:
                found.append(
                    (module.rsplit("/", 1)[-1], f"`{name}`", f"`{' '.join(value.split())}`", _docstring(after))
                )
    return found


def _has_numbers(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and isinstance(node.value, int | float) for node in ast.walk(value))


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split()).replace("|", "\\|")
    return ""
