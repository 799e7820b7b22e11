"""The files in configs/: published sizes, FP8 unless overridden, and the GPUs that they fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coatlm.commands import train
from coatlm.config import PRESETS, Config, load_config
from coatlm.model.accounting import parameters
from coatlm.model.fits import with_fitting
from coatlm.model.layouts import LARGEST_MICRO_BATCH
from coatlm.model.memory import GIB, micro_batches, peak_bytes, replaced
from coatlm.model.rates import load_rates
from coatlm.model.step_time import Cluster, forecast

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
OWN_FORMATS = ("quickstart", "sft-quickstart", "llama-30m")  # for CPUs, and the base of studies
FIT = re.compile(
    r"For (\d+) or more GPUs of (\d+) GB"
    r"(?:, with preset=bf16 too|; preset=bf16 also needs (.+?))\. "
)
RESERVE = 8 * GIB  # for CUDA, NCCL, fragmentation: docs/results/reduction.md counts 5.4 GiB
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
PRETRAINED = [path for path in CONFIGS if not path.stem.startswith(("sft-", *OWN_FORMATS))]


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def peak(config: Config, ranks: int) -> int:
    """The peak of a run on GPUs of 80 GB, with what `auto` decides for them."""
    vocab, dp = config.model.vocab, config.data_parallel_size(ranks)
    assert vocab is not None
    return peak_bytes(with_fitting(config, vocab, dp, 80 * GIB), vocab, dp)


@each(CONFIGS)
def test_a_file_is_named_after_its_run(path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    assert config.run.dir == Path("runs") / path.stem


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_a_published_model_has_its_number_of_parameters(name: str, published: int) -> None:
    model = load_config(CONFIGS[0].parent / f"{name}.yaml").model
    assert model.vocab is not None
    assert parameters(model, model.vocab) == published


def test_every_published_model_is_in_the_table() -> None:
    named = {path.stem for path in PRETRAINED if not path.stem.startswith("llama-")}
    assert named == PUBLISHED.keys()


@each([path for path in CONFIGS if path.stem not in OWN_FORMATS])
def test_formats_are_those_of_a_preset_and_bf16_is_one_override_away(path: Path) -> None:
    after = load_config(path).model.norm_after  # FP8 layers have no norms behind their branches
    for preset, overrides in (("fp8-states" if after else "fp8", []), ("bf16", ["preset=bf16"])):
        values = load_config(path, overrides).model_dump(mode="json")
        for section, keys in PRESETS[preset].items():
            assert {key: values[section][key] for key in keys} == keys


def comment_of(path: Path) -> str:
    """The comment at the top of a file, in one line."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("#")]
    return " ".join(line.removeprefix("# ") for line in lines)


def gpus_of(path: Path) -> tuple[int, int]:
    """The fewest GPUs that a file says it is for, and the bytes that it may use of one."""
    found = FIT.search(comment_of(path))
    assert found, "say for how many GPUs of which memory the file is"
    return int(found[1]), int(found[2]) * GIB - RESERVE


@each(PRETRAINED)
def test_the_planner_confirms_the_gpus_that_a_file_names(path: Path) -> None:
    ranks, limit = gpus_of(path)
    found = FIT.search(comment_of(path))
    assert found is not None
    own, bf16 = load_config(path), ["preset=bf16"]
    assert peak(own, ranks) <= limit
    plain = peak(load_config(path, bf16), ranks)
    if found[3]:
        assert plain > limit
        plain = peak(load_config(path, [*bf16, *found[3].split()]), ranks)
    assert plain <= limit


@each(PRETRAINED)
def test_the_microbatch_of_a_file_is_the_fastest_that_fits_by_the_planner(path: Path) -> None:
    """Within 2 %, on H100s of 80 GB, with all else as in the file."""
    ranks, limit = gpus_of(path)
    config, cluster = load_config(path), Cluster(load_rates("h100"), ranks)
    assert config.model.vocab is not None
    dp, speeds = config.data_parallel_size(ranks), {}
    for size in micro_batches(config, dp):
        sized = replaced(config, train={"micro_batch": size})
        if size <= LARGEST_MICRO_BATCH and peak(sized, ranks) <= limit:
            sized = with_fitting(sized, config.model.vocab, dp, cluster.rates.memory_gib * GIB)
            speeds[size] = forecast(sized, config.model.vocab, cluster).tokens_per_s
    assert speeds[config.train.micro_batch] >= 0.98 * max(speeds.values()), speeds


@each(CONFIGS)
def test_a_file_dry_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(path), "--dry-run"]) == 0
    assert "parameters" in capsys.readouterr().out
