"""`Blueprint`: a module on the meta device, and the recipe of each of its tensors.

The value of a tensor is a function of (constructor, seed, name) alone: no plan, rank or device enters it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import ModelError
from shardwise.findings import nearest
from shardwise.parallel.history import History, View, seed_for, unwrapped
from shardwise.parallel.initial.recording import Recorder, check_module, record_call
from shardwise.parallel.mesh import Mesh

Init = Callable[[nn.Module], Any] | Literal["reset_parameters"]
"""How parameters get their values when the constructor's own way is not wanted: a function called with every
submodule (as by `nn.Module.apply`), or each submodule's `reset_parameters`."""


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A module and how each of its tensors comes to its value. Made by `record` or `blueprint_of`."""

    module: nn.Module
    """On meta (from a factory), or the user's own (an instance)."""
    what: str
    factory: Callable[[], nn.Module] | None = None
    init: Init | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of a tied tensor -> its first name."""
    attributes: tuple[str, ...] = ()
    """Tensors that are plain attributes of a submodule: neither parameter nor buffer, so no state dict has them."""
    history: History | None = field(default=None, repr=False)
    views: Mapping[str, View] = field(default_factory=dict, repr=False)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    draws: Mapping[int, tuple[str, int]] = field(default_factory=dict, repr=False)
    """Random operation -> (first tensor that it contributes to, how many came before): what its seed is made of."""

    def value(
        self, name: str, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The full tensor of a parameter, buffer or attribute.

        Args:
            name: dotted name; names of tied tensors give the same value.
            seed: the job's.
            device: where the result goes. The draws are made on the CPU whatever it is, so the bits are the same.
            dtype: type of the result; None: the one that the constructor gave it. The draws are made in that one.

        Cost: the operations of the constructor that made this tensor, and its memory; nothing is kept.

        Raises:
            ModelError: no such name, or the constructor never gave it a value.

        >>> record(lambda: nn.Linear(2, 2)).value("bias", seed=0).shape  # doctest: +SKIP
        torch.Size([2])
        """
        name = self.aliases.get(name, name)
        if name in self.constants:
            return self.constants[name].detach().to(device=device, dtype=dtype)
        if self.history is None or name not in self.views:
            raise ModelError(f"{self.what} has no value for {name!r}; {nearest(name, [*self.views, *self.constants])}")
        view = self.views[name]
        if name in self.parameters and 0 not in view.size and not self.history.is_written(view.storage):
            raise ModelError(
                f"parameter {name} of {self.what} never gets a value: the constructor allocates it (torch.empty) and "
                f"leaves it; every parameter needs a value that depends on the seed alone; give `init=` a function "
                f"that fills it, or fill it in the constructor"
            )
        full = self.history.replay(view, lambda index: seed_for(seed, *self.draws[index]))
        return full.to(device=device, dtype=dtype)

    def released(self) -> Blueprint:
        """The same without the tensors it holds: once every rank has its shards they would only take memory."""
        return replace(self, constants={}) if self.history is None else self

    def check_equal_on_all_ranks(self, mesh: Mesh) -> None:
        """Compare the tensors that were not drawn from the seed over all ranks: a collective, every rank calls it.

        Cost: one hash of each such tensor (about 1 GB/s) and three small collectives.

        Raises:
            ModelError: on every rank, when a tensor differs; names the first one and the ranks.
        """
        names = sorted(self.constants)
        if mesh.world == 1:
            return
        hashes = [_hash(self.constants[name]) for name in names]
        head = _hash_bytes("\n".join(names).encode())
        low = torch.tensor([head, -head], device=mesh.device)
        if not _same(mesh, low[:1]):
            raise ModelError(
                f"{self.what}: the ranks built modules with different tensor names (rank {mesh.rank} has "
                f"{len(names)}); all ranks must build the same module; "
                f"remove what depends on the rank from its constructor"
            )
        if not names:
            return
        own = torch.tensor(hashes, device=mesh.device)
        high = mesh.all_reduce_max(own.clone())
        small = mesh.all_reduce_min(own.clone())
        different = (high != small).nonzero().flatten().tolist()
        if different:
            raise ModelError(self._difference(mesh, names[different[0]], own[different[0]].reshape(1), len(different)))

    def _difference(self, mesh: Mesh, name: str, own: torch.Tensor, count: int) -> str:
        gathered = [torch.empty_like(own) for _ in range(mesh.world)]
        dist.all_gather(gathered, own)
        values = [int(value) for value in gathered]
        usual = max(values, key=values.count)
        ranks = [rank for rank, value in enumerate(values) if value != usual]
        return (
            f"{name} of {self.what} differs between ranks: rank {', '.join(map(str, ranks))} differs from rank "
            f"{values.index(usual)} ({count} tensors differ); all ranks must start from the same values; seed every "
            f"rank the same before building the instance, or pass a factory, which is seeded by name"
        )


def _same(mesh: Mesh, value: torch.Tensor) -> bool:
    return bool((mesh.all_reduce_max(value.clone()) == mesh.all_reduce_min(value.clone())).all())


def _hash_bytes(data: Any) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _hash(tensor: torch.Tensor) -> int:
    return _hash_bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def record(factory: Callable[[], nn.Module], init: Init | None = None) -> Blueprint:
    """Build a module on meta and keep how each of its tensors got its value. Needs no memory for values.

    Args:
        factory: a class or function that takes no argument and returns a new module.
        init: another way to initialise; see `Init`.

    Raises:
        ModelError: the constructor needs values (or other ones than a factory can have).

    Random operations draw from a seed made of the job's seed and the name of the first tensor that they contribute
    to, so tensors that are copies of one another in torch (a target network, `nn.TransformerEncoder`'s layers) are
    copies here. A generator that the constructor passes is not used.
    """
    what = getattr(factory, "__name__", None) or repr(factory)
    recorder = Recorder()
    module = check_module(record_call(recorder, what, factory), what)
    _initialise(recorder, module, init, what)
    return _blueprint(recorder, module, Blueprint(module=module, what=what, factory=factory, init=init))


def blueprint_of(module: nn.Module, init: Init | None = None) -> Blueprint:
    """The blueprint of an instance: its own values are the values.

    An instance on the meta device has no values; it then needs `init`.

    Raises:
        ModelError: parameters on meta and no `init`, or real ones and an `init` (which would overwrite them).
    """
    what = type(module).__name__
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if init is None and meta:
        raise ModelError(
            f"{meta[0]} of the given {what} is on the meta device (as {len(meta)} of {len(tensors)} tensors are), so "
            f"it has no value; pass the factory that builds the module in place of the instance, or give `init=`"
        )
    if init is not None:
        if len(meta) != len(tensors):
            raise ModelError(
                f"init= was given with an instance of {what} whose values exist already (they would be lost); pass a "
                f"factory with init=, or initialise the instance yourself and leave init= out"
            )
        recorder = Recorder()
        _initialise(recorder, module, init, what)
        return _blueprint(recorder, module, Blueprint(module=module, what=what, init=init))
    return Blueprint(
        module=module,
        what=what,
        shapes={name: tuple(t.shape) for name, t in tensors.items()},
        dtypes={name: t.dtype for name, t in tensors.items()},
        parameters=tuple(name for name, _ in module.named_parameters()),
        aliases=_aliases(module),
        constants={name: tensor.detach() for name, tensor in tensors.items()},
    )


def _initialise(recorder: Recorder, module: nn.Module, init: Init | None, what: str) -> None:
    if init is None:
        return
    function = _reset if init == "reset_parameters" else init
    record_call(recorder, f"init of {what}", lambda: module.apply(function))


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()
    elif next(module.parameters(recurse=False), None) is not None:
        names = ", ".join(name for name, _ in module.named_parameters(recurse=False))
        raise ModelError(
            f'init="reset_parameters": {type(module).__name__} owns {names} and has no method reset_parameters; every '
            f"module that owns parameters needs one; add it, or pass a function as init="
        )


def _aliases(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for group in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in group:
            known = first.setdefault(id(tensor), name)
            if known != name:
                aliases[name] = known
    return aliases


def _blueprint(recorder: Recorder, module: nn.Module, base: Blueprint) -> Blueprint:
    parameters = dict(module.named_parameters())
    attributes = _attributes(module, base.what)
    tensors = parameters | dict(module.named_buffers()) | attributes
    aliases = _aliases(module)
    constants = {name: t.detach() for name, t in tensors.items() if recorder.is_constant(t)}
    views = {name: recorder.view(recorder.twin(t)) for name, t in tensors.items() if name not in constants}
    _move_to_meta(module)
    draws: dict[int, tuple[str, int]] = {}
    for name, view in views.items():
        count = 0
        for index in recorder.history.closure(view.storage):
            if recorder.history.operations[index].random:
                draws.setdefault(index, (unwrapped(name), count))
                count += 1
    return replace(
        base,
        shapes={name: tuple(t.shape) for name, t in tensors.items()},
        dtypes={name: t.dtype for name, t in tensors.items()},
        parameters=tuple(parameters),
        aliases=aliases,
        attributes=tuple(attributes),
        history=recorder.history,
        views=views,
        constants=constants,
        draws=draws,
    )


def _attributes(module: nn.Module, what: str) -> dict[str, torch.Tensor]:
    """Tensors that submodules hold as plain attributes and that have no value yet."""
    known = {id(t) for t in (*module.parameters(), *module.buffers())}
    found: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules():
        for key, held in vars(part).items():
            if key in ("_parameters", "_buffers", "_modules", "example_input_array"):
                continue  # the last is an example of what forward takes: its values are nobody's
            name = f"{path}.{key}" if path else key
            if isinstance(held, torch.Tensor) and held.is_meta and id(held) not in known:
                found[name] = held
            elif isinstance(held, list | tuple | dict):
                leaves = held.values() if isinstance(held, dict) else held
                if any(isinstance(t, torch.Tensor) and t.is_meta and id(t) not in known for t in leaves):
                    raise ModelError(
                        f"{name} of {what} is a {type(held).__name__} of tensors that are neither parameters nor "
                        f"buffers, so nothing can give them their values; use register_buffer(..., persistent=False) "
                        f"for each, or pass a module instance instead of a factory"
                    )
    return found


def _move_to_meta(module: nn.Module) -> None:
    """Constants go too: until it is materialised the module holds shapes only, and each tied tensor stays one."""
    moved: dict[int, Any] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                part._parameters[key] = moved[id(parameter)]
        for key, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                part._buffers[key] = moved.setdefault(id(buffer), buffer.to("meta"))
