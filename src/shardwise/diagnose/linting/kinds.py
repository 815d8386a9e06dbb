"""What an expression holds: a sharded module, an optimizer, a sampler, a loader, an engine."""

from __future__ import annotations

import ast
import re

from shardwise.diagnose.linting.names import ELEMENT, Binding, Function, Scope, dotted, last, own_nodes
from shardwise.diagnose.linting.script import Script, Site

SHARDED = frozenset({"fsdp1", "fsdp2", "tp", "placed", "engine"})
"""Kinds of modules whose parameters are not whole on a rank."""

_MADE_BY = {
    "torch.distributed.fsdp.FullyShardedDataParallel": "fsdp1",
    "FullyShardedDataParallel": "fsdp1",
    "fully_shard": "fsdp2",
    "parallelize_module": "tp",
    "DistributedDataParallel": "ddp",
    "DistributedSampler": "sampler",
    "DataLoader": "loader",
    "StatefulDataLoader": "loader",
    "Accelerator": "accelerator",
    "Fabric": "fabric",
    "lightning.Trainer": "trainer",
    "lightning.pytorch.Trainer": "trainer",
    "pytorch_lightning.Trainer": "trainer",
    "transformers.Trainer": "hf_trainer",
    "transformers.Seq2SeqTrainer": "hf_trainer",
    "trl.SFTTrainer": "hf_trainer",
    "PipelineStage": "stage",
    "ZeroRedundancyOptimizer": "zero",
    "GradScaler": "scaler",
    "ShardedGradScaler": "scaler",
    "shardwise.apply": "placed",
    "shardwise.Store": "store",
    "shardwise.TrainState": "state",
    "shardwise.open_mesh": "mesh",
    "shardwise.make_step": "step",
}
_OPTIMIZERS = re.compile(
    r"^(Fused|Distributed)?(Adam|AdamW|AdamW?8bit|SGD|RMSprop|Adagrad|Adafactor|Adamax|NAdam|RAdam|LBFGS|Lion|Muon|LAMB|Lamb)$"
)
_SAME = {"to", "cuda", "half", "bfloat16", "float", "train", "eval", "cpu", "apply", "compile", "requires_grad_"}
_PASSED_ON = {"compile", "checkpoint_wrapper", "iter", "enumerate", "tqdm", "islice", "zip", "cast"}
_DEPTH = 6


class Kinds:
    """The kinds of expressions of one script."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def of(self, node: ast.expr | None, scope: Scope, depth: int = 0) -> frozenset[str]:
        """The kinds that an expression may be of; empty where nothing is known."""
        if node is None or depth > _DEPTH:
            return frozenset()
        if isinstance(node, ast.IfExp):
            return self.of(node.body, scope, depth + 1) | self.of(node.orelse, scope, depth + 1)
        if isinstance(node, ast.Call):
            return self._of_call(node, scope, depth)
        name = dotted(node)
        if not name:
            return frozenset()
        found = [self.of_binding(b, depth) for b in scope.find(name, getattr(node, "lineno", None))]
        return frozenset().union(*found)

    def of_binding(self, binding: Binding, depth: int = 0) -> frozenset[str]:
        """The kinds that one assignment gives."""
        if binding.value is None or depth > _DEPTH:
            return binding.marks
        if binding.index is None:
            return binding.marks | self.of(binding.value, binding.scope, depth + 1)
        return binding.marks | self._of_element(binding.value, binding.index, binding.scope, depth + 1)

    def at(self, node: ast.expr | None, site: Site, wanted: frozenset[str]) -> frozenset[str]:
        """The wanted kinds that a name surely has at a call; empty where another branch may have made it.

        A name that is plain on another path counts only where the call stands under no test of its own,
        or under the one that the assignment stands under.
        """
        kinds = self.of(node, site.scope)
        if not kinds & wanted or "ddp" in kinds:
            return frozenset()
        bindings = site.scope.find(dotted(node), site.line) if dotted(node) else []
        making = [b for b in bindings if self.of_binding(b) & wanted]
        if not making or not site.tests or any(set(b.tests) <= set(site.tests) for b in making):
            return kinds & wanted
        return frozenset()

    def _of_call(self, node: ast.Call, scope: Scope, depth: int) -> frozenset[str]:
        name = self.script.full_name(node.func)
        word = last(name) if name else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        function = scope.find_function(dotted(node.func)) if dotted(node.func) else None
        if function and function.name != "__init__" and isinstance(function.node, Function):
            returned = [r.value for r in own_nodes(function.node) if isinstance(r, ast.Return) and r.value is not None]
            return frozenset().union(*(self.of(value, function, depth + 1) for value in returned))
        kind = _MADE_BY.get(name) or _MADE_BY.get(word if not name.startswith("shardwise.") else name)
        if kind:
            return frozenset({kind})
        if _OPTIMIZERS.match(word) or (name.startswith("torch.optim.") and word[:1].isupper() and "." not in word):
            return frozenset({"optimizer"} if "lr_scheduler" not in name else ())
        if word == "prepare" and node.args:
            inner = self.of(node.args[0], scope, depth + 1) if len(node.args) == 1 else frozenset()
            return inner | {"prepared"}
        if isinstance(node.func, ast.Attribute) and word in _SAME and not name.startswith(("torch.", "shardwise.")):
            return self.of(node.func.value, scope, depth + 1)
        if word in _PASSED_ON and node.args:
            return self.of(node.args[0], scope, depth + 1)
        return frozenset()

    def _of_element(self, value: ast.expr, index: int, scope: Scope, depth: int) -> frozenset[str]:
        """The kinds of one element of a call's tuple."""
        if not isinstance(value, ast.Call) or index == ELEMENT:
            return frozenset()
        name = self.script.full_name(value.func)
        if name == "deepspeed.initialize":
            return frozenset({("engine", "engine-optimizer", "loader", "")[min(index, 3)]})
        if last(name) == "prepare" and index < len(value.args):
            return self.of(value.args[index], scope, depth + 1) | {"prepared"}
        function = scope.find_function(dotted(value.func)) if dotted(value.func) else None
        if function and isinstance(function.node, Function):
            tuples = [r.value for r in own_nodes(function.node) if isinstance(r, ast.Return)]
            parts = [t.elts[index] for t in tuples if isinstance(t, ast.Tuple) and index < len(t.elts)]
            return frozenset().union(*(self.of(part, function, depth + 1) for part in parts))
        return frozenset()
