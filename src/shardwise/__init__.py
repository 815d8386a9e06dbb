"""Distributed PyTorch training: a plan is data, applying it is a list of passes, training is a loop you own.

Public names are imported when they are first used, so that `import shardwise` costs milliseconds and a plan can be
read, checked and printed without torch.

>>> import shardwise as sw
>>> sw.Plan.parse("dp2 tp2").world
4
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.version import __version__ as __version__

if TYPE_CHECKING:  # what type checkers and editors see; a test holds it equal to `_HOMES`
    from shardwise import errors as errors
    from shardwise.checkpoint.hf_export import export_hf as export_hf
    from shardwise.checkpoint.hf_weights import load_hf as load_hf
    from shardwise.checkpoint.retention import Retention as Retention
    from shardwise.checkpoint.store import Store as Store
    from shardwise.diagnose.prove import verify as verify
    from shardwise.findings import Finding as Finding
    from shardwise.model.infer import infer_rules as infer_rules
    from shardwise.model.rules_file import load_rules as load_rules
    from shardwise.model.spec import ModelSpec as ModelSpec
    from shardwise.model.spec import preset as preset
    from shardwise.model.spec import presets as presets
    from shardwise.models.decoder import Decoder as Decoder
    from shardwise.models.decoder import DecoderConfig as DecoderConfig
    from shardwise.models.gpt import GPT as GPT
    from shardwise.models.gpt import GPTConfig as GPTConfig
    from shardwise.models.hf import hf_config as hf_config
    from shardwise.models.hf import hf_factory as hf_factory
    from shardwise.models.hf_sizes import shrunk_config as shrunk_config
    from shardwise.models.moe import MoEConfig as MoEConfig
    from shardwise.models.moe import MoEDecoder as MoEDecoder
    from shardwise.models.moe import MoEOutput as MoEOutput
    from shardwise.parallel.compose import apply as apply
    from shardwise.parallel.init import init_model as init_model
    from shardwise.parallel.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from shardwise.parallel.layers.linear import RowParallelLinear as RowParallelLinear
    from shardwise.parallel.mesh import Mesh as Mesh
    from shardwise.parallel.mesh import open_mesh as open_mesh
    from shardwise.parallel.placed import Placed as Placed
    from shardwise.plan.constraints import check as check
    from shardwise.plan.plan import Axes as Axes
    from shardwise.plan.plan import Batch as Batch
    from shardwise.plan.plan import Communication as Communication
    from shardwise.plan.plan import Context as Context
    from shardwise.plan.plan import Float8 as Float8
    from shardwise.plan.plan import Offload as Offload
    from shardwise.plan.plan import Plan as Plan
    from shardwise.plan.plan import Recompute as Recompute
    from shardwise.plan.plan import Schedule as Schedule
    from shardwise.plan.plan import Tensor as Tensor
    from shardwise.train.batches import eval_batches as eval_batches
    from shardwise.train.batches import loader as loader
    from shardwise.train.ema import Ema as Ema
    from shardwise.train.loop import evaluate as evaluate
    from shardwise.train.loop import steps as steps
    from shardwise.train.loss import Loss as Loss
    from shardwise.train.loss import mean_over as mean_over
    from shardwise.train.loss import token_cross_entropy as token_cross_entropy
    from shardwise.train.losses import Losses as Losses
    from shardwise.train.lr import constant as constant
    from shardwise.train.lr import warmup_cosine as warmup_cosine
    from shardwise.train.lr import warmup_linear as warmup_linear
    from shardwise.train.lr import warmup_stable_decay as warmup_stable_decay
    from shardwise.train.optimizers import adafactor as adafactor
    from shardwise.train.optimizers import adamw as adamw
    from shardwise.train.optimizers import lamb as lamb
    from shardwise.train.optimizers import lion as lion
    from shardwise.train.optimizers import muon as muon
    from shardwise.train.optimizers import sgd as sgd
    from shardwise.train.options import StepMetrics as StepMetrics
    from shardwise.train.options import StepOptions as StepOptions
    from shardwise.train.predicting import predict as predict
    from shardwise.train.probe import Probe as Probe
    from shardwise.train.protect import Protect as Protect
    from shardwise.train.sampling import generate as generate
    from shardwise.train.state import TrainState as TrainState
    from shardwise.train.step import make_step as make_step
    from shardwise.train.updates.rounding import stochastic_adamw as stochastic_adamw
    from shardwise.train.updates.several import several as several

# Where each public name lives. The order is the order of docs/reference.md.
_HOMES = {
    "shardwise.plan.plan": (
        "Plan",
        "Axes",
        "Batch",
        "Schedule",
        "Recompute",
        "Offload",
        "Communication",
        "Tensor",
        "Context",
        "Float8",
    ),
    "shardwise.plan.constraints": ("check",),
    "shardwise.findings": ("Finding",),
    "shardwise.model.spec": ("ModelSpec", "preset", "presets"),
    "shardwise.parallel.mesh": ("Mesh", "open_mesh"),
    "shardwise.parallel.compose": ("apply",),
    "shardwise.parallel.placed": ("Placed",),
    "shardwise.parallel.init": ("init_model",),
    "shardwise.model.infer": ("infer_rules",),
    "shardwise.model.rules_file": ("load_rules",),
    "shardwise.parallel.layers.linear": ("ColumnParallelLinear", "RowParallelLinear"),
    "shardwise.train.ema": ("Ema",),
    "shardwise.train.updates.several": ("several",),
    "shardwise.train.losses": ("Losses",),
    "shardwise.models.moe": ("MoEDecoder", "MoEConfig", "MoEOutput"),
    "shardwise.train.loss": ("Loss", "token_cross_entropy", "mean_over"),
    "shardwise.train.batches": ("loader", "eval_batches"),
    "shardwise.train.optimizers": ("adamw", "sgd", "lion", "adafactor", "muon", "lamb"),
    "shardwise.train.updates.rounding": ("stochastic_adamw",),
    "shardwise.train.lr": ("constant", "warmup_cosine", "warmup_linear", "warmup_stable_decay"),
    "shardwise.train.state": ("TrainState",),
    "shardwise.train.probe": ("Probe",),
    "shardwise.train.step": ("make_step",),
    "shardwise.train.options": ("StepOptions", "StepMetrics"),
    "shardwise.train.protect": ("Protect",),
    "shardwise.train.loop": ("steps", "evaluate"),
    "shardwise.train.predicting": ("predict",),
    "shardwise.train.sampling": ("generate",),
    "shardwise.checkpoint.store": ("Store",),
    "shardwise.checkpoint.retention": ("Retention",),
    "shardwise.diagnose.prove": ("verify",),
    "shardwise.models.decoder": ("Decoder", "DecoderConfig"),
    "shardwise.models.gpt": ("GPT", "GPTConfig"),
    "shardwise.models.hf": ("hf_config", "hf_factory"),
    "shardwise.models.hf_sizes": ("shrunk_config",),
    "shardwise.checkpoint.hf_weights": ("load_hf",),
    "shardwise.checkpoint.hf_export": ("export_hf",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", "errors", *_HOME_OF]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "errors":
        return import_module("shardwise.errors")
    if name not in _HOME_OF:
        raise AttributeError(
            f"module 'shardwise' has no attribute {name!r}; public names: {', '.join(sorted(_HOME_OF))}"
        )
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(__all__)
