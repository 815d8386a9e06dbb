"""From settings to the parts of a run: text, model, optimizer, schedule. What `shardwise train` builds them from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, DataError
from shardwise.extras import optional_module
from shardwise.findings import nearest
from shardwise.model.spec import ModelSpec
from shardwise.models.moe import MoEOutput
from shardwise.models.presets import build
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.train.data.corpus import TokenDataset, read_corpus, split, unigram_entropy
from shardwise.train.data.tokens import ByteTokenizer, Tokenizer, load_tokenizer
from shardwise.train.kept.rundir import RunDir
from shardwise.train.loss import IGNORED, Loss, mean_over, token_cross_entropy
from shardwise.train.losses import Losses
from shardwise.train.optimizers import OPTIMIZERS
from shardwise.train.settings import OptimizerSettings, RunSettings
from shardwise.train.updates.optim import NamedOptimizer

NO_DECAY = ("*norm*", "*.bias", "*ln_*")
"""Parameters of the reference models without weight decay."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """The data of a run, as tokens."""

    tokenizer: Tokenizer
    fingerprint: str
    """Equal for equal tokens only, held-out ones included."""
    train: TokenDataset
    held_out: TokenDataset
    entropy: float
    """Unigram entropy of the held-out tokens under their own frequencies, nats per token."""
    held_out_bytes: int


def token_loss(output: Any, batch: Mapping[str, torch.Tensor]) -> Loss:
    """Cross-entropy of next tokens; a model that returns an object has its logits in `.logits`."""
    return token_cross_entropy(getattr(output, "logits", output), batch["labels"])


BALANCE, ROUTER_Z = 0.01, 0.001
"""Factors of auxiliary losses of models with experts: arXiv:2101.03961, section 2.2; arXiv:2202.08906, section 3."""


def make_loss(spec: ModelSpec | None) -> Callable[[Any, Any], Any] | Losses:
    """`token_loss`; for a reference model with experts, also the losses that balance them and bound the router."""
    if spec is None or spec.kind != "moe":
        return token_loss

    def losses(output: MoEOutput, batch: Mapping[str, torch.Tensor]) -> dict[str, Loss]:
        return {
            "tokens": token_loss(output, batch),
            "balance": mean_over(output.balance),
            "router_z": mean_over(output.router_z),
        }

    return Losses(
        losses,
        weights={"tokens": _num_labels, "balance": _num_tokens, "router_z": _num_tokens},
        factors={"balance": BALANCE, "router_z": ROUTER_Z},
    )


def _num_labels(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"] != IGNORED).sum()


def _num_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    return batch["labels"].numel()


def read_text(settings: RunSettings, run: RunDir, mesh: Mesh) -> Text:
    """Read, tokenize and split; with a tokenizer file rank zero does it, the others map its tokens."""
    data = settings.data
    seq_len = _said(data.seq_len)
    tokenizer: Tokenizer = ByteTokenizer() if data.tokenizer == "bytes" else load_tokenizer(data.tokenizer)
    cache = None if data.tokenizer == "bytes" else run.path / "tokens"
    if cache is not None and not mesh.is_first:
        mesh.barrier()
    corpus = read_corpus(data.sources, tokenizer, text_field=data.text_field, cache=cache)
    train, held_out = split(corpus, data.holdout)
    if cache is not None and mesh.is_first:
        mesh.barrier()
    if min(len(train), len(held_out)) < 2:
        raise DataError(
            f"data {', '.join(data.sources)}: {len(train)} tokens to train on and {len(held_out)} held out; needed: 2 "
            f"of each; give more text, or another --set data.holdout"
        )
    text_bytes = held_out.size if data.tokenizer == "bytes" else len(tokenizer.decode(held_out.tolist()).encode())
    return Text(
        tokenizer=tokenizer,
        fingerprint=corpus.fingerprint,
        train=TokenDataset(train, seq_len),
        held_out=TokenDataset(held_out, seq_len),
        entropy=unigram_entropy(held_out),
        held_out_bytes=text_bytes,
    )


def make_factory(settings: RunSettings, spec: ModelSpec | None) -> Callable[[], nn.Module]:
    """The model's factory: a reference model of these sizes, or the user's `pkg.mod:function`.

    Raises:
        ConfigError: the module or the function does not exist.
    """
    if spec is not None:
        return build(spec)
    if (config := declared_config(settings)) is not None:
        made: Callable[[], nn.Module] = import_module(HF).hf_factory(config)
        return made
    module_name, _, name = _said(settings.model.factory).partition(":")
    sys.path.insert(0, str(Path.cwd()))  # a module beside run.toml, as `python -m` finds it
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.factory = {settings.model.factory!r}: {error}; needed: an importable module; install it, or start "
            f"in the directory where it lies"
        ) from error
    if not callable(getattr(module, name, None)):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"model.factory = {settings.model.factory!r}: no function {name!r}; {nearest(name, known)}")
    factory: Callable[[], nn.Module] = getattr(module, name)
    return factory


HF, HF_PREFIX = "shardwise.models.hf", "hf:"


def declared_config(settings: RunSettings) -> Any:
    """The configuration that `--model hf:...` names; None for other models.

    Raises:
        ConfigError: `transformers` is not installed, or does not know the name.
        DataError: a file that holds no configuration.
        ModelError: an encoder with a decoder, or a model of pictures: what is read here is text.
    """
    source = settings.model.factory or ""
    if not source.startswith(HF_PREFIX):
        return None
    optional_module("transformers", extra="hf", need=f"model {source}")
    optional_module("safetensors", extra="hf", need=f"model {source}")
    return import_module(HF).chain_config(source)


def vocab_size(settings: RunSettings, spec: ModelSpec | None) -> int | None:
    """How many tokens the model's embedding holds; None: a factory's, which does not say."""
    return spec.vocab_size if spec is not None else getattr(declared_config(settings), "vocab_size", None)


def make_optimizer(placed: Placed, settings: OptimizerSettings, spec: ModelSpec | None) -> NamedOptimizer:
    """The optimizer by name. Norms and biases of the reference models have no weight decay."""
    dials: dict[str, Any] = {}
    if settings.betas is not None:
        dials["betas"] = settings.betas
    if settings.momentum is not None:
        dials["momentum"] = settings.momentum
    dials["weight_decay"] = settings.weight_decay
    if settings.state_dtype != "fp32":
        if settings.name != "adamw":
            raise ConfigError(
                f"optimizer.state_dtype = {settings.state_dtype!r} with optimizer.name = {settings.name!r}: needed "
                "adamw, which alone has averages of other types; use optimizer.name=adamw, or drop state_dtype"
            )
        dials["state_dtype"] = settings.state_dtype
    if spec is not None and settings.name != "muon":
        names = list(placed.named_parameters())
        dials["no_decay"] = tuple(p for p in NO_DECAY if any(fnmatchcase(name, p) for name in names))
    return OPTIMIZERS[settings.name](placed, _said(settings.lr), **dials)


def _said(value: Any) -> Any:
    assert value is not None, "the command line resolves every setting"
    return value
