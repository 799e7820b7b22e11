"""Importing megatron-core: without a GPU, and without what coatlm does not use of it.

megatron-core names CUDA in literals (`device="cuda"`, `torch.cuda.current_device()`, tensor-type
strings) that no configuration reaches. Where no GPU is present, `install` adds an import hook that
rewrites those literals in the source of `megatron.core` as it is imported. What is rewritten is not
written to disk, and on a machine with a GPU the hook does nothing. `without_trackers`,
`deferred_compilation` and `hide_transformer_engine` shorten the import, with and without a GPU.

Every rule must match somewhere in the installed megatron-core: `unmatched_rules` lists those that
do not, and a test keeps that list empty for each supported version.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

PACKAGE = "megatron.core"
RANDOM = "megatron.core.tensor_parallel.random"
TRACKERS = ("wandb", "torch.utils.tensorboard")  # imported by megatron-core if installed
TRANSFORMER_ENGINE = "transformer_engine"  # imported by megatron-core if installed
WORDS = ("cuda", "pin_memory", "torch.compile")  # every match of a rule in the source has one
SKIPPED = ".fsdp"  # CUDA only, imported lazily by megatron and never used here


@dataclass(frozen=True)
class Rule:
    """Replace every match of `pattern` in megatron's source."""

    pattern: re.Pattern[str]
    replacement: str


RULES = tuple(
    Rule(re.compile(pattern), replacement)
    for pattern, replacement in (
        # allocation of tensors
        (r"torch\.cuda\.current_device\(\)", "torch.device('cpu')"),
        (r"\bdevice\s*=\s*(['\"])cuda\1", "device='cpu'"),
        (r"\binit_data\((['\"])cuda\1\)", "init_data('cpu')"),
        (r"(['\"])torch\.cuda\.(Float|Half|BFloat16)Tensor\b", r"\1torch.\2Tensor"),
        (r"\bpin_memory\s*=\s*True", "pin_memory=False"),
        # copies to a device
        (r"\.cuda\(", ".to('cpu', "),
        (r"\.to\('cpu', (torch\.device\('cpu'\))?\)", ".to('cpu')"),
        # streams and synchronization
        (r"torch\.cuda\.synchronize\(\)", "None"),
        (r"torch\.cuda\.current_stream\(\)", "None"),
        # random numbers
        (r"torch\.cuda\.random\.get_rng_state\(device=device\)", "torch.get_rng_state()"),
        (r"torch\.cuda\.(get_rng_state|manual_seed)\b", r"torch.\1"),
        # torch.compile, which needs a C compiler that the machine may lack
        (r"jit_fuser = torch\.compile", "jit_fuser = noop_decorator"),
    )
)


def rewrite(source: str) -> str:
    """`source` of a megatron module with its CUDA literals replaced, rules in order."""
    if not any(word in source for word in WORDS):  # much faster than the patterns
        return source
    for rule in RULES:
        source = rule.pattern.sub(rule.replacement, source)
    return source


def unmatched_rules() -> list[str]:
    """Patterns that match nothing in the installed megatron-core, as its source has changed."""
    unmatched = {rule.pattern.pattern for rule in RULES}
    for path in sorted(_package_directory().rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for rule in RULES:  # in order: a rule may match what an earlier one produced
            source, count = rule.pattern.subn(rule.replacement, source)
            if count:
                unmatched.discard(rule.pattern.pattern)
    return sorted(unmatched)


def install() -> None:
    """Make `import megatron.core` work without a GPU. Call it before the first such import."""
    if torch.cuda.is_available() or any(isinstance(f, _Finder) for f in sys.meta_path):
        return
    assert PACKAGE not in sys.modules, "install the hook before the first import of megatron.core"
    sys.meta_path.insert(0, _Finder())


@contextlib.contextmanager
def without_trackers() -> Iterator[None]:
    """Let megatron-core be imported as if no tracker were installed, which saves half a second.

    Only parts of it that coatlm does not use log to trackers. Afterwards they can be imported.
    """
    absent = [name for name in TRACKERS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextlib.contextmanager
def without_messages() -> Iterator[None]:
    """Silence what imports of megatron-core say about packages and compilers that coatlm needs not.

    For example, torch built for CUDA logs on a machine without a GPU where it found a compiler.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def hide_transformer_engine() -> None:
    """Make TransformerEngine appear not to be installed, for the rest of the process.

    megatron-core imports it wherever it is installed, which takes seconds, and only `model.spec=te`
    uses it. Does nothing if megatron-core or TransformerEngine is imported already.
    """
    if PACKAGE not in sys.modules:
        sys.modules.setdefault(TRANSFORMER_ENGINE, None)  # type: ignore[arg-type]


@contextlib.contextmanager
def deferred_compilation() -> Iterator[None]:
    """While megatron-core is imported, make torch.compile lazy: it compiles at the first call.

    Applying torch.compile imports torch._dynamo, which takes seconds, and most runs never call a
    function that megatron-core compiles.
    """
    compile_now = torch.compile
    torch.compile = functools.partial(_deferred, compile_now)
    try:
        yield
    finally:
        torch.compile = compile_now


def _deferred(
    compile_now: Callable[..., Any], function: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """Stands in for torch.compile: the same options, as `@compile` and as `@compile(...)`."""
    if function is None:
        return functools.partial(_deferred, compile_now, **options)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return compile_now(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not (name == PACKAGE or name.startswith(PACKAGE + ".")) or SKIPPED in name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the source if a rule changes it; else use Python's byte code as usual."""
        source = self.get_data(self.path).decode("utf-8")
        rewritten = rewrite(source)
        if rewritten == source:
            code = super().get_code(fullname)
            assert code is not None  # a module of Python source has code
            return code
        return compile(rewritten, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == RANDOM:
            _track_cpu_generator(module)


def _track_cpu_generator(random: Any) -> None:
    """Let megatron's tracker of named random states drive torch's CPU generator.

    megatron-core's own `fork` switches CUDA states, and warns if the CPU state has changed.
    """

    @contextlib.contextmanager
    def fork(self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        outer_name, outer_state = self._current_state_name, torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer_state)
            self._current_state_name = outer_name

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    random._set_cuda_rng_state = set_state
    random.CudaRNGStatesTracker.fork = fork


def _package_directory() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))
