"""A store at a URL: `file://`, `memory://`, and a server that speaks S3 on loopback, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from shardwise.checkpoint import remote
from shardwise.checkpoint.compare import diff, find, inspect, verify
from shardwise.checkpoint.digests import BLOCK
from shardwise.checkpoint.format import Box, DamagedError
from shardwise.checkpoint.manifest import FILE, Manifest
from shardwise.checkpoint.objects import ObjectDirectory, directory_of
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.remote import RemoteFiles, RemotePath, located
from shardwise.checkpoint.retention import Retention
from shardwise.checkpoint.store import Store
from shardwise.cli.main import app
from shardwise.errors import CheckpointError, ConfigError, UsageError
from shardwise.launch.rank.resuming import resume
from shardwise.parallel.mesh import open_mesh
from shardwise.testing.world import World, WorldError
from shardwise.train.kept.rundir import find_checkpoint
from shardwise.train.optimizers import adamw
from tests.checkpoints import IDENTITY, SPLITS, content, write_checkpoint
from tests.parity.placing import LAYOUTS, State, place

fsspec = pytest.importorskip("fsspec")
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the test ends, or dies
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """Variables under which `s3://bucket` is a bucket of a server that lives as long as the tests of this file."""
    for name in ("s3fs", "moto"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[dev]'")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        assert process.stdin and process.stdout
        port = process.stdout.readline().decode().strip()
        assert port.isdigit(), "the server did not start"
        names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        variables = {**names, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_EC2_METADATA_DISABLED": "true"}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            fsspec.core.url_to_fs("s3://bucket", skip_instance_cache=True)[0].mkdir("bucket")
            yield variables
        process.stdin.close()
        process.wait(timeout=20)


def make(mesh: Any, layout: str) -> State:
    placed = place(layout, mesh)
    return State(placed, adamw(placed, 0.01))


class Objects:
    """What somebody else does to the files of a store."""

    def __init__(self, url: object) -> None:
        self.fs, self.base = fsspec.core.url_to_fs(str(url), skip_instance_cache=True, use_listings_cache=False)

    def names(self) -> list[str]:
        """Those of a store; a local one is held, too."""
        found = (name.rstrip("/").rpartition("/")[2] for name in self.fs.ls(self.base, detail=False))
        return sorted(name for name in found if name != "lock")

    def all(self) -> list[str]:
        return sorted(self.fs.find(self.base))

    def get(self, name: str) -> bytes:
        data: bytes = self.fs.cat_file(f"{self.base}/{name}")
        return data

    def put(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.base}/{name}", data)

    def remove(self, name: str) -> None:
        self.fs.rm_file(f"{self.base}/{name}")


def damages(data: bytes) -> dict[str, bytes | None]:
    flipped = bytearray(data)
    flipped[8 + int.from_bytes(data[:8], "little") + 3] ^= 1  # of the first tensor
    return {"truncated": data[:-40], "flipped": bytes(flipped), "missing": None}


def scenario(url: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Saves, one beside training, pruned to two; then each damage of the newest. Tensors at its end; what was said."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        state, store, said = make(mesh, "fsdp2"), Store(url, keep=2), []
        assert store.load_latest(state) is None and store.checkpoints() == []
        state.run(1)
        assert store.save(state).step == 1
        state.run(1)
        saving = store.save_async(state)
        saved = saving.wait()
        store.wait()
        assert not store.take_findings()
        store.save(state)  # the same step again: the one before is replaced
        state.run(1)
        last = store.save(state)
        assert [Manifest.read(path, store._directory.files).step for path in store.checkpoints()] == [3, 2]
        assert store.latest() == last.path and str(last.path).startswith(url.replace("file://", ""))
        mesh.barrier()
        whole, objects = state.whole(), Objects(last.path)
        assert len(Objects(store.path).names()) == 4  # two checkpoints, `latest`, `store.json`
        assert saved.step == 2 and Objects(store.path).get("latest").decode() == f"{last.path.name}\n"
        name = "rank-00001.safetensors"
        data = objects.get(name)
        for kind, damaged in damages(data).items():
            mesh.barrier()
            if mesh.rank == 0:
                objects.remove(name) if damaged is None else objects.put(name, damaged)
            mesh.barrier()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loaded = Store(url).load_latest(make(mesh, "fsdp2"))
            assert loaded is not None and loaded.step == 2 and "checksums ok" in loaded.proof.line
            assert mesh.rank > 0 or any("in place of" in str(warning.message) for warning in caught)
            said.append(f"{kind}: {loaded.skipped[0].reason}")
            mesh.barrier()
            if mesh.rank == 0:
                objects.put(name, data)
        mesh.barrier()
        return whole, said


def resharded(url: str) -> dict[str, torch.Tensor]:
    """Loaded into another plan; what a kill left is removed by the next save."""
    with open_mesh(LAYOUTS["tp2"]) as mesh:
        state, store = make(mesh, "tp2"), Store(url, keep=2)
        loaded = store.load_latest(state)
        assert loaded is not None and loaded.step == state.step == 3 and not loaded.skipped
        whole = state.whole()
        state.run(1)
        store.save(state)
        mesh.barrier()
        assert len(Objects(store.path).names()) == 4
        other = make(mesh, "tp2")
        assert store.load(other, str(loaded.path)).step == 3  # of this store, by its URL
        return whole


def die(url: str) -> None:
    """SIGKILL of rank 0 when all data is there, and the manifest is not."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        state, store = make(mesh, "fsdp2"), Store(url)
        store.load_latest(state)
        state.run(1)
        if mesh.rank == 0:
            store._directory.files.write_whole = kill
        store.save(state)


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def prove(world: World, url: str, variables: dict[str, str]) -> None:
    results = world(2, scenario, url, **variables)
    for whole, said in results:
        assert [line.partition(":")[0] for line in said] == ["truncated", "flipped", "missing"]
        assert all("rank-00001.safetensors" in line for line in said)
        assert "bytes changed" in said[1] and "tensor" in said[1]
        assert all(torch.equal(tensor, results[0][0][name]) for name, tensor in whole.items())
    with pytest.raises(WorldError, match="died|Connection|closed"):
        world(2, die, url, **variables)
    saved = results[0][0]
    names = Objects(url).names()
    assert len(names) == 5, names  # what the kill left is there,
    assert verify(Path(url)).step == 3  # and is no checkpoint
    for whole in world(2, resharded, url, **variables):
        assert all(torch.equal(tensor, saved[name]) for name, tensor in whole.items())


def test_a_store_at_a_file_url_is_that_of_the_path(world: World, tmp_path: Path) -> None:
    prove(world, f"file://{tmp_path}/store", {})
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [
        "latest", "lock", "step-00000003", "step-00000004", "store.json",
    ]  # fmt: skip


def test_a_store_on_an_object_store(world: World, s3: dict[str, str]) -> None:
    prove(world, "s3://bucket/run/checkpoints", s3)
    names = Objects("s3://bucket/run/checkpoints").names()
    assert [name.partition(".")[0] for name in names] == ["latest", "step-00000003", "step-00000004", "store"]
    assert Objects("s3://bucket/run").names() == ["checkpoints"]


def in_memory(url: str) -> list[str]:
    with open_mesh(LAYOUTS["one"]) as mesh:
        state, store = make(mesh, "one"), Store(url, keep=Retention(last=1, every=2))
        for _ in range(4):
            state.run(1)
            store.save_async(state).wait()
        kept = [Manifest.read(path, store._directory.files).step for path in store.checkpoints()]
        assert kept == [4, 2]
        newest, said = Objects(store.checkpoints()[0]), []
        data = newest.get("rank-00000.safetensors")
        for kind, damaged in damages(data).items():
            name = "rank-00000.safetensors"
            newest.remove(name) if damaged is None else newest.put(name, damaged)
            fresh = make(mesh, "one")
            with pytest.warns(UserWarning, match="in place of"):
                loaded = Store(url).load_latest(fresh)
            assert loaded is not None and loaded.step == fresh.step == 2
            said.append(f"{kind}: {loaded.skipped[0].reason}")
            other = make(mesh, "one")
            with pytest.warns(UserWarning, match="in place of"):
                begun = resume(Store("memory://test/another"), other, url)
            assert begun is not None and begun.step == other.step == 2, "`--resume URL`"
            newest.put(name, data)
        newest.remove(FILE)  # `latest` says that it was there
        with pytest.warns(UserWarning, match="no readable manifest"):
            assert Store(url).load_latest(make(mesh, "one")).step == 2
        return said


def shared_memory(url: str) -> str:
    with open_mesh(LAYOUTS["fsdp2"]) as mesh, pytest.raises(CheckpointError, match="2 ranks, of which each") as caught:
        state = make(mesh, "fsdp2")
        with pytest.raises(CheckpointError, match="2 ranks, of which each"):
            Store(url).load_latest(state)
        Store(url).save(state)
    return str(caught.value)


def test_a_store_in_memory_is_of_one_process(world: World) -> None:
    [said] = world(1, in_memory, "memory://test/store")
    assert [line.partition(":")[0] for line in said] == ["truncated", "flipped", "missing"]
    assert all("rank-00000.safetensors" in line for line in said)
    assert all("choose a directory" in text for text in world(2, shared_memory, "memory://test/store"))


class Dying(RemoteFiles):
    """A process that is killed before its n-th call that changes something: nothing of it happens after."""

    def __init__(self, root: RemotePath, calls: int) -> None:
        super().__init__(root)
        self.left = calls

    def call(self, name: str, path: Path, act: Any) -> Any:
        changes = name not in ("list", "look at", "open", "read")
        self.left -= changes and self.left > 0
        if self.left <= 0:
            raise KilledError(f"{name} {path}")
        return super().call(name, path, act)

    def remove_tree(self, path: Path) -> None:
        """One object after the other, data first: a server may take them in any order."""
        for name in reversed(self.names(path)):
            self.remove(path / name)


class KilledError(Exception):
    """Of a process that is no more."""


def killed_at_every_call(kind: str) -> list[int]:
    """A save that ends at its n-th change, for every n: which step loads after it."""
    with open_mesh(LAYOUTS["one"]) as mesh:
        steps: list[int] = []
        for number in range(1, 40):
            url = f"memory://points/{kind}{number}"
            state = make(mesh, "one")
            kept = 1 if kind == "prune" else 3
            for _ in range(2):
                state.run(1)
                (store := Store(url, keep=kept)).load_latest(make(mesh, "one"))
                store.save(state)
            dying = Dying(located(url), 1000)
            (last := Store(url, keep=kept, files=dying)).load_latest(state)
            state.run(0 if kind == "again" else 1)
            dying.left = number
            last.save_async(state)
            last.wait()
            found = last.take_findings()
            after = make(mesh, "one")
            loaded = (again := Store(url, keep=kept)).load_latest(after)
            assert loaded is not None and not loaded.skipped and "checksums ok" in loaded.proof.line
            for path in again.checkpoints():
                verify(path)
            steps.append(loaded.step)
            after.run(1)
            again.save(after)
            present = Objects(url).names()
            assert len([name for name in present if ".save-" in name]) == len(again.checkpoints()), present
            if not found:
                return steps
    raise AssertionError("a save that needs 40 calls")


@pytest.mark.parametrize("kind", ["new", "again", "prune"])
def test_a_kill_at_any_call_leaves_the_old_or_the_new(world: World, kind: str) -> None:
    [steps] = world(1, killed_at_every_call, kind)
    assert len(steps) > 4 and steps == sorted(steps) and steps[0] == 2 and steps[-1] == (2 if kind == "again" else 3)


class Deaf(RemoteFiles):
    """Its n-th call is done by the server, and its answer is lost."""

    left = -1

    def call(self, name: str, path: Path, act: Any) -> Any:
        answer = super().call(name, path, act)
        self.left -= 1
        if self.left == 0:
            raise CheckpointError(f"{path}: {name}: no answer")
        return answer


def deaf_at_every_call(kind: str) -> list[tuple[str, int]]:
    """What a save says whose n-th answer is lost, for every n, and which step loads after it."""
    with open_mesh(LAYOUTS["one"]) as mesh:
        told: list[tuple[str, int]] = []
        for number in range(1, 80):
            url = f"memory://deaf/{kind}{number}"
            state, kept = make(mesh, "one"), 1 if kind == "prune" else 3
            last = Store(url, keep=kept, files=(files := Deaf(located(url))))
            last.save(state)
            state.run(1)
            files.left = number
            last.save_async(state)
            last.wait()
            said = [finding.id for finding in last.take_findings()]
            loaded = (again := Store(url, keep=kept)).load_latest(after := make(mesh, "one"))
            assert loaded is not None and not loaded.skipped and loaded.path == again.latest()
            told.append((said[0] if said else "", loaded.step))
            again.save(after)
            assert len(again.checkpoints()) == len([n for n in Objects(url).names() if ".save-" in n])
            if files.left > 0:
                return told
    raise AssertionError("a save that needs 80 calls")


@pytest.mark.parametrize("kind", ["new", "prune"])
def test_an_answer_that_is_lost_damages_nothing(world: World, kind: str) -> None:
    [told] = world(1, deaf_at_every_call, kind)
    steps = [step for _, step in told]
    assert steps == sorted(steps) and steps[0] == 0 and told[-1] == ("", 1)
    assert ("checkpoint.prune", 1) in told and ("checkpoint.save", 0) in told


# ---------------------------------------------------------------- one process, no mesh


def uploaded(url: str, tmp_path: Path, steps: tuple[int, ...] = (7, 8)) -> Objects:
    """Checkpoints that were written on a disk and copied."""
    objects = Objects(url)
    with suppress(FileNotFoundError):
        objects.fs.rm(objects.base, recursive=True)
    objects.put("store.json", json.dumps({"format": "shardwise-store", "schema": 2, "run": IDENTITY.run}).encode())
    for step in steps:
        for file in write_checkpoint(tmp_path, *SPLITS, step).iterdir():
            objects.put(f"step-{step:08d}/{file.name}", file.read_bytes())
    return objects


@pytest.mark.parametrize("url", ["memory://copied", "s3://bucket/copied"])
def test_checkpoints_are_copied_and_looked_at(tmp_path: Path, s3: dict[str, str], url: str) -> None:
    uploaded(url, tmp_path)
    assert verify(Path(url)).num_tensors == len(SPLITS[0])
    assert inspect(Path(f"{url}/step-00000007"))["path"] == f"{url}/step-00000007"
    assert not diff(Path(url), tmp_path / "step-00000007")
    shown = CliRunner().invoke(app, ["ckpt", "inspect", url, "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout)["path"] == f"{url}/step-00000008"
    assert CliRunner().invoke(app, ["ckpt", "diff", url, str(tmp_path / "step-00000008")]).exit_code == 0
    for action in ("convert", "export"):
        refused = CliRunner().invoke(app, ["ckpt", action, str(tmp_path), url])
        assert isinstance(refused.exception, UsageError) or refused.exit_code == 2
        assert not Path("s3:").exists() and not Path("memory:").exists()


def test_a_store_that_is_copied_from_a_url_is_read_on_a_disk(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("{}")
    write_checkpoint(tmp_path, *SPLITS, 7)
    newest = write_checkpoint(tmp_path, *SPLITS, 8).rename(tmp_path / "step-00000008.save-0123abcd")
    assert verify(tmp_path).path == newest and find(str(tmp_path)).path == newest
    newest.rename(tmp_path / "step-00000008.partial-0123abcd")
    assert verify(tmp_path).step == 7 and find_checkpoint(tmp_path) == tmp_path


def test_a_list_that_lacks_the_newest_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, real = uploaded("memory://stale", tmp_path), RemoteFiles.listed
    objects.put("latest", b"step-00000008\n")

    def listed(self: RemoteFiles, path: Path) -> dict[str, int | None]:
        return {name: size for name, size in real(self, path).items() if name != "step-00000008"}

    monkeypatch.setattr(RemoteFiles, "listed", listed)
    assert find("memory://stale").path.name == "step-00000008"


def test_a_removal_leaves_names_that_begin_alike(tmp_path: Path, s3: dict[str, str]) -> None:
    objects = uploaded("s3://bucket/alike", tmp_path, (7,))
    beside = "step-00000007.save-0123abcd"
    for name in ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"):
        objects.put(f"{beside}/{name}", objects.get(f"step-00000007/{name}"))
    directory = directory_of(located("s3://bucket/alike"))
    [twin] = directory.doomed(Retention(last=1))  # two saves of one step
    directory.remove_all([directory.path / "step-00000007"])
    assert (
        objects.names() == [beside, "store.json"] and len(objects.all()) == 4 and twin.name in (beside, "step-00000007")
    )


def test_a_save_is_a_checkpoint_when_every_ranks_object_is_there(tmp_path: Path) -> None:
    url = RemotePath("memory://arrived")
    directory = ObjectDirectory(url, RemoteFiles(url))
    source = write_checkpoint(tmp_path, *SPLITS)
    place = directory.begin(7, IDENTITY.run)
    first, second = (source / f"rank-0000{rank}.safetensors" for rank in range(2))
    directory.files.write_whole(place / first.name, first.read_bytes())
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors: rank 1 wrote \d+ bytes, found none"):
        directory.commit(place, Manifest.read(source))  # rank 1 wrote to another server, or a disk of its own
    assert not directory.listing().complete and not directory.listing().damaged
    directory.files.write_whole(place / second.name, second.read_bytes())
    assert directory.commit(place, Manifest.read(source)) == directory.listing().complete[0][0]
    again = directory.begin(8, IDENTITY.run)
    directory.files.write_whole(again / first.name, b"begun")
    assert directory.begin(9, IDENTITY.run).name not in directory.files.names(url) or again != place
    assert again.name not in directory.files.names(url)  # removed by the next save


def test_reads_take_the_bytes_that_are_needed(tmp_path: Path) -> None:
    shape, url = (4096, 1024), RemotePath("memory://ranges")
    tensors = {"model.w": content("model.w", shape, "float32")}
    source = write_checkpoint(tmp_path, tensors, {"model.w": [(0, Box((0, 0), shape))]}, {"model.w": "float32"})
    files = RemoteFiles(url)
    for file in source.iterdir():
        files.write_whole(url / file.name, file.read_bytes())
    asked: list[int] = []
    cat = files._fs.cat_file

    def counted(key: str, start: int, end: int) -> bytes:
        asked.append(end - start)
        data: bytes = cat(key, start=start, end=end)
        return data

    files._fs.cat_file = counted
    with Reader(url, files=files) as reader:
        reader.file(0)
        before = sum(asked)
        assert before < 64 * 1024  # manifest, header and digests
        rows = np.empty((8, 1024), dtype="u4")
        reader.read("model.w", Box((2000, 0), (8, 1024)), rows)
        assert sum(asked) - before <= 2 * BLOCK and np.array_equal(rows, tensors["model.w"][2000:2008])
        asked.clear()
        assert reader.verify() > 16 * 2**20
        assert len(asked) <= 3 and sum(asked) < 17 * 2**20, asked  # a pass over all reads ahead, and nothing twice


def test_uploads_stream_and_one_that_does_not_end_leaves_nothing(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PART_BYTES", 5 * 2**20)
    url, piece, total = RemotePath("s3://bucket/large"), memoryview(bytes(range(256)) * 4096), 24
    files = RemoteFiles(url)
    assert not files.names(url)  # the first request reads what the library knows of S3
    tracemalloc.start()
    descriptor = files.create(url / "data", total * len(piece))
    for _ in range(total):
        files.write(descriptor, url / "data", piece)
    assert not files.is_file(url / "data")
    files.sync(descriptor, url / "data")
    files.close(descriptor, url / "data")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 2**20, peak  # three parts, not the whole
    opened = files.open(url / "data")
    assert (
        files.size(opened) == total * len(piece) and files.read(opened, url / "data", 2**20 - 2, 4) == b"\xfe\xff\0\1"
    )
    files.release(opened)
    descriptor = files.create(url / "torn", 12 * 2**20)
    for _ in range(6):
        files.write(descriptor, url / "torn", piece)
    files.close(descriptor, url / "torn")
    assert files.names(url) == ["data"]
    assert not files._fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")


URLS = {
    "foo://bucket/run": "found the scheme 'foo'",
    "s3://": "found a URL without a place",
    "s3://bucket/../run": "found a URL without a place, with `..`",
    "s3://bucket/*": "a character that patterns use",
    "simplecache::s3://bucket/run": "found no URL of one scheme",
    "file://relative": "found a host or a relative path, needed file:///path",
    "s3://key:secret@bucket/run": "found a password before 'bucket'",
}


@pytest.mark.parametrize("url", URLS)
def test_a_url_that_cannot_be_a_store_is_refused(url: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Store(url)
    assert URLS[url] in str(caught.value) and "secret" not in str(caught.value)


def test_what_is_missing_is_named(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="bucket does not exist") as caught:
        Store("s3://nobody/run")
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.setenv("HOME", "/nowhere")
        with pytest.raises(CheckpointError, match="NoCredentialsError.*AWS_ACCESS_KEY_ID"):
            Store("s3://bucket/run")

    for library, error in (("s3fs", CheckpointError), ("fsspec", ConfigError)):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            patch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # what has imported it
            with pytest.raises(error, match=rf"{library}.*run: pip install 'shardwise\[remote\]'"):
                Store("s3://bucket/run")


def test_a_server_that_does_not_answer_is_no_damage(
    tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded("s3://bucket/silent", tmp_path)
    directory = directory_of(located("s3://bucket/silent"))
    newest = directory.listing().complete[0][0]

    def refuse(*_: object, **__: object) -> bytes:
        raise importlib.import_module("botocore.exceptions").EndpointConnectionError(endpoint_url="http://gone")

    with Reader(newest, files=directory.files) as reader:
        monkeypatch.setattr(directory.files._fs, "cat_file", refuse)
        with pytest.raises(CheckpointError, match="read failed: found EndpointConnectionError") as caught:
            reader.verify()
    assert not isinstance(caught.value, DamagedError)  # an older checkpoint would be taken for the newest
    monkeypatch.setattr(importlib.import_module("s3fs").S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(CheckpointError, match="EndpointConnectionError: Could not connect.*AWS_ENDPOINT_URL"):
        Store("s3://bucket/silent")


def test_a_remote_path_is_no_path_of_this_machine() -> None:
    path = located("memory://a/b")
    assert str(path / "c") == "memory://a/b/c" and located(Path("memory://a/b")) == path == path.resolve()
    for call in (path.exists, path.stat, path.read_bytes):
        with pytest.raises(TypeError, match="is no file of this machine"):
            call()
    with pytest.raises(CheckpointError, match="outside memory://a/b"):
        RemoteFiles(RemotePath("memory://a/b")).names(RemotePath("memory://a/c"))
    with pytest.raises(CheckpointError, match="outside memory://a/b"):
        RemoteFiles(RemotePath("memory://a/b")).names(RemotePath("memory://a/b/../c"))


@pytest.mark.soak  # in every run: a store there, and the verb with a path
def test_the_train_verb_goes_on_from_a_url_on_a_machine_without_the_run(tmp_path: Path, s3: dict[str, str]) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    small = (
        "--model tiny --layers 2 --dim 32 --heads 2 --ffn 48 --seq 32 --batch 4 --device cpu --no-sample --eval-every 0"
    )
    words = ["--data", str(tmp_path / "text.txt"), "--schedule", "constant", *small.split()]

    def train(out: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shardwise", "train", "--out", str(tmp_path / out), *words, *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    place = ["--checkpoints", "s3://bucket/trained"]
    first = train("first", *place, "--steps", "2", "--nproc", "1")
    assert first.returncode == 0, first.stderr
    assert not (tmp_path / "first" / "checkpoints").exists() and verify(Path(place[1])).step == 2
    second = train("second", *place, "--steps", "3", "--nproc", "2")
    assert second.returncode == 0, second.stderr
    said = (tmp_path / "second" / "resumes.jsonl").read_text()
    assert json.loads(said)["checkpoint"].startswith("s3://bucket/trained/step-00000002")
    assert verify(Path(place[1])).step == 3
