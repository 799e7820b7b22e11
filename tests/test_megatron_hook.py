"""megatron-core runs on a machine without a GPU because its CUDA literals are rewritten."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from coatlm import megatron_hook

# installed here, and needed neither by a start nor by a step of a usual run
UNUSED = ["matplotlib", "transformers", "tokenizers", "sentencepiece", "tiktoken", "pyarrow"]
UNUSED += ["huggingface_hub", "s3fs", "datasets", "lm_eval", "plotly", "scipy", "pandas"]

# Prints the modules at the first step, and those during whose import garbage was collected.
WATCHED = """
import gc, logging, sys

collected = []
watched = ["torch", "coatlm.train.setup", "coatlm.train.start"]
make = logging.getLogRecordFactory()

def collect(phase, info):
    found = [sys.modules[name] for name in watched if name in sys.modules]
    collected.extend(module.__name__ for module in found if module.__spec__._initializing)

def record(*args, **kwargs):
    made = make(*args, **kwargs)
    if made.getMessage().startswith("step 1/1"):
        print("collected", *collected)
        print("modules", *sys.modules)
    return made

gc.callbacks.append(collect)
logging.setLogRecordFactory(record)
"""


def test_every_rule_still_matches_the_installed_megatron_core() -> None:
    assert megatron_hook.unmatched_rules() == []


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("torch.zeros(2, device='cuda')", "torch.zeros(2, device='cpu')"),
        ("x.cuda()", "x.to('cpu')"),
        ("x.cuda(torch.cuda.current_device())", "x.to('cpu')"),
        ("x.cuda(non_blocking=True)", "x.to('cpu', non_blocking=True)"),
        ("'torch.cuda.BFloat16Tensor'", "'torch.BFloat16Tensor'"),
        ("torch.cuda.is_available()", "torch.cuda.is_available()"),
    ],
)
def test_literals_are_rewritten_and_questions_are_not(source: str, rewritten: str) -> None:
    assert megatron_hook.rewrite(source) == rewritten


def test_the_words_that_are_looked_for_first_are_in_all_that_a_rule_matches() -> None:
    for path in megatron_hook._package_directory().rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for rule in megatron_hook.RULES:
            for found in rule.pattern.finditer(source):
                assert any(word in found[0] for word in megatron_hook.WORDS), (path, found[0])


@pytest.mark.parametrize(("device", "byte_code"), [("cpu", True), ("cuda", False)])
def test_only_a_module_that_no_rule_changes_has_byte_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, byte_code: bool
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "module.py"
    path.write_text(f"options = dict(device='{device}')\n")
    namespace: dict[str, Any] = {}
    exec(megatron_hook._Loader("module", str(path)).get_code("module"), namespace)
    assert namespace["options"] == {"device": "cpu"}
    assert (tmp_path / "__pycache__").exists() is byte_code


@pytest.mark.skipif(torch.cuda.is_available(), reason="the hook stays away from GPUs")
def test_the_hook_is_installed_once_and_leaves_torch_alone() -> None:
    before = torch.cuda.current_device
    megatron_hook.install()
    megatron_hook.install()
    assert sum(type(finder) is megatron_hook._Finder for finder in sys.meta_path) == 1
    assert torch.cuda.current_device is before


def test_a_run_imports_no_trackers_or_compilers_that_it_does_not_use_and_prints_nothing() -> None:
    unused = ["wandb", "tensorboard", "boto3", "megatron.core.datasets.indexed_dataset", *UNUSED]
    if find_spec("transformer_engine") is None:  # which imports the compiler itself
        unused += ["torch._dynamo", "torch._inductor"]
    code = "import sys, coatlm.train.start; print(*sys.modules); import wandb; wandb.init"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(unused) & set(done.stdout.split())
    assert done.stderr == ""


def test_messages_of_imports_are_silenced_and_later_ones_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("torch.utils.cpp_extension")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with megatron_hook.without_messages():
            logger.warning("No CUDA runtime is found")
            warnings.warn("a package is not installed", stacklevel=1)
        assert not shown and not caplog.records
        logger.warning("later")
        warnings.warn("later", stacklevel=1)
    assert len(shown) == 1 and caplog.messages == ["later"]


def test_functions_are_compiled_at_their_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compile_now(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        asked.append(options)
        return lambda *args, **kwargs: ("compiled", function(*args, **kwargs))

    monkeypatch.setattr(torch, "compile", compile_now)
    with megatron_hook.deferred_compilation():
        deferred: Any = torch.compile

        class Layer:
            @deferred
            def double(self, x: int) -> int:
                """Twice x."""
                return 2 * x

        @deferred(dynamic=True)
        def add(x: int, *, y: int) -> int:
            return x + y

        assert not asked
        early = deferred(lambda x: x)(5)  # called before the end of the import
    assert torch.compile is not deferred and early == ("compiled", 5) and asked.pop() == {}
    assert Layer().double(3) == ("compiled", 6) and asked == [{}]
    assert Layer().double(4) == ("compiled", 8) and asked == [{}]
    assert add(1, y=2) == ("compiled", 3) and asked == [{}, {"dynamic": True}]
    assert Layer.double.__name__ == "double" and Layer.double.__doc__ == "Twice x."


def test_only_runs_with_its_layers_import_transformer_engine(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine.py").write_text("print('imported')\nraise ImportError\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    train = "from coatlm.commands.train import main; sys.exit(main(sys.argv[1:]))"
    options = ["quickstart", f"run.dir={tmp_path / 'run'}", "data.text=[configs/*.yaml]"]
    options += ["data.seq_len=16", "train.steps=1", "train.eval_every=0", "checkpoint.every=0"]
    for spec, imported in (("local", False), ("te", True)):
        arguments = [*options, f"model.spec={spec}", "precision.recipe=bf16"]
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; {train}", *arguments],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert ("imported" in done.stdout) is imported, done.stderr
        assert (done.returncode == 0) is not imported  # this stand-in has no layers


def test_a_step_has_imported_nothing_that_it_does_not_need_and_no_import_collected_garbage(
    tmp_path: Path,
) -> None:
    train = "from coatlm.commands.train import main; sys.exit(main(sys.argv[1:]))"
    options = ["quickstart", f"run.dir={tmp_path / 'run'}", "data.text=[configs/*.yaml]"]
    options += [f"data.cache_dir={tmp_path / 'cache'}", "data.seq_len=16", "train.steps=1"]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED + train, *options, "train.eval_every=0"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = {words[0]: words[1:] for line in done.stdout.splitlines() if (words := line.split())}
    assert not set(UNUSED) & set(said["modules"])
    assert {"torch", "megatron.core"} <= set(said["modules"])
    assert said["collected"] == []
