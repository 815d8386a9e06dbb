"""`Store`: a directory of checkpoints. A checkpoint exists only when it is complete, and loads into any plan."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.agree import Peers, late_told
from shardwise.checkpoint.directory import Skipped, StoreDirectory
from shardwise.checkpoint.drawn import digests, gathered, moved
from shardwise.checkpoint.files import LOCAL, Files
from shardwise.checkpoint.format import DamagedError
from shardwise.checkpoint.holding import Held, Holder, unwritable
from shardwise.checkpoint.layout import held_by
from shardwise.checkpoint.loading import Loaded as Loaded
from shardwise.checkpoint.loading import check_probe, processor, processors
from shardwise.checkpoint.manifest import NOT_FINITE, Manifest, ProbeResult
from shardwise.checkpoint.objects import directory_of
from shardwise.checkpoint.remote import files_for, located, standing
from shardwise.checkpoint.retention import Retention
from shardwise.checkpoint.saveable import Forgetful, Prober, Saveable, broken_weight, mesh_of
from shardwise.checkpoint.saving import (
    Save,
    SaveJob,
    Saving,
    as_json,
    check_same_state,
    left_over,
    number_of,
    wait_for_others,
)
from shardwise.checkpoint.scalars import agreed, members_of
from shardwise.checkpoint.snapshot import HostCopy
from shardwise.checkpoint.taking import take_over
from shardwise.checkpoint.telling import tell_changes, tell_no_position, tell_skipped
from shardwise.errors import CheckpointError
from shardwise.findings import Finding
from shardwise.parallel.mesh import Mesh


class Store:
    """A directory of checkpoints; every rank makes one and takes part in each call.

    Args:
        path: a directory that all ranks see, made at the first save; or the URL of one, as `s3://bucket/run`.
        keep: complete checkpoints to keep, the newest ones; or a `Retention`.
        probe: rows on which loss and gradient norm are measured at each save and compared at each load; None: none.
        config: the run's resolved configuration, as JSON, for the manifest.
        files: the file system of a path; that of a URL is found.

    Raises:
        UsageError: `keep` is below 1; `config` is no JSON.
        CheckpointError: the path is a file, or holds other programs' checkpoints; a URL that cannot be used or reached.

    >>> store = Store("runs/a/checkpoints", keep=3)  # doctest: +SKIP
    >>> store.load_latest(state)  # None in a new run  # doctest: +SKIP
    >>> store.save_async(state)  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | Retention = 3,
        probe: Prober | None = None,
        config: Mapping[str, Any] | None = None,
        files: Files = LOCAL,
    ) -> None:
        """See the class."""
        self.path = standing(path)
        self.retention = keep if isinstance(keep, Retention) else Retention(last=keep)
        self.probe = probe
        self._config = as_json(config)
        self._directory = directory_of(self.path, files)
        self._run: str | None = None
        """Id of the run that this store goes on with; None: it has neither saved nor loaded."""
        self._of = ""
        """Of which run the state was that it last saved or loaded."""
        self._copy = HostCopy()
        self._waits: Mesh | None = None
        """The mesh at whose end the last save is waited for."""
        self._going_on: Saving | None = None
        self._last_s = self._held_up_s = 0.0
        self._findings: list[Finding] = []
        self._told = 0  # of these
        self._forgotten = ""
        self._holder = Holder(self.path)
        self._directory.check_is_store()

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, newest first."""
        return [path for path, _ in self._directory.listing().complete]

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(iter(self.checkpoints()), None)

    @torch.inference_mode(False)
    def save(self, state: Saveable, *, metric: float | None = None) -> Save:
        """Write a checkpoint; every rank takes part. On return it is complete and flushed to the disk.

        Args:
            state: what to save.
            metric: what `Retention.best` compares, a number, smaller is better; the same on every rank.

        Cost: copies this rank's parts (replicas are written once), writes them while their digests are taken; a few
        small collectives. When an older checkpoint is to be removed, the new one is read back first.

        Raises:
            CheckpointError: on all ranks, when any of them failed; older checkpoints are untouched.
            LockedError: another run holds the store.
            UsageError: it was another state that the store has saved or loaded before.
        """
        job, peers = self._prepare(state, metric), Peers.of(state.mesh)
        try:
            saved = job.execute(peers)
        finally:
            self._run = job.run
        if (left := left_over(saved)) is not None:
            peers.warn(str(left))
        return saved

    @torch.inference_mode(False)
    def save_async(self, state: Saveable, *, metric: float | None = None) -> Saving:
        """Copy this rank's part to host memory and write it in the background; every rank takes part.

        Parameters and buffers are copied when this returns. The optimizer's state and averages follow in the
        background, and the next step of a torch optimizer waits for them. Another change of them in place fails the
        save where autograd counts it; one through `.data` or numpy is not seen: use `save` where such a thing is done.

        A save that is still going on is waited for first: there are never two. A failure is a finding
        (`take_findings`), and no error unless `wait()` of the result is called.

        Cost: the copy, a small collective, the wait for the save before (`Saving.waited_s`), and that of the
        optimizer (`Saving.held_up_s`).

        Raises:
            CheckpointError: ranks disagree on what they save, or a tensor cannot be stored.
        """
        job = self._prepare(state, metric, beside=True)
        if self._waits is not state.mesh:  # after the lock, which is given back in the reverse order, behind the last
            for end in [end for end in state.mesh.at_exit if getattr(end, "args", ())[1:] == (self.path,)]:
                end()  # of a store before this one, whose copy would stay for as long
                state.mesh.at_exit.remove(end)
            state.mesh.at_exit.append(partial(self._end, Peers.of(state.mesh), self.path))
            self._waits = state.mesh
        saving = Saving(
            job=job,
            waited_s=job.waited_s,
            stalled_s=time.perf_counter() - job.start,
            previous_s=self._last_s,
            previous_held_up_s=self._held_up_s,
        )
        self._going_on = saving
        saving.begin(Peers.apart(state.mesh, self.path))
        return saving

    def wait(self) -> None:
        """Return when no save is going on. A save that failed is a finding."""
        if self._going_on is not None:
            going_on, self._going_on = self._going_on, None
            finding = going_on.finish()
            self._copy.release()
            going_on.held_up_s = self._held_up_s = self._copy.held_up_s
            self._findings += [finding] if finding is not None else []
            self._run, self._last_s = going_on.job.run, going_on.seconds

    def _end(self, peers: Peers, _: Path) -> None:
        """Wait for the last save, and say what nobody has asked for since. The place is for who looks for it."""
        self.wait()
        self._tell(peers)
        self._waits = None

    def _tell(self, peers: Peers) -> None:
        told, found = self._told, self.take_findings()
        for finding in found[told:]:
            peers.warn(str(finding))
        self._findings, self._told = found, len(found)

    def take_findings(self) -> list[Finding]:
        """What went wrong in saves beside training, each once; cheap at every step. Else the next save warns."""
        if self._going_on is not None and self._going_on.has_ended:
            self.wait()
        found, self._findings, self._told = self._findings, [], 0
        return found

    @torch.inference_mode(False)
    def load_latest(self, state: Saveable, *, convert_state: bool = False) -> Loaded | None:
        """Load the newest checkpoint whose files are whole; None when the store holds none at all.

        One that is damaged, or that `latest` names and that is not there, is skipped with a warning, and named in the
        result. `convert_state` is that of `load`.

        A run that goes on from a store must be the only one that does: it is refused while another one saves there.
        Where no save would work (no rights, no room, a file in the way), a warning says so, and why.

        Raises:
            CheckpointError: every checkpoint is damaged, or the checkpoint is not of this model and optimizer.
            LockedError: another run holds the store.
        """
        self.wait()
        wait_for_others()
        peers, doing = Peers.of(mesh_of(state)), f"loading from {self.path}"
        with late_told(doing, peers):
            told = peers.from_all(doing, lambda: self._begin(state))
        held, mended, _ = told[0]
        self._findings += held.check()
        if failing := next((f"rank {rank}: {why}" for rank, (*_, why) in enumerate(told) if why), None):
            peers.warn(
                f"{self.path}: no checkpoint can be saved here as it is now: {failing}; what is there can be read"
            )
        if mended is not None:
            what = f"{mended}: it was written anew, from a checkpoint that is whole"
            self._findings.append(Finding(id="checkpoint.store", severity="note", what=what))
        return self._load_newest(state, self._directory, convert_state=convert_state)

    def _begin(self, state: Saveable) -> tuple[Held, str | None, str]:
        """Refuse what no save will take, before anything is trained. On rank 0 mend the store, if nobody holds it.

        Who holds the store, what was mended, and why no save would work, as far as this rank can tell.
        """
        tensors = state.tensors()
        held_by(tensors)
        failing = unwritable(self.path, sum(each.numel() * each.element_size() for each in tensors.values()))
        held = self._holder.look(state.mesh)
        return held, self._directory.mend() if state.mesh.rank == 0 and not held.refusal else None, failing

    def _load_newest(self, state: Saveable, directory: StoreDirectory, **how: bool) -> Loaded | None:
        """As `load`, the newest checkpoint of a store whose files are whole; None: it holds none at all."""
        peers, doing = Peers.of(state.mesh), f"loading from {directory.path}"
        directory.check_shared(peers.world)
        found, before = peers.on_first(doing, directory.listing), None
        failed: dict[str, Skipped] = {}
        skipped: list[Skipped] = []
        while found != before:  # ranks that stand by read here while those that train save and prune
            skipped = list(found.damaged)
            for path, manifest in found.complete:
                if manifest.save not in failed:
                    try:
                        loaded = self._load(state, path, manifest, tuple(skipped), **how)
                    except DamagedError as error:
                        failed[manifest.save] = Skipped(path, str(error))
                    else:
                        tell_skipped(peers, path, loaded.skipped)
                        return loaded
                skipped.append(failed[manifest.save])
            found, before = peers.on_first(doing, directory.listing), found
        if skipped:
            reasons = "; ".join(item.reason for item in skipped)
            raise CheckpointError(
                f"{doing}: none of the {len(skipped)} checkpoints is whole: {reasons}; repair one, or begin again in "
                "another directory (`shardwise train`: --resume never)"
            )
        return None

    @torch.inference_mode(False)
    def load(
        self,
        state: Saveable,
        path: str | os.PathLike[str],
        *,
        weights_only: bool = False,
        convert_state: bool = False,
    ) -> Loaded:
        """Load one checkpoint, of this store or another, into any plan of the same model and optimizer.

        The path of a whole store stands for the newest checkpoint in it that is whole, as in `load_latest`.

        With `weights_only` the model's parameters and buffers alone: the optimizer is as new, averages of the weights
        begin with them, and step, data and seed stay. The fp32 masters of `bf16-pure` are the stored ones, else the
        weights. So a checkpoint without optimizer state, or of another optimizer, begins a run.

        With `convert_state` the checkpoint may be of another precision, and AdamW's averages of another `state_dtype`:
        tensors are read and checked as stored, and then changed; weights are those of the fp32 masters where some are
        stored. `Proof.converted` says what it cost.

        Nothing reaches the state before names, shapes, types and the digest of every byte that is used are checked on
        all ranks; then the state is proven to be the stored one.
        Cost: reads this rank's elements once; memory of one more copy of this rank's parameters while loading.

        Raises:
            CheckpointError: not a checkpoint, damaged, not of this model and optimizer, or not proven.
        """
        self.wait()
        wait_for_others()
        place, how = located(path), {"weights_only": weights_only, "convert_state": convert_state}
        directory = directory_of(place, files_for(place, self._directory.files))
        peers, doing = Peers.of(mesh_of(state)), f"loading {place}"

        def look() -> Manifest | None:
            return None if directory.is_store() else Manifest.read(place, directory.files)

        with late_told(doing, peers):
            manifest = peers.on_first(doing, look)
        if manifest is not None:
            return self._load(state, place, manifest, (), **how)
        if (loaded := self._load_newest(state, directory, **how)) is None:
            raise CheckpointError(f"{doing}: the store holds no checkpoint; choose another, or train one")
        return loaded

    def _load(
        self,
        state: Saveable,
        path: Path,
        manifest: Manifest,
        skipped: tuple[Skipped, ...],
        *,
        weights_only: bool = False,
        convert_state: bool = False,
    ) -> Loaded:
        start, peers, files = time.perf_counter(), Peers.of(mesh_of(state)), files_for(path, self._directory.files)
        how = {"weights_only": weights_only, "convert_state": convert_state}
        proof, changes = take_over(state, path, manifest, files, **how)
        if self.probe is not None and manifest.probe is not None:
            proof = check_probe(proof, manifest, self.probe, state, processors(peers.gather(processor())))
        if path.resolve().parent == self.path.resolve():
            self._run = manifest.run
        if not weights_only and hasattr(state, "run_id") and "imported" not in manifest.scalars:
            self._of = state.run_id = manifest.run
        tell_changes(peers, path, () if self._config else changes)  # who gives a configuration compares by that
        if not weights_only:
            tell_no_position(peers, path, manifest.scalars, state.scalars())
        return Loaded(
            path=path, step=manifest.step, manifest=manifest, skipped=skipped, proof=proof, changes=changes,
            seconds=time.perf_counter() - start,
        )  # fmt: skip

    def _prepare(self, state: Saveable, metric: float | None, *, beside: bool = False) -> SaveJob:
        """Everything that needs the live state: afterwards training may change it."""
        start, peers = time.perf_counter(), Peers.of(mesh_of(state))
        self._tell(peers)
        self.wait()
        wait_for_others(self.path)
        waited = time.perf_counter() - start
        scalars, tensors = state.scalars() | members_of(state), state.tensors()
        doing = f"saving step {scalars['step']} to {self.path}"
        self._directory.check_shared(peers.world)
        self._of = check_same_state(self.path, self._of, state)
        own, generators = (dict(scalars) | {"metric": number_of(metric)}, state.mesh.index("pp")), moved(state)
        with late_told(doing, peers):
            lock, fits = self._holder.take(state.mesh), self._copy.fits(tensors)
            apart = Peers.apart(state.mesh, self.path)
            forgets = state.forgets() if isinstance(state, Forgetful) else ""
            told = apart.meet((own, fits, processor(), lock, digests(generators), forgets, broken_weight(state)))
        self._findings += told[0][3].check()
        forgotten = "; ".join(dict.fromkeys(each[5] for each in told if each[5]))  # a stage knows of its own
        if forgotten not in ("", self._forgotten):
            self._forgotten = forgotten
            peers.warn(f"{self.path}: {forgotten}")
        scalars = agreed(*map(list, zip(*(each[0] for each in told), strict=True)))
        scalars |= gathered(apart, generators, [each[4] for each in told])
        if found := next((each[6] for each in told if each[6]), ""):
            scalars[NOT_FINITE] = found
            peers.warn(
                f"{self.path}: step {scalars['step']} is saved with NaN or infinity in the weight {found}: it replaces "
                "no other checkpoint, and `load_latest` goes on from the one before it; stop, and do so"
            )
        if not all(each[1] for each in told):
            self._copy.lay_out(apart, tensors, doing)
        probe = ProbeResult(*self.probe.measure(state)) if self.probe is not None else None
        job = SaveJob(
            doing=doing,
            directory=self._directory,
            retention=self.retention,
            run=self._run,
            of_state=getattr(state, "run_id", ""),
            scalars=scalars,
            placed=state.placed,
            config=self._config,
            probe=probe,
            metric=scalars.pop("metric"),
            processors=processors([each[2] for each in told]),
            copy=self._copy,
            start=start,
            waited_s=waited,
        )
        try:
            self._copy.take(tensors, beside=beside)
        except (RuntimeError, MemoryError, OSError) as error:  # of one rank: told to all where they meet next
            job.failure = f"copying to host memory: {error}".splitlines()[0]
        return job
