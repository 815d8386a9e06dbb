"""What `shardwise verify` can be given: a script, a run.toml, a preset's name, `hf:NAME`; each as a `Subject`.

Imports no torch: a subject is a target and the words it gets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.options.config import Given, Origin, read_configuration
from shardwise.cli.options.derive import Derived, derive
from shardwise.cli.options.devices import surroundings
from shardwise.cli.options.resolved import configuration_json
from shardwise.errors import ConfigError, ModelError, UsageError
from shardwise.extras import optional_module
from shardwise.findings import Finding
from shardwise.model.spec import ModelSpec, load_spec, refuse_unbuilt
from shardwise.plan.plan import Plan
from shardwise.plan.shrink import LARGE, describe_shrink, shrink
from shardwise.records import write_file
from shardwise.train.kept.rundir import RunDir, write_text

if TYPE_CHECKING:
    from shardwise.diagnose.verifying.subject import Subject

HF = "hf:"


def subject_for(text: str, plan: Plan, words: tuple[str, ...], *, small: bool, device: str) -> Subject:
    """The subject that a word of the command line names.

    Args:
        text: `train.py`, `run.toml`, `llama-8b`, `sizes.toml` or `hf:mistral`.
        plan: what is verified; a shrunk model keeps what it divides.
        words: for a script.
        small: shrink whatever can be shrunk; else models of more than `LARGE` parameters only.
        device: `cpu` or the accelerator's type.

    Raises:
        UsageError: nothing of this name, or words that nobody reads.
        ModelError: a script cannot be shrunk, nor a factory; a preset that no reference model has.
    """
    is_script = text.endswith(".py")
    if words and not is_script:
        raise UsageError(f"verify {text}: words after `--` ({' '.join(words)}) go to a script; found: no script")
    if is_script:
        return _script(text, words, small=small)
    if text.startswith(HF):
        return _hugging_face(text, plan)
    if text.endswith(".toml") and _is_run(Path(text)):
        return _run_toml(Path(text), plan, small=small, device=device)
    return _sizes(named_spec(f"verify {text!r}: no script (.py), run.toml, preset or hf:NAME", text), plan, small=small)


def named_spec(problem: str, text: str) -> ModelSpec:
    """The sizes that a word of the command line names: a preset, by any of its names, or a file.

    Raises:
        UsageError: nothing of this name: `problem`, and the nearest names; or (as ConfigError) a file that does not
            hold sizes, with the line.
    """
    try:
        return load_spec(text)
    except ConfigError:  # it says which line
        raise
    except UsageError as error:
        raise UsageError(f"{problem}; {error}") from None


def _script(text: str, words: tuple[str, ...], *, small: bool) -> Subject:
    from shardwise.diagnose.verifying.subject import Subject

    if not Path(text).is_file():
        raise UsageError(f"verify: cannot run {text!r}: it does not exist; give the path of a Python script")
    if small:
        raise ModelError(
            f"verify {text}: a script builds its own model, so --shrink has nothing to shrink; let the script take the "
            "size as a word, and give a small one after `--`"
        )
    return Subject(target=text, words=words)


def _sizes(spec: ModelSpec, plan: Plan, *, small: bool) -> Subject:
    """A model by its sizes, on random tokens."""
    from shardwise.diagnose.verifying.subject import Subject

    refuse_unbuilt(spec)
    run, notes = spec, tuple[str, ...]()
    if small or spec.num_params > LARGE:
        run = shrink(spec, plan)
        notes = (_shrunk(spec, run),)

    def arguments(each: Plan, directory: Path) -> Sequence[str]:
        path = directory / "sizes.toml"
        write_file(path, {k: v for k, v in vars(run).items() if k != "name"})
        return (str(each), str(path))

    module = "shardwise.diagnose.verifying.random_run"
    return Subject(target=module, name=spec.name, is_module=True, arguments=arguments, spec=spec, notes=notes)


def _shrunk(before: ModelSpec, after: ModelSpec) -> str:
    return f"shrunk: {describe_shrink(before, after)}; ties, ratios of heads and experts per token are kept"


def _hugging_face(text: str, plan: Plan) -> Subject:
    optional_module("transformers", extra="hf", need=f"model {text}")
    from shardwise.cli.options.hf import hf_findings
    from shardwise.diagnose.verifying.random_hf import check_name, small_config
    from shardwise.diagnose.verifying.subject import Subject

    name = text.removeprefix(HF)
    note = check_name(name, plan)

    def arguments(each: Plan, _: Path) -> Sequence[str]:
        return (str(each), name, str(plan))

    def findings(each: Plan) -> Sequence[Finding]:
        return hf_findings(small_config(name, plan), each)

    module = "shardwise.diagnose.verifying.random_hf"
    return Subject(target=module, name=text, is_module=True, arguments=arguments, findings=findings, notes=(note,))


def _is_run(path: Path) -> bool:
    """A run.toml has sections; a file of sizes has numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return True  # its reader says what is wrong
    return "[model]" in text or "[train]" in text or "[data]" in text or "[optimizer]" in text or "[plan]" in text


def _run_toml(path: Path, plan: Plan, *, small: bool, device: str) -> Subject:
    """What `shardwise train` would run, cut short; the data is its own."""
    from shardwise.diagnose.verifying.subject import Subject

    whole = _derived(path, plan, device, {})
    settings, sizes, notes = whole.settings, dict[str, object](), tuple[str, ...]()
    spec = whole.spec
    if small and spec is None:
        raise ModelError(
            f"verify {path}: model.factory makes the model, so --shrink has nothing to shrink; give a factory of a "
            "small model, or leave --shrink out"
        )
    if spec is not None and (small or spec.num_params > LARGE):
        bytes_only = settings.data.tokenizer == "bytes"
        run = shrink(spec, plan, vocab_size=min(spec.vocab_size, 512) if bytes_only else spec.vocab_size)
        keys = ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
        sizes = {f"model.{key}": getattr(run, key) for key in keys}
        sizes["data.seq_len"] = min(int(settings.data.seq_len or 0), run.max_seq_len)
        notes = (_shrunk(spec, _derived(path, plan, device, sizes).spec or run),)
    # chosen once: a batch that grew with the plan would be another run
    fixed = {**sizes, "train.global_batch": settings.train.global_batch, "optimizer.lr": settings.optimizer.lr}

    def arguments(each: Plan, directory: Path) -> Sequence[str]:
        return _write_run(_derived(path, each, device, fixed), RunDir(directory / "run"))

    module = "shardwise.launch.rank.worker"
    return Subject(target=module, name=str(path), is_module=True, arguments=arguments, spec=spec, notes=notes)


def _derived(path: Path, plan: Plan, device: str, more: dict[str, object]) -> Derived:
    values: dict[str, object] = {
        "plan.shorthand": str(plan),
        "train.micro_batches": plan.batch.micro_batches,
        "train.nproc": plan.world,
        "train.device": device,
        "train.eval_every": 0,
        "train.checkpoint_every": 0,
        "train.resume": "never",
        "train.sample": False,
        **more,
    }
    origin = Origin(kind="flag", detail="verify")
    given = [Given(key=key, value=value, origin=origin) for key, value in values.items()]
    if plan.batch.global_size is not None:
        given.append(Given(key="train.global_batch", value=plan.batch.global_size, origin=origin))
    return derive(read_configuration(path, given), surroundings(device, None))


def _write_run(derived: Derived, run: RunDir) -> Sequence[str]:
    write_text(run.config_json, json.dumps(configuration_json(derived), indent=2) + "\n")
    derived.plan.save(run.plan)
    return (str(run.path), "--quiet")
