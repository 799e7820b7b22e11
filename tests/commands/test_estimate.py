"""The planner's tables, its proposal, and COAT's Table 7."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from coatlm.commands import fitting
from coatlm.commands.estimate import CASES, TABLE7, best_layout, main
from coatlm.config import load_config
from coatlm.model.memory import GIB, peak_bytes, replaced

ROOT = Path(__file__).resolve().parents[2]
LLAMA = str(ROOT / "configs/llama2-7b.yaml")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    assert main(arguments) == code
    return capsys.readouterr().out.splitlines()


def table(lines: list[str], key: str) -> list[str]:
    """The rows of the table whose first column is `key`."""
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {key} |")) + 2
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines[first:]))


def cells(lines: list[str], key: str, name: str) -> list[str]:
    (row,) = [line for line in table(lines, key) if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.strip("|").split("|")[1:]]


def test_tables_hold_the_peak_of_each_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, LLAMA, "--ranks", "8", "parallel.pp=2")
    config = load_config(LLAMA, ["parallel.pp=2"])

    def peak(**sections: dict[str, str]) -> str:
        return f"{peak_bytes(replaced(config, **sections), 32000, 4) / GIB:.1f}"

    coat = [
        peak(optim={"recipe": "coat"}, parallel={"main_grads": grads})
        for grads in ("fp32", "bf16", "fp8")
    ]
    assert cells(lines, "optim.recipe", "coat") == coat
    modes = ("none", "selective", "full")
    te = [peak(precision={"recipe": "te-delayed"}, train={"recompute": mode}) for mode in modes]
    assert cells(lines, "precision.recipe", "te-delayed") == te
    stages = [line.split() for line in lines if line[:1].isdigit()]
    assert [row[0] for row in stages] == ["0", "1"]
    assert max(float(row[-1]) for row in stages) == pytest.approx(float(peak()), abs=0.05)


def test_fp32_weights_leave_out_recipes_that_cannot_update_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = run(capsys, LLAMA, "preset=bf16", "precision.recipe=fp32")
    names = {line.split("|")[1].strip() for line in table(lines, "optim.recipe")}
    assert names == {"adamw-fp32", "coat", "fp8-plain"}


@pytest.mark.parametrize(
    ("key", "excluded"),
    [
        ("precision.grad_rounding=stochastic", {"rowwise", "coat-rowgrad", "fp8-block"}),
        ("precision.bf16_operands=[forward.weight]", {"coat-paper", "coat-int8", "coat-lean-int8"}),
    ],
)
def test_recipes_that_a_key_of_the_configuration_excludes_are_left_out(
    key: str, excluded: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    usual = table(run(capsys, LLAMA), "precision.recipe")
    left = table(run(capsys, LLAMA, key), "precision.recipe")
    names, others = ({row.split("|")[1].strip() for row in rows} for rows in (usual, left))
    assert names - others == excluded and {"bf16", "te-delayed", "coat"} <= others


def test_recipes_that_a_run_of_the_model_refuses_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Norms behind attention and MLP, and an ffn that is no multiple of 128."""
    behind = table(run(capsys, "configs/olmo2-1b.yaml"), "precision.recipe")
    assert [row.split("|")[1].strip() for row in behind] == ["bf16"]
    narrow = table(run(capsys, LLAMA, "model.ffn=2000"), "precision.recipe")
    names = {row.split("|")[1].strip() for row in narrow}
    assert "fp8-block" not in names and "coat" in names


def test_the_proposed_micro_batch_fits_and_the_next_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (LLAMA, "--ranks", "8", "--memory-gib", "80", "--reserve-gib", "5")
    changed = ["preset=bf16", "train.recompute=full"]
    told = run(capsys, *arguments, *changed)[-1]
    assert told.startswith("largest train.micro_batch within 75.0 GiB: 8 (")
    config = load_config(LLAMA, changed)
    peaks = [
        peak_bytes(replaced(config, train={"micro_batch": n}), 32000, 8) / GIB for n in (8, 16)
    ]
    assert peaks[0] <= 75 < peaks[1]


@pytest.mark.parametrize(("ranks", "share"), [(8, 0.9), (1, 0.94)])
def test_without_a_reserve_the_share_of_the_planner_stays_free(
    capsys: pytest.CaptureFixture[str], ranks: int, share: float
) -> None:
    told = run(capsys, LLAMA, "--ranks", str(ranks), "--memory-gib", "100")[-1]
    assert told.startswith(f"largest train.micro_batch within {100 * share:.1f} GiB: ")


def test_exit_code_1_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not even 1 fits" in run(capsys, LLAMA, "--memory-gib", "24", code=1)[-1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give either CONFIG, --table7 or --fits"),
        ([LLAMA, "--table7"], "give either CONFIG, --table7 or --fits"),
        ([LLAMA, "--memory-gib", "0"], "--memory-gib 0.0 must be above 0"),
        ([LLAMA, "--memory-gib", "inf"], "--memory-gib inf: must be finite"),
        (
            [LLAMA, "--memory-gib", "5", "--reserve-gib", "5"],
            "--memory-gib 5.0 must be above --reserve-gib 5.0",
        ),
        (["--table7", "--memory-gib", "2"], "--memory-gib 2.0 must be above --reserve-gib 2.0"),
        ([LLAMA, "--ranks", "3"], "train.global_batch=1024 is not a multiple"),
        ([LLAMA, "--ranks", "0"], "--ranks 0: at least 1"),
        (["--table7", "--ranks", "8"], "--ranks 8: at least 1, with CONFIG"),
        (["--fits", "--memory-gib", "80"], "--memory-gib 80.0: --fits has GPUs of its own"),
        (["--fits", "--reserve-gib", "-50"], "--reserve-gib -50.0: at least 0"),
        ([LLAMA, "--reserve-gib", "5"], "--reserve-gib 5.0: needs --memory-gib with CONFIG"),
        ([LLAMA, "optim.recipe=sgd"], "optim.recipe='sgd'"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_table7_has_a_row_for_each_case_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "--table7")
    assert len(lines) == 2 + len(CASES) * len(TABLE7)


def test_table7_coat_fits_wherever_it_fits_in_the_paper() -> None:
    for case in CASES:
        for recipes in (r for r in TABLE7 if r.paper == "COAT" and r.main_grads == "bf16"):
            layout, peak, largest = best_layout(case, recipes, 78 * GIB)
            assert peak <= 78 * GIB and largest >= case.batch, (case, layout)


def test_table7_a_7b_model_on_one_gpu_needs_coat() -> None:
    fits = {recipes.name: best_layout(CASES[0], recipes, 78 * GIB)[2] > 0 for recipes in TABLE7}
    assert not fits["bf16, adamw-fp32"] and not fits["te-delayed, adamw-fp32"]
    assert fits["coat-lean, coat-lean, BF16 gradients"]


def test_the_page_about_memory_has_the_table_of_what_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = run(capsys, "--fits")
    assert "\n".join(lines) in (ROOT / "docs/results/memory.md").read_text()
    assert len(lines) == 2 + len(fitting.ROWS)


def test_a_peak_is_named_with_the_smallest_gpu_that_leaves_the_reserve() -> None:
    cells = [fitting.cell(gib, 1, 2.0) for gib in (77.1, 77.3, 137.8, 137.9)]
    assert cells == ["77.1 (80)", "77.3 (141)", "137.8 (141)", "137.9 (no)"]
    cells = [fitting.cell(gib, gpus, None) for gib, gpus in ((74.4, 1), (74.5, 1), (71.3, 8))]
    assert cells == ["74.4 (80)", "74.5 (141)", "71.3 (141)"]  # 6 % and 10 % of 79.2 GiB
