"""`Protect`: what a step does about a loss or a gradient norm that is not finite, or spikes; decided before the update.

A spike is told by the modified z-score (Iglewicz and Hoaglin, "How to detect and handle outliers", 1993), upwards only:

    z(x) = (x - median) / max(1.4826 * MAD, floor * |median|)

over the last `window` good steps, of the loss and of the gradient norm alike; MAD is the median of |x - median|, and
1.4826 makes it the standard deviation of normal numbers. A falling loss lowers z: its median lags behind.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol

import torch

from shardwise.errors import ConfigError, SpikeError, UsageError
from shardwise.parallel.mesh import Mesh
from shardwise.train.batches import Batches
from shardwise.train.data.windows import Window
from shardwise.train.updates.update_rules import local_shard

Facts = dict[str, Any]
"""What happened, as JSON: `event`, `step`, and more."""


@dataclass(frozen=True, kw_only=True)
class Protect:
    """What counts as a spike, and what is done about it and about what is not finite.

    Raises:
        ConfigError: a number out of range.

    >>> Protect(policy="rewind").threshold
    10.0
    """

    policy: Literal["skip", "rewind", "stop"] = "skip"
    """Leave the update out; go back to the last kept state and leave the samples out; or end the loop in order."""
    threshold: float = 10.0
    """Least z of a spike."""
    window: int = 64
    """Good steps that it is measured against."""
    min_history: int = 16
    """Good steps before anything counts as a spike."""
    floor: float = 0.05
    """Least spread, as a fraction of the median: a loss that stands still has no outliers of a thousandth."""
    keep_every: int = 10
    """Under `rewind`: states of every so many steps are kept, in host memory, and the one a process began with."""
    limit: int = 8
    """Windows that may be left out within any `window` steps; one more is an error."""

    def __post_init__(self) -> None:
        least = {"threshold": 1.0, "window": 4, "min_history": 4, "floor": 1e-6, "keep_every": 1, "limit": 1}
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ConfigError(f"Protect: {name}: found {getattr(self, name)}; needed: at least {bound}; raise it")
        if self.policy not in ("skip", "rewind", "stop") or self.min_history > self.window:
            raise ConfigError(
                f"Protect: found policy={self.policy!r}, min_history={self.min_history} of window={self.window}; "
                "needed: skip, rewind or stop, and a history that fits into the window; change it"
            )


@dataclass
class Guard:
    """What verdicts rest on: the last good steps. Part of a checkpoint, so that a resumed run judges alike."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    """Steps whose windows were left out; after a rewind a step has its number again."""

    def add(self, loss: float, norm: float, window: int) -> None:
        """Remember a good step."""
        self.losses = [*self.losses, loss][-window:]
        self.norms = [*self.norms, norm][-window:]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"losses": self.losses, "norms": self.norms, "hits": self.hits}

    def load(self, saved: dict[str, Any]) -> None:
        """Take over what `to_json` gave."""
        self.losses, self.norms, self.hits = ([*saved[key]] for key in ("losses", "norms", "hits"))


def z_score(value: float, history: list[float], floor: float) -> float:
    """The modified z-score of a value; see the module.

    >>> round(z_score(4.0, [1.0, 1.1, 0.9, 1.0, 1.2], 0.01), 3)
    20.235
    """
    middle = median(history)
    spread = max(1.4826 * median(abs(x - middle) for x in history), floor * abs(middle), 1e-300)
    return (value - middle) / spread


class Guarded(Protocol):
    """What is protected: a `TrainState`."""

    step: int
    skipped: int
    guard: Guard
    batches: Any

    @property
    def mesh(self) -> Mesh:
        """All ranks."""
        ...

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """What is here of every tensor, by name."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """The same, as they are over all ranks."""
        ...

    def template(self, names: Any, *, late: Any = None, forms: Any = None) -> dict[str, torch.Tensor]:
        """Fresh tensors to fill."""
        ...

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over a filled template."""
        ...

    def scalars(self) -> dict[str, Any]:
        """Everything else."""
        ...

    def load_scalars(self, scalars: Any) -> None:
        """Take it over."""
        ...

    def take_back(self, scalars: Any) -> None:
        """Take it over after a step, whose loop's body is to change nothing of it."""
        ...

    def begin_step(self) -> None:
        """The body has run."""
        ...


class Kept:
    """A state in host memory: this rank's shards, and everything that is not a tensor."""

    def __init__(self, state: Guarded) -> None:
        self.step = state.step
        self._tensors = {name: local.to("cpu", copy=True) for name, local in state.local_tensors().items()}
        self._scalars = copy.deepcopy(state.scalars())

    def restore(self, state: Guarded) -> None:
        """Make a state what it was, bit for bit; the data go on from there too."""
        kinds = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in state.tensors().items()}
        late = {name: kinds[name] for name in self._tensors if name in kinds}
        template = state.template(self._tensors, late=late, forms=self._scalars.get("optimizer_forms"))
        for name, tensor in self._tensors.items():
            local_shard(template[name]).copy_(tensor)
        state.take_back(self._scalars)
        state.load_tensors(template)


class Done(NamedTuple):
    """What was done about a bad window."""

    stopping: str | None
    events: tuple[Facts, ...]


class Protection:
    """One run's protection; made by `TrainStep`.

    Cost: two medians of `window` numbers per step; under DDP, where every rank has the norm from its own gradient, an
    all-reduce of one number, so that the verdict is one; under `rewind` a copy of the state every `keep_every` steps.
    """

    def __init__(self, state: Guarded, protect: Protect, *, is_norm_local: bool) -> None:
        self._state, self._protect, self._is_norm_local = state, protect, is_norm_local
        self._kept: Kept | None = None
        self._window: Window | None = None

    def begin(self, batch: Any) -> None:
        """A step starts.

        Raises:
            UsageError: under `rewind` there is no going back to this batch.
        """
        self._state.begin_step()
        self._window = batch if isinstance(batch, Window) else None
        if self._protect.policy == "rewind":
            self._check_way_back(batch)
        # by the number of the step: a run that goes on keeps the steps that it would have kept
        step, kept = self._state.step, self._kept
        due = kept is None or (step > kept.step and step % self._protect.keep_every == 0)
        if self._protect.policy == "rewind" and due:
            self._kept = Kept(self._state)
            if self._window is not None and isinstance(self._state.batches, Batches):
                # the window of this step is handed out already
                self._kept._scalars["data"] = self._state.batches.state_before(self._window)

    def _check_way_back(self, batch: Any) -> None:
        """Batches that cannot leave samples out would give the bad ones again, and those of the kept step never."""
        batches = self._state.batches
        if isinstance(batches, Batches):
            batches.check_reads_again("Protect: policy='rewind'")
        if batches is None or (isinstance(batches, Batches) and self._window and batches.ahead.rows_of(self._window)):
            return
        found = f"a batch of type {type(batch).__name__} of the script's own"
        if not isinstance(batches, Batches):
            found = f"batches of type {type(batches).__name__}"
        raise UsageError(
            f"Protect: policy='rewind': found {found}; needed: the windows of shardwise.loader, which goes back and "
            "leaves the bad samples out; give the step what next(loader) gives, or use policy='skip'"
        )

    def judge(self, loss: float, norm: float, *, excused: bool) -> str | None:
        """Why the update must not be made, the same on every rank; None: it may.

        Args:
            loss: mean of the global batch.
            norm: of its gradient.
            excused: a norm that is no fault of model or data: an fp16 overflow, or nothing that counts in the window.
                The loss of an overflow may spike all the same.
        """
        guard, protect = self._state.guard, self._protect
        cause = "" if excused else None
        if not excused and not (math.isfinite(loss) and math.isfinite(norm)):
            cause = f"not finite: loss {loss}, gradient norm {norm}"
        elif len(guard.losses) >= protect.min_history:
            scores = {"loss": (loss, z_score(loss, guard.losses, protect.floor))}
            if not excused:
                scores["gradient norm"] = (norm, z_score(norm, guard.norms, protect.floor))
            name, (value, z) = max(scores.items(), key=lambda item: item[1][1])
            if z > protect.threshold:
                cause = f"spike: {name} {value:.6g}, z {z:.1f} above {protect.threshold:g}"
        bad = bool(cause)
        if self._is_norm_local and self._state.mesh.world > 1:
            flag = torch.tensor([float(bad)], device=self._state.mesh.device)
            if bool(self._state.mesh.all_reduce_max(flag)) and not bad:
                bad, cause = True, "spike: on another rank; this rank's own numbers are good"
        if not bad and cause is None:
            guard.add(loss, norm, protect.window)
        return cause if bad else None

    def act(self, cause: str) -> Done:
        """Follow the policy. The step is counted already.

        Raises:
            SpikeError: more windows were left out than the limit, on all ranks.
        """
        state, protect, number = self._state, self._protect, self._state.step
        rows, nth = self._quarantine()
        state.guard.hits = [step for step in state.guard.hits if step > number - protect.window] + [number]
        if len(state.guard.hits) > protect.limit:
            raise SpikeError(
                f"step {number}: {cause}; {len(state.guard.hits)} windows were left out within {protect.window} "
                f"steps, at {', '.join(map(str, state.guard.hits))}; needed: at most {protect.limit}; go back to an "
                "older checkpoint, lower the learning rate, or look at the data"
            )
        facts: Facts = {"event": "quarantine", "step": number, "cause": cause, "rows": rows, "policy": protect.policy}
        facts |= {"nth": nth} if rows else {}
        if protect.policy == "stop":
            return Done(cause, (facts,))
        if protect.policy == "rewind" and self._kept is not None:
            skipped, hits = state.skipped, state.guard.hits
            self._kept.restore(state)
            state.skipped, state.guard.hits = skipped, hits
            facts["rewound_to"] = state.step
        return Done(None, (facts,))

    def _quarantine(self) -> tuple[list[int] | None, int]:
        """Never feed the window's samples again: their positions, first and after the last; how many there are now."""
        if self._window is None or not isinstance(self._state.batches, Batches):
            return None, 0
        if (rows := self._state.batches.ahead.rows_of(self._window)) is None:  # of another loader
            return None, 0
        start, stop = rows
        self._state.batches.quarantine(start, stop)
        return [start, stop], len(self._state.batches.quarantined)
