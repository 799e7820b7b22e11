"""Configurations and launchers' variables, from what fields allow to what no field does."""

from __future__ import annotations

import json
import math
from typing import Any, Literal, get_args, get_origin

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from coatlm.config import Config
from coatlm.config.fields import Section
from tests.fuzz.formats import Files
from tests.fuzz.mutations import JSON, ODD, TEXT, damaged

LAUGHS = "".join(  # a billion of them
    f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]\n" for x, y in zip("abcdefgh", "bcdefghi", strict=True)
)
SNIPPETS = (  # of YAML
    "",
    "- a\n",
    "x",
    "null",
    "[]",
    "a: &a [*a]\n",
    "a: &a {b: *a}\n",
    "a: !!python/object/apply:os.mkdir [executed]\n",
    "run: !!binary x\n",
    "run: {dir: !!set {a, b}}\n",
    "train: {steps: 0o17}\n",
    "train: {steps: 2001-01-01}\n",
    "train: {steps: 1:30}\n",
    "? [a, b]\n: c\n",
    "1: 2\n",
    "run: {name: x}\nrun: {name: y}\n",
    "run:\n\tname: x\n",
    "--- {}\n--- {}\n",
    "%YAML 9.9\n---\n{}\n",
    "<<: {run: {name: x}}\n",
    "a: &a [x, x, x, x, x, x, x, x, x]\n" + LAUGHS,
)
WORDS = (
    "",
    "=",
    "=1",
    "a",
    "a.b",
    "run.dir",
    "run.name=",
    "..=1",
    "run[0]=1",
    "a.b.c.d=1",
    "run.name=${run.dir}",
    "run.name='",
    "run.dir=a #b",
    "run.dir=~/x",
    "model={}",
    "model=",
    "data.paths=[{path: a, weight: nan}]",
    "run.name=\x1b[2J\x00",
    "train.steps=" + "9" * 5000,
)
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_JOB_ID",
    "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
)
VALUES = (
    "0",
    "1",
    "2",
    "7",
    "8",
    "29500",
    "65536",
    "True",
    "",
    " ",
    "x",
    "-1",
    "1.5",
    "\u00b2",
    "\u0663",
    "node1",
    "gpu[01-03]",
    "gpu[",
    "[1]",
    ",",
    "4(x2),3",
    "h:1",
    "::1",
    "\n",
    "1 ",
    "+1",
    "0x1",
    "1_0",
    "\x1b[31m",
    "9" * 30,
    "9" * 5000,
    "n" * 3000,
)


def values(annotation: Any) -> SearchStrategy[Any]:
    """What a field takes, and the like."""
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.one_of(st.integers(1, 8), st.sampled_from((0, 12, 16, 64, 128, 10**6, 10**12)))
    if annotation is float:
        return st.sampled_from((0.0, 1e-3, 0.5, 1.0, 2.0, 1e30, 1e300, 5e-324))
    if annotation is str:
        return st.sampled_from(("auto", "none", "byte", "x", "hf:x", "text.txt", "python-stdlib"))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return section(annotation)
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is tuple:
        parts = get_args(annotation)
        if parts[-1] is Ellipsis:
            return st.lists(values(parts[0]), max_size=3)
        return st.tuples(*map(values, parts)).map(list)
    if inner := [part for part in get_args(annotation) if part is not type(None)]:
        return values(inner[0])
    return st.sampled_from(("x", "a/b", "."))


@st.composite
def section(draw: DrawFn, model: type[Section]) -> dict[str, Any]:
    """Some fields of a section, nearly all with values of their types."""
    fields = model.model_fields
    chosen = draw(st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=4))
    odd = st.sampled_from(ODD)
    return {
        name: draw(odd if draw(st.integers(0, 12)) == 12 else values(fields[name].annotation))
        for name in chosen
    }


@st.composite
def configurations(draw: DrawFn, good: dict[str, bytes]) -> Files:
    """config.yaml and the words after it."""
    known = good["config.yaml"]
    kind = draw(st.sampled_from(("fields", "fields", "fields", "json", "text", "snippet", "bytes")))
    if kind == "fields":
        content = json.loads(known)
        for name in draw(st.lists(st.sampled_from(sorted(Config.model_fields)), max_size=3)):
            annotation: Any = Config.model_fields[name].annotation
            content[name] = content.get(name, {}) | draw(section(annotation))
        text = json.dumps(content).encode()
    elif kind == "snippet":
        text = draw(st.sampled_from(SNIPPETS)).encode()
        if draw(st.booleans()):
            text += b"model: {layers: 2}\n"
    else:
        text = {"json": JSON, "text": TEXT, "bytes": damaged}[kind](draw, known)
    words = draw(st.lists(st.one_of(st.sampled_from(WORDS), overrides()), max_size=3))
    ranks = draw(st.sampled_from(([], [], [1], [2], [8], [0], [-1], [3], [10**9])))
    options = {"overrides": [w for w in words if not w.startswith("-")], "ranks": ranks}
    return Files({"config.yaml": text, "options.json": json.dumps(options).encode()})


@st.composite
def overrides(draw: DrawFn) -> str:
    """`section.field=value` for a field of any section."""
    name = draw(st.sampled_from(sorted(Config.model_fields)))
    model: Any = Config.model_fields[name].annotation
    field = draw(st.sampled_from(sorted(model.model_fields)))
    value = draw(st.one_of(values(model.model_fields[field].annotation), st.sampled_from(ODD)))
    text = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, float) and not math.isfinite(value):
        text = f".{value}"
    return f"{name}.{field}={text}"


def environments() -> SearchStrategy[Files]:
    """environment.json: variables that launchers set, with values that they do and do not."""
    small = st.dictionaries(st.sampled_from(VARIABLES), st.sampled_from(VALUES), max_size=8)
    torchrun = st.fixed_dictionaries(
        {"RANK": st.sampled_from(VALUES[:5]), "WORLD_SIZE": st.sampled_from(VALUES[:5])}
    )
    srun = st.fixed_dictionaries(
        {
            "SLURM_PROCID": st.sampled_from(VALUES[:5]),
            "SLURM_NTASKS": st.sampled_from(VALUES[:5]),
            "SLURM_LOCALID": st.sampled_from(VALUES[:5]),
            "SLURM_STEP_NODELIST": st.sampled_from(("node1", "gpu[01-03]", "", "[", "a,b")),
        }
    )
    whole = st.tuples(st.one_of(torchrun, srun, st.just({})), small).map(lambda p: p[0] | p[1])
    return whole.map(lambda env: Files({"environment.json": json.dumps(env).encode()}))
