"""Loss studies: pairs and standard errors, what is compared, and how runs are started and stopped.

The jobs of the runner's tests are small Python programs in place of pretrain.py.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coatlm.config import Config, load
from coatlm.optim.schedule import learning_rate
from tests.forks import Forked
from tools import study_loss
from tools.studies import loss_runs
from tools.studies.loss_lines import Line, Prepared, check_comparable, newest, prepare
from tools.studies.loss_runs import CPU, Ended, Places, StudyJob, run_jobs
from tools.studies.loss_study import LossStudy, StudyRecipe, read_study
from tools.studies.loss_table import difference, markdown, tabulate

ROOT = Path(__file__).parents[2]
TINY = """
base:
  model: {{layers: 1, hidden: 32, heads: 2, ffn: 48}}
  data: {{text: [{0}/text.txt], seq_len: 32, split: [90, 10, 0], cache_dir: {0}/cache}}
  precision: {{recipe: fp32}}
  parallel: {{zero: 0, grad_comm: fp32}}
  train: {{steps: 6, micro_batch: 4, global_batch: 4, eval_every: 1000, eval_batches: 2}}
  optim: {{warmup_steps: 2}}
  checkpoint: {{every: 0}}
  log: {{every: 1}}
seeds: [3, 5]
reference: fp32
recipes:
  fp32: []
  eps: [optim.eps=1.1e-8]
  broken: [optim.clip_grad=1.0e-300, train.max_skipped=1, optim.lr=1.0e+30]
"""


def written(tmp_path: Path, text: str = TINY) -> Path:
    lines = "".join(f"{i} plus {i * 7 % 11} is {i + i * 7 % 11}\n" for i in range(2000))
    (tmp_path / "text.txt").write_text(lines)
    (tmp_path / "tiny.yaml").write_text(text.format(tmp_path))
    return tmp_path / "tiny.yaml"


def line(recipe: str, seed: int, loss: float = 2.0, **other: Any) -> Line:
    return {
        "study": "s",
        "recipe": recipe,
        "seed": seed,
        "state": "done",
        "overrides": [],
        "ranks": 1,
        "protocol": {"train.steps": 6},
        "device": "cpu",
        "data": "a",
        "val_loss": loss,
        "last_loss": 2 * loss,
        "tokens_per_s": 1.0,
        "peak_gib": None,
        **other,
    }


# --- pairs --------------------------------------------------------------------------------------


def test_standard_error_is_that_of_numpy_over_seeds_of_both_recipes() -> None:
    rng = np.random.default_rng(0)
    a, b = 2 + rng.random(7), 2 + rng.random(7)
    lines = [line("bf16", s, float(x)) for s, x in enumerate(a)]
    lines += [line("coat", s, float(x)) for s, x in enumerate(b[:5])] + [line("coat", 99, 9.0)]
    row = tabulate(lines, "bf16")[1]
    found, percent = row.differences["val_loss"], 100 * (b[:5] - a[:5]) / a[:5]
    assert row.runs == 6 and found.pairs == 5
    assert found.mean == pytest.approx(np.mean(percent))
    assert found.error == pytest.approx(np.std(percent, ddof=1) / np.sqrt(5))
    assert found.sd == pytest.approx(statistics.stdev(percent))
    assert (found.smallest, found.largest) == pytest.approx((percent.min(), percent.max()))
    assert row.losses["last_loss"] == pytest.approx(2 * (b[:5].sum() + 9) / 6)


def test_only_runs_from_the_same_trunk_are_pairs_and_a_trunk_is_no_row() -> None:
    lines = [line("bf16", 1, 2.0, trunk="a"), line("bf16", 1, 2.5, trunk="b")]
    lines += [line("coat", 1, 2.1, trunk="a"), line("coat", 2, 2.1, trunk="b")]
    lines += [line("trunk", 9, 3.0, trunk="a"), line("trunk", 9, 3.0, trunk="b")]
    rows = tabulate(lines, "bf16")
    assert [row.recipe for row in rows] == ["bf16", "coat"]
    found = rows[1].differences["val_loss"]
    assert (rows[1].runs, found.pairs) == (2, 1) and found.mean == pytest.approx(5.0)


def test_texts_may_differ_between_trunks_and_not_within_one() -> None:
    a = [line(recipe, 1, loss, trunk="a") for recipe, loss in (("bf16", 2.0), ("coat", 2.1))]
    b = [line(recipe, 2, 3.0, trunk="b", data="b") for recipe in ("bf16", "coat")]
    assert tabulate([*a, *b], "bf16")[1].differences["val_loss"].mean == pytest.approx(2.5)
    assert tabulate([*a, *b], "bf16")[0].losses["val_loss"] is None  # of which text?
    for trunk, data in (("b", "c"), ("a", "b"), (None, "b"), (None, "a")):
        other = line("fp8", 2, trunk=trunk, data=data)
        for lines in ([*a, *b, other], [*a, other, *b], [other, *a, *b]):
            with pytest.raises(ValueError, match="data: "):
                tabulate(lines, "bf16")


def test_one_pair_has_no_standard_error_and_no_pair_no_mean() -> None:
    assert difference([2.02], [2.0]).mean == pytest.approx(1.0)
    assert difference([2.02], [2.0]).error is None
    assert difference([], []).mean is None


def test_a_failed_run_is_counted_and_not_compared() -> None:
    failed = line("coat", 2) | {"state": "failed", "val_loss": None, "last_loss": None}
    rows = tabulate([line("bf16", 1), line("bf16", 2), line("coat", 1, 2.2), failed], "bf16")
    assert (rows[1].failed, rows[1].differences["val_loss"].pairs) == (1, 1)
    assert "| `coat` | 1 | 1 | +10.000 |" in "\n".join(markdown(rows))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": "b"}, "data: a and b"),
        ({"device": "cuda"}, "device: cpu and cuda"),
        ({"study": "t"}, "study: s and t"),
        ({"protocol": {"train.steps": 7}}, "protocol train.steps: 6 and 7"),
        ({"protocol": {"train.steps": 6, "optim.lr": 1.0}}, "protocol optim.lr: default and 1.0"),
    ],
)
def test_lines_of_other_data_or_protocols_are_refused_by_name(
    change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        tabulate([line("bf16", 1), line("coat", 1) | change], "bf16")


def test_a_recipe_whose_overrides_changed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overrides: \[\] and \['a=1'\]"):
        check_comparable(line("coat", 1), line("coat", 2, overrides=["a=1"]))
    check_comparable(line("bf16", 1), line("coat", 1, overrides=["a=1"]))


def test_a_later_line_replaces_a_failed_one_and_never_a_finished_one() -> None:
    failed = line("coat", 1, state="failed")
    assert newest([failed, line("coat", 1)])["coat", 1, None]["state"] == "done"
    assert newest([line("coat", 1), failed])["coat", 1, None]["state"] == "done"
    with pytest.raises(ValueError, match="recipe=coat seed=1: has two lines"):
        newest([line("coat", 1), line("coat", 1)])


# --- the study file -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("eps: [optim.eps=1.1e-8]", "eps: [train.steps=7]", "train.steps is the same for all"),
        (
            "eps: [optim.eps=1.1e-8]",
            "eps: ['train={{steps: 7}}']",
            "train.steps is the same for all",
        ),
        ("eps: [optim.eps=1.1e-8]", "eps: {{ranks: 0}}", r"recipes.eps.ranks=0: must be"),
        ("eps: [optim.eps=1.1e-8]", "eps: {{rank: 2}}", r"recipes.eps.rank: allowed are ranks"),
        ("eps: [optim.eps", "a/b: [optim.eps", "recipes.a/b: a recipe names a directory"),
        ("seeds: [3, 5]", "seeds: [3, 3]", r"seeds=\[3, 3\]: must be 1 to"),
        ("reference: fp32", "reference: bf16", "reference='bf16': must be one of fp32, eps"),
        ("seeds: [3, 5]", "sead: 2", "sead: unknown field; allowed are base"),
        ("seeds: [3, 5]", "seeds: 1\nfree: [optim.lr]", "free: optim.lr: recipes may change it"),
    ],
)
def test_a_wrong_study_is_refused_by_field(tmp_path: Path, old: str, new: str, named: str) -> None:
    assert old in TINY
    with pytest.raises(ValueError, match=named):
        read_study(written(tmp_path, TINY.replace(old, new)))


def test_a_wrong_override_of_a_recipe_is_refused_with_its_name(tmp_path: Path) -> None:
    study = read_study(written(tmp_path, TINY.replace("optim.eps=1.1e-8", "optim.eps=-1")))
    with pytest.raises(ValueError, match=r"recipes.eps: optim.eps=-1"):
        study.config(tmp_path, "eps", 3)


def test_runs_of_a_seed_differ_by_the_recipes_overrides_only(tmp_path: Path) -> None:
    study = read_study(written(tmp_path), ["train.steps=9"])
    a, b = (
        dict(load.dotted(study.config(tmp_path, name, 5).model_dump(mode="json")))
        for name in ("fp32", "eps")
    )
    assert {k for k in a if a[k] != b[k]} == {"run.dir", "run.name", "optim.eps"}
    assert a["run.seed"] == 5 and a["train.steps"] == study.protocol()["train.steps"] == 9


def test_a_free_key_may_differ_and_is_not_in_the_protocol(tmp_path: Path) -> None:
    text = TINY.replace("eps: [optim.eps=1.1e-8]", "eps: [train.steps=7]")
    study = read_study(written(tmp_path, text + "free: [train.steps]\n"))
    assert study.config(tmp_path, "eps", 3).train.steps == 7
    assert study.config(tmp_path, "fp32", 3).train.steps == 6
    assert "train.steps" not in study.protocol()


STUDIES = sorted((ROOT / "configs/studies").glob("*.yaml"))
STUDIES.remove(ROOT / "configs/studies/finetune.yaml")  # it has no data until its tool prepares it


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_every_run_of_the_studies_in_configs_is_valid(path: Path, tmp_path: Path) -> None:
    study = read_study(path)
    for name in study.recipes:
        config = study.config(tmp_path, name, study.seeds[0])
        assert config.data_parallel_size(study.recipes[name].ranks)
        assert config.checkpoint.every == 0 or study.trunk is None
    if study.trunk is not None:
        trunk = study.trunk_config(tmp_path)
        assert trunk.checkpoint.every == trunk.train.steps
        assert config.optim.decay_steps == config.train.steps - trunk.train.steps
        before = learning_rate(trunk.train.steps - 1, trunk.optim, trunk.train.steps)
        after = learning_rate(trunk.train.steps, config.optim, config.train.steps)
        assert before == trunk.optim.lr and config.optim.min_lr < after < before


# --- starting and stopping ----------------------------------------------------------------------

SHOW = """
import os, pathlib, sys, time
out, together, end = pathlib.Path(sys.argv[1]), int(sys.argv[4]), time.monotonic() + 60
with out.open("a") as file:
    file.write(" ".join([sys.argv[2], os.environ["CUDA_VISIBLE_DEVICES"], os.environ["RANK"],
                         os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]]) + "\\n")
while len(out.read_text().splitlines()) < together:
    time.sleep(0.02)
    if time.monotonic() > end:
        sys.exit("alone")
print("end of", sys.argv[2])
sys.exit(int(sys.argv[3]))
"""
SAVES = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).write_text("begun")
time.sleep(60)
"""


def jobs(tmp_path: Path, count: int, *, ranks: int = 1) -> list[StudyJob]:
    study = LossStudy("s", {}, (), (1,), "r", {"r": StudyRecipe((), ranks)})
    return [StudyJob("r", seed, study.config(tmp_path, "r", seed), ranks) for seed in range(count)]


def show(tmp_path: Path, *, code: int = 0, together: int = 1) -> Callable[[StudyJob], list[str]]:
    """A command that notes its GPU and rank, waits for `together` such notes, and exits."""
    words = [sys.executable, "-c", SHOW, str(tmp_path / "seen")]
    return lambda job: [*words, str(job.seed), str(code), str(together)]


def test_jobs_take_the_emptiest_gpu_and_a_job_of_two_ranks_both(tmp_path: Path) -> None:
    ended: list[StudyJob] = []
    single, double = jobs(tmp_path, 3), jobs(tmp_path, 4, ranks=2)[3:]
    places = Places.of(["4", "7"], per_gpu=1)
    assert run_jobs(
        [*single, *double],
        places,
        lambda job, how: ended.append(job),
        command=show(tmp_path, together=2),
    )
    seen = sorted(line.split() for line in (tmp_path / "seen").read_text().splitlines())
    assert [words[1] for words in seen[:2]] == ["4", "7"] and seen[2][1] in ("4", "7")
    assert seen[3:] == [["3", "4,7", "0", "0", "2"], ["3", "4,7", "1", "1", "2"]]
    assert ended[-1].seed == 3 and places.free == {"4": 1, "7": 1}


def test_a_gpu_holds_as_many_jobs_as_told(tmp_path: Path) -> None:
    codes: list[int] = []
    assert run_jobs(
        jobs(tmp_path, 4),
        Places.of(["0"], per_gpu=4),
        lambda job, how: codes.append(how.code),
        command=show(tmp_path, together=4),
    )
    assert codes == [0] * 4
    assert {note.split()[1] for note in (tmp_path / "seen").read_text().splitlines()} == {"0"}


def test_a_job_of_more_ranks_than_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"recipes.r.ranks=2: there are 1 GPUs"):
        Places.of(["0"], per_gpu=3).check(jobs(tmp_path, 1, ranks=2)[0])
    Places.of([CPU], per_gpu=2).check(jobs(tmp_path, 1, ranks=2)[0])


def test_a_failed_job_is_reported_with_code_and_last_line_and_others_go_on(tmp_path: Path) -> None:
    found: dict[int, Ended] = {}
    assert run_jobs(
        jobs(tmp_path, 2),
        Places.of([CPU], per_gpu=1),
        lambda job, how: found.update({job.seed: how}),
        command=lambda job: show(tmp_path, code=7 * (job.seed == 0))(job),
    )
    assert found == {0: Ended(7, "end of 0"), 1: Ended(0, "end of 1")}


def test_a_rank_that_waits_for_a_failed_one_is_killed_and_the_failed_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_runs, "PEERS_S", 0.2)
    source = "import os, sys, time; sys.exit('broken') if os.environ['RANK'] == '1' else None"
    command = [sys.executable, "-c", f"{source}; time.sleep(60)"]
    found: list[Ended] = []
    assert run_jobs(
        jobs(tmp_path, 1, ranks=2),
        Places.of([CPU], per_gpu=2),
        lambda job, how: found.append(how),
        command=lambda job: command,
    )
    assert found == [Ended(1, "broken")]


def test_at_the_end_jobs_get_sigterm_and_none_is_reported(tmp_path: Path) -> None:
    begun = tmp_path / "state"
    command = [sys.executable, "-c", SAVES, str(begun)]
    todo, reported = jobs(tmp_path, 2), list[StudyJob]()
    end = time.monotonic() + 3
    assert not run_jobs(
        todo,
        Places.of([CPU], per_gpu=1),
        lambda job, how: reported.append(job),
        end=end,
        command=lambda job: command,
    )
    assert begun.read_text() == "saved" and reported == [] and time.monotonic() < end + 20
    assert len(todo[0].pieces()) == 1 and todo[1].pieces() == []


# --- the whole tool -----------------------------------------------------------------------------


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a study do not import torch one by one."""
    monkeypatch.setattr(
        loss_runs, "subprocess", SimpleNamespace(**(vars(subprocess) | {"Popen": Forked}))
    )


def cut_when(path: Path) -> None:
    """Send SIGTERM to this process once `path` has a line."""
    end = time.monotonic() + 120
    while time.monotonic() < end and not (path.exists() and path.stat().st_size):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_study_is_cut_continued_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked: None
) -> None:
    study, out = written(tmp_path), tmp_path / "tiny.jsonl"
    call = [str(study), "--runs", str(tmp_path / "runs"), "--out", str(out), "--per-gpu", "2"]
    few = [*call, "train.steps=400"]
    metrics = tmp_path / "runs/fp32-3/metrics.jsonl"
    cutter = threading.Thread(target=cut_when, args=(metrics,))
    cutter.start()
    assert study_loss.main(few) == 85
    cutter.join()
    assert metrics.exists() and not (metrics.parent / "checkpoints/step_00000400").exists()
    assert study_loss.main(few) == 1  # one recipe fails
    assert "resumed from" in (tmp_path / "runs/jobs/fp32-3.log").read_text()
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert {(x["recipe"], x["seed"], x["state"]) for x in lines} == {
        *(("fp32", 3, "done"), ("fp32", 5, "done"), ("eps", 3, "done"), ("eps", 5, "done")),
        *(("broken", 3, "failed"), ("broken", 5, "failed")),
    }
    for x in lines:
        if x["state"] == "failed":
            assert x["exit_code"] == 3 and "train.max_skipped" in x["last_line"]
            continue
        assert x["steps"] == 400 and x["tokens"] == 400 * 4 * 32
        assert x["bits_per_byte"] == pytest.approx(x["val_loss"] / math.log(2))
        assert x["eval_tokens"] == 2 * 4 * 32 and x["skipped"] == 0 and x["versions"]["torch"]
    assert len(json.loads((tmp_path / "runs/jobs/fp32-3.pieces").read_text())) == 2
    by_key = {(x["recipe"], x["seed"]): x for x in lines}
    assert by_key["eps", 3]["first_loss"] == by_key["fp32", 3]["first_loss"]  # the same weights
    assert by_key["fp32", 3]["first_loss"] != by_key["fp32", 5]["first_loss"]
    with out.open("a") as file:  # as of a run on another kind of machine, with a curve over time
        found = map(json.loads, out.read_text().splitlines())
        last = next(x for x in found if x["state"] == "done")
        curve = [[1, 1.0, 9.0], *last["evaluations"]]
        away = last | {"evaluations": curve, "seed": 99, "versions": {"gpu": "another"}}
        home = away | {"seed": 98, "versions": {"gpu": "this one"}}
        file.write(json.dumps(away) + "\n" + json.dumps(home) + "\n")
    assert study_loss.main([str(study), "--out", str(out), "--report"]) == 0
    said = capsys.readouterr().out
    assert "| `eps` | 2 | 0 |" in said and "no table over time: gpu: another and this one" in said
    out.write_text("".join(x + "\n" for x in out.read_text().splitlines()[:-2]))
    table = json.loads(out.with_suffix(".json").read_text())
    (eps,) = (row for row in table if row["recipe"] == "eps")
    assert eps["differences"]["val_loss"]["pairs"] == 2
    assert out.with_suffix(".png").stat().st_size > 5000
    capsys.readouterr()
    assert study_loss.main([str(study), "--out", str(out), "--report"]) == 0
    assert "| `eps` | 2 | 0 |" in capsys.readouterr().out
    assert study_loss.main([*call, "--recipes", "eps"]) == 2
    assert "config.yaml: train.steps=400, now 6: give another --runs" in capsys.readouterr().err
    # runs of another text are not those of this one
    (tmp_path / "another.txt").write_text("two and two are four\n" * 2000)
    elsewhere = [*few[:4], str(tmp_path / "new.jsonl"), *few[5:]]
    assert study_loss.main([*elsewhere, f"data.text=[{tmp_path}/another.txt]"]) == 2
    assert "-3: began from new weights, data " in capsys.readouterr().err
    assert not (tmp_path / "new.jsonl").exists()
    other = [*call[:2], str(tmp_path / "other"), *call[3:], "--recipes", "eps"]
    assert study_loss.main(other) == 2
    assert "protocol train.steps: 6 and 400" in capsys.readouterr().err


def test_the_minutes_of_a_study_begin_before_its_text_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(config: Config) -> Prepared:
        time.sleep(0.5)
        return prepare(config)

    monkeypatch.setattr(study_loss, "prepare", slowly)
    runs = tmp_path / "runs"
    call = [str(written(tmp_path)), "--runs", str(runs), "--out", str(tmp_path / "tiny.jsonl")]
    assert study_loss.main([*call, "--minutes", "0.005"]) == 85
    assert not list(runs.glob("jobs/*.yaml"))  # nothing has begun


BRANCHES = (
    TINY.replace("precision: {{recipe: fp32}}", "precision: {{recipe: bf16}}")
    .replace("steps: 6, micro_batch: 4", "steps: 200, micro_batch: 2")
    .replace("warmup_steps: 2", "warmup_steps: 2, schedule: wsd, decay_steps: 40")
    .split("reference")[0]
    + """
reference: bf16
trunk: [train.steps=160, optim.schedule=constant, optim.decay_steps=null, checkpoint.every=160]
recipes:
  bf16: []
  states: [optim.recipe=coat-lean]
  layers: [precision.recipe=coat]
"""
)


def test_a_trunk_is_trained_once_and_all_runs_continue_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked: None
) -> None:
    study, out, runs = written(tmp_path, BRANCHES), tmp_path / "tiny.jsonl", tmp_path / "runs"
    call = [str(study), "--runs", str(runs), "--out", str(out), "--per-gpu", "2"]
    call += ["--trunk-ranks", "2"]
    cutter = threading.Thread(target=cut_when, args=(runs / "trunk/metrics.jsonl",))
    cutter.start()
    assert study_loss.main(call) == 85  # in the trunk
    cutter.join()
    assert not out.exists() and not (runs / "bf16-3").exists()
    assert study_loss.main(call) == 0
    assert "resumed from" in (runs / "jobs/trunk.log").read_text()
    lines = {(x["recipe"], x["seed"]): x for x in map(json.loads, out.read_text().splitlines())}
    recipes = ("bf16", "states", "layers")
    assert lines.keys() == {("trunk", 1234), *((r, s) for r in recipes for s in (3, 5))}
    assert len({x["trunk"] for x in lines.values()}) == 1
    assert {x["ranks"] for x in lines.values() if x["recipe"] != "trunk"} == {1}
    assert lines["trunk", 1234]["ranks"] == 2
    assert lines["trunk", 1234]["steps"] == 160 and lines["trunk", 1234]["tokens"] == 160 * 128
    first: dict[tuple[str, int], float] = {}
    for (recipe, seed), x in lines.items():
        if recipe == "trunk":
            continue
        assert x["tokens"] == 200 * 128 and x["val_loss"] < lines["trunk", 1234]["val_loss"] * 1.05
        text = (runs / f"{recipe}-{seed}/metrics.jsonl").read_text().splitlines()
        records = [json.loads(record) for record in text]
        assert [r["step"] for r in records if "loss" in r] == list(range(161, 201))
        first[recipe, seed] = records[0]["loss"]
        assert x["evaluations"] == [[200, x["evaluations"][0][1], x["val_loss"]]]
    for seed in (3, 5):  # the same weights; another recipe of states counts from the next step
        assert first["states", seed] == first["bf16", seed] != first["layers", seed]
        assert first["layers", seed] == pytest.approx(first["bf16", seed], rel=0.02)
        assert lines["states", seed]["last_loss"] != lines["bf16", seed]["last_loss"]
    assert first["bf16", 3] != first["bf16", 5]  # another order of samples
    said = (runs / "states-3/train.log").read_text()
    assert "optim.recipe: adamw-fp32 -> coat-lean" in said and "resumed from" in said
    assert {x["begin"] for key, x in lines.items() if key[0] != "trunk"} == {160}
    before = out.read_text()
    assert study_loss.main(call) == 0 and out.read_text() == before
    capsys.readouterr()
    assert study_loss.main([str(study), "--out", str(out), "--report"]) == 0
    assert "| `states` | 2 | 0 |" in capsys.readouterr().out
    # a run that began from another trunk does not go on beside those of this one
    assert "trunk" in (runs / "jobs/states-3.start").read_text()
    (runs / "jobs/states-3.start").write_text("another")
    out.write_text("".join(x + "\n" for x in before.splitlines() if '"states", "seed": 3' not in x))
    assert study_loss.main(call) == 2
    assert "states-3: began from another, now trunk" in capsys.readouterr().err
    # nor does one that began before there was a trunk; the trunk is not trained for nothing
    shutil.rmtree(runs / "trunk")
    assert study_loss.main([*call[:4], str(tmp_path / "new.jsonl"), *call[5:]]) == 2
    assert "-3: began before trunk: give another --runs" in capsys.readouterr().err
    assert not (runs / "trunk").exists()


def test_a_trunk_that_diverges_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked: None
) -> None:
    study = written(tmp_path, BRANCHES)
    study.write_text(study.read_text().replace("trunk: [", "trunk: [optim.lr=1.0e30, "))
    call = [str(study), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "o.jsonl")]
    assert study_loss.main(call) == 2
    said = capsys.readouterr().err
    assert "trunk: failed with exit code 3" in said or "not finite" in said


def test_a_reference_that_is_no_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = written(tmp_path)
    study.write_text(study.read_text().replace("reference: fp32", "reference: [fp32]"))
    assert study_loss.main([str(study), "--runs", "r", "--out", "o.jsonl"]) == 2
    assert "reference=['fp32']: must be one of" in capsys.readouterr().err


def test_a_trunk_as_long_as_its_branches_is_refused(tmp_path: Path) -> None:
    study = read_study(written(tmp_path, BRANCHES), ["train.steps=160"])
    with pytest.raises(ValueError, match=r"trunk: train.steps=160: must be below the 160"):
        study.trunk_config(tmp_path)


@pytest.mark.parametrize("ranks", ["0", "9"])
def test_a_trunk_on_more_ranks_than_a_machine_has_is_refused(
    tmp_path: Path, ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = [str(written(tmp_path, BRANCHES)), "--runs", "r", "--out", "o.jsonl"]
    with pytest.raises(SystemExit) as ended:
        study_loss.main([*call, "--trunk-ranks", ranks])
    assert ended.value.code == 2 and f"--trunk-ranks {ranks}: 1 to 8" in capsys.readouterr().err
