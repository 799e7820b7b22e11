"""Whatever a file, a configuration or an environment holds: it works or is refused in a line.

In CI the inputs are the same each time. `make fuzz MINUTES=60` draws others for as long and stores
those that it finds, shrunk, in tests/fuzz/corpus/TARGET/WHAT-IT-IS/, whose files replace the good
ones of the same names; a file named NAME.missing says that NAME is not there.
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from tests.fuzz.conftest import Lab
from tests.fuzz.formats import Files, inputs, seal
from tests.fuzz.sandbox import Finding
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).parent / "corpus"
MISSING, MANIFEST = ".missing", "/manifest.json"
ROUND = 400  # inputs that a long fuzz draws from one seed
EXAMPLES = {  # in CI; with the corpus about 90 s on two cores
    "config": 200,
    "launch": 300,
    "start": 6,
    "inspect": 50,
    "export": 30,
    "evaluate": 20,
    "huggingface": 150,
    "remote_model": 150,
    "megatron": 60,
    "tokenizers": 200,
    "indexed": 200,
    "masked": 100,
    "conversations": 100,
    "texts": 100,
    "interrupted": 60,
    "plots": 4,
    "comparison": 100,
}
CASES = sorted(path for path in CORPUS.glob("*/*") if path.is_dir())


class Found(AssertionError):
    """An input that a target does not take well."""

    def __init__(self, finding: Finding, files: Files) -> None:
        super().__init__(str(finding))
        self.finding, self.files = finding, files


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_once_found_stays_mended(case: Path, lab: Lab) -> None:
    target = case.parent.name
    files = stored(case)
    seal(files, lab.files(target))
    finding = lab.sandbox.run(TARGETS[target], lab.good / target, files)
    assert finding is None, str(finding)


@pytest.mark.parametrize("target", TARGETS)
def test_good_files_are_taken(target: str, lab: Lab) -> None:
    whole = TARGETS[target]
    finding = lab.sandbox.run(whole, lab.good / target, {})
    assert finding is None, str(finding)
    assert lab.sandbox.last.code in (0, None), lab.sandbox.last.err


@pytest.mark.parametrize("target", TARGETS)
def test_every_input_works_or_is_refused_in_a_line(target: str, lab: Lab) -> None:
    if not lab.minutes:
        search(target, lab, EXAMPLES[target], known=set())
        return
    found = look_for(target, lab, seconds=60 * lab.minutes / len(TARGETS))
    assert not found, "\n".join(map(str, found))


def search(
    target: str, lab: Lab, examples: int, *, known: set[str], number: int | None = None
) -> None:
    """Try inputs; raises Found with the smallest one whose fault is not among the `known`."""

    @settings(
        max_examples=examples,
        derandomize=number is None,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(files=inputs(target, lab.files(target)))
    def try_one(files: Any) -> None:
        finding = lab.sandbox.run(TARGETS[target], lab.good / target, files)
        if finding is not None and finding.signature not in known:
            raise Found(finding, files)

    (try_one if number is None else seed(number)(try_one))()


def look_for(target: str, lab: Lab, *, seconds: float) -> list[Finding]:
    """Every fault that random inputs show in a time, each told and stored once."""
    found: dict[str, Finding] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        number = random.SystemRandom().randrange(2**32)
        try:
            search(target, lab, ROUND, known=set(found), number=number)
        except Found as error:
            finding = error.finding
            found[finding.signature] = finding
            case = store(finding, error.files, lab.files(target))
            print(f"{finding}\n  stored in {case}", flush=True)
        except Flaky as error:
            print(f"{target}: an input ended well when it was tried again: {error}", flush=True)
    return list(found.values())


def store(finding: Finding, files: Files, good: dict[str, bytes]) -> Path:
    """Write an input to the corpus; a manifest that only seals a checkpoint is left out."""
    bare = Files({name: content for name, content in files.items() if not name.endswith(MANIFEST)})
    sealed = Files(bare)
    seal(sealed, good)
    if sealed == files:
        files = bare
    target = finding.target
    words = re.sub(r"[^a-z0-9]+", "-", finding.signature.lower()).strip("-")[:70].strip("-")
    case = CORPUS / target / words
    for name, content in files.items():
        path = case / (name if content is not None else name + MISSING)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content or b"")
    return case


def stored(case: Path) -> Files:
    """The input of a case of the corpus."""
    paths = [path for path in sorted(case.rglob("*")) if path.is_file()]
    named = {str(path.relative_to(case)): path.read_bytes() for path in paths}
    return Files(
        {n.removesuffix(MISSING): None if n.endswith(MISSING) else c for n, c in named.items()}
    )
