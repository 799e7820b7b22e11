"""The file of a loss study: which recipes are trained with which seeds, on what.

    base:       a run's configuration: its file, relative to the study file, or its sections
    overrides:  [key=value, ...] common to all runs
    seeds:      a list, or a number n for the seeds 1 to n
    reference:  the recipe to which the others are compared
    recipes:    NAME: [key=value, ...]  or  NAME: {ranks: 2, overrides: [key=value, ...]}
    trunk:      [key=value, ...]; optional: one run with these overrides and the reference's trains
                first, and each run of a recipe continues from its last checkpoint, weights and
                states; states of another optim.recipe are converted
    free:       [key, ...]; optional: STIPULATED keys that recipes may change all the same, such as
                train.steps where recipes are compared at equal time

A run is a recipe with a seed, which is run.seed: runs of one seed have the same initial weights (or
trunk) and the same order of samples. With a trunk, the seed changes the order of samples only, and
train.steps counts the trunk's steps as well.

A recipe may change how a run computes, and not what it is given: STIPULATED keys are common to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coatlm.config import Config, ConfigError, dotted, load
from coatlm.train.changes import SILENT

STIPULATED = (
    "run.",
    "data.",
    "checkpoint.",
    "train.steps",
    "train.global_batch",
    "train.eval_batches",
    "model.",
)
FREE = ("model.spec",)  # in the sections of STIPULATED, and yet a recipe's
TRUNK = "trunk"  # name of the trunk's run
FIELDS = ("base", "overrides", "seeds", "reference", "recipes", "trunk", "free")
CHANGES = ("run.seed", "optim.recipe")  # between a trunk and the runs that continue it
MOST_SEEDS = 10_000
MOST_RANKS = 8


@dataclass(frozen=True)
class StudyRecipe:
    """A row of the study: overrides, and the data-parallel ranks of its runs."""

    overrides: tuple[str, ...]
    ranks: int = 1


@dataclass(frozen=True)
class LossStudy:
    """A validated study."""

    name: str
    base: Mapping[str, Any]
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str
    recipes: Mapping[str, StudyRecipe]
    trunk: tuple[str, ...] | None = None
    free: tuple[str, ...] = ()

    def config(self, runs: Path, recipe: str, seed: int) -> Config:
        """The configuration of one run. Raises ConfigError that begins with the recipe."""
        common = [*self.overrides, *self.recipes[recipe].overrides, f"run.seed={seed}"]
        return self._named(f"recipes.{recipe}", common, runs / run_name(recipe, seed), seed)

    def trunk_config(self, runs: Path) -> Config:
        """The configuration of the trunk. Raises ConfigError."""
        assert self.trunk is not None
        words = [*self.overrides, *self.recipes[self.reference].overrides, *self.trunk]
        config = self._named(TRUNK, words, runs / TRUNK, None)
        if not config.checkpoint.every:
            raise ConfigError(f"{TRUNK}: checkpoint.every=0: must be > 0, as runs continue from it")
        last = load.make_config(load.override(self.base, self.overrides)).train.steps
        if config.train.steps >= last:
            raise ConfigError(
                f"{TRUNK}: train.steps={config.train.steps}: must be below the {last} of the runs, "
                "which count the trunk's steps"
            )
        return config

    def protocol(self) -> dict[str, Any]:
        """What all runs have in common: dotted key -> value, where it is not the default.

        Content of the data, seeds, paths and logging are left out.
        """
        config = load.make_config(load.override(self.base, self.overrides))
        defaults = dict(dotted(Config().model_dump(mode="json")))
        left_out = (*SILENT, *self.free, "run.seed", "data.text", "data.paths")
        found = {
            key: value
            for key, value in dotted(config.model_dump(mode="json"))
            if not key.startswith(left_out) and defaults.get(key) != value
        }
        return found | ({} if self.trunk is None else {TRUNK: list(self.trunk)})

    def _named(self, who: str, words: Sequence[str], run: Path, seed: int | None) -> Config:
        words = [*words, f"run.dir={run}", f"run.name={run.name}"]
        if self.trunk is not None and seed is not None:
            words += [f"checkpoint.resume={run.parent / TRUNK}"]
            words += [f"checkpoint.allow_changes=[{','.join(CHANGES)}]"]
        try:
            return load.make_config(load.override(self.base, words))
        except ConfigError as error:
            lines = str(error).splitlines()
            raise ConfigError("\n".join(f"{who}: {line}" for line in lines)) from None


def run_name(recipe: str, seed: int) -> str:
    """The name of a run and of its directory."""
    return f"{recipe}-{seed}"


def read_study(
    path: Path,
    changes: Sequence[str] = (),
    *,
    recipes: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
) -> LossStudy:
    """Read a study; `recipes` and `seeds` choose some of its runs, the reference always included.

    `changes` are overrides behind those of the study, before those of a recipe. Raises ValueError
    (ConfigError for a mistake in a configuration) that names the field.
    """
    found = load.read_mapping(path)
    for name in found:
        if name not in FIELDS:
            raise ValueError(f"{path}: {name}: unknown field; allowed are {', '.join(FIELDS)}")
    free = _words(found.get("free", []), "free")
    for key in free:
        if not key.startswith(STIPULATED):
            raise ValueError(f"free: {key}: recipes may change it anyway")
    rows = {str(n): _recipe(str(n), r, free) for n, r in _mapping(found, "recipes").items()}
    reference = found.get("reference")
    if not isinstance(reference, str) or reference not in rows:
        raise ValueError(f"{path}: reference={reference!r}: must be one of {', '.join(rows)}")
    for name in recipes or ():
        if name not in rows:
            raise ValueError(f"--recipes {name}: must be one of {', '.join(rows)}")
    chosen = [n for n in rows if recipes is None or n in recipes or n == reference]
    base = found.get("base")
    if isinstance(base, str):
        base = load.read_mapping(path.parent / base)
    if not isinstance(base, dict):
        raise ValueError(f"{path}: base={base!r}: must be a file or a mapping of sections")
    trunk = found.get("trunk")
    return LossStudy(
        name=path.stem,
        base=base,
        overrides=(*_words(found.get("overrides", []), "overrides"), *changes),
        seeds=tuple(_seeds(found.get("seeds") if seeds is None else list(seeds))),
        reference=str(reference),
        recipes={name: rows[name] for name in chosen},
        trunk=None if trunk is None else _words(trunk, TRUNK),
        free=free,
    )


def _mapping(found: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
    value = found.get(name)
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{name}={value!r}: must be a mapping with at least one entry")
    return value


def _recipe(name: str, value: Any, free: Sequence[str]) -> StudyRecipe:
    field = f"recipes.{name}"
    if name == TRUNK or not name or set(name) & set("/ \t\n") or name.startswith("."):
        raise ValueError(f"{field}: a recipe names a directory, without spaces, and is not {TRUNK}")
    if isinstance(value, Mapping):
        unknown = set(value) - {"ranks", "overrides"}
        if unknown:
            raise ValueError(f"{field}.{min(map(str, unknown))}: allowed are ranks and overrides")
    else:
        value = {"overrides": value}
    ranks = value.get("ranks", 1)
    if type(ranks) is not int or not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"{field}.ranks={ranks!r}: must be an integer from 1 to {MOST_RANKS}")
    words = _words(value.get("overrides", []), field)
    allowed = tuple(f"{key}." for key in (*FREE, *free))
    for word in words:
        try:
            changes = load.override({}, [word])
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from None
        for key, _ in dotted(changes):  # also those of a mapping
            if key.startswith(STIPULATED) and not f"{key}.".startswith(allowed):
                raise ValueError(f"{field}: {word}: {key} is the same for all recipes of a study")
    return StudyRecipe(words, ranks)


def _words(value: Any, field: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"{field}={value!r}: must be a list of text")
    return tuple(value)


def _seeds(value: Any) -> list[int]:
    if type(value) is int:
        value = list(range(1, value + 1)) if 1 <= value <= MOST_SEEDS else []
    fits = isinstance(value, list) and all(type(seed) is int and seed >= 0 for seed in value)
    if not fits or not 0 < len(value) <= MOST_SEEDS or len(set(value)) < len(value):
        raise ValueError(
            f"seeds={value!r}: must be 1 to {MOST_SEEDS} different integers >= 0, or their number"
        )
    return list(value)
