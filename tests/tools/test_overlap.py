"""Intervals of a trace: what is communication alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tools.benchmarks.overlap import UPDATE, exposed, idle, length, parts, trace, union


def test_intervals_that_touch_are_one() -> None:
    assert union([(4, 5), (0, 2), (1, 3), (3, 3.5)]) == [(0, 3.5), (4, 5)]


def test_communication_is_exposed_where_nothing_else_runs() -> None:
    communication = [(0.0, 4.0), (3.0, 6.0), (10.0, 11.0)]
    compute = [(1.0, 2.0), (1.5, 5.0), (20.0, 30.0)]
    assert length(communication) == 7
    assert exposed(communication, compute) == 1 + 1 + 1
    assert exposed(communication, [(0.0, 40.0)]) == 0
    assert exposed([], compute) == 0


def test_the_device_is_idle_where_nothing_runs_between_the_first_and_the_last() -> None:
    assert idle([(0.0, 4.0), (10.0, 11.0)], [(3.0, 6.0), (12.0, 13.0)]) == 4 + 1
    assert idle([], []) == 0


def test_a_trace_is_written_where_it_is_told(tmp_path: Path) -> None:
    keep = tmp_path / "traces" / "rank0.json.gz"
    found = trace(lambda: torch.ones(8).exp(), 2, keep)
    assert found == ([], [], {})  # a CPU is no device
    with gzip.open(keep, "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::exp") == 2


def test_kernels_belong_to_the_part_whose_operator_launched_them() -> None:
    def launched(name: str, parent: Any, **kernels: float) -> SimpleNamespace:
        """An operator of the host with its kernels, in microseconds."""
        made = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels.items()]
        cpu = torch.autograd.DeviceType.CPU
        return SimpleNamespace(
            name=name,
            cpu_parent=parent,
            kernels=made,
            device_type=cpu,
            is_user_annotation=name == UPDATE,
        )

    loss = launched("_LinearCrossEntropy", None, _row_stats_kernel=1000)
    grad = launched("_LinearCrossEntropyBackward", launched("evaluate_function", None))
    # on the GPU the range itself, which may begin before its kernels and last longer, is listed too
    update = launched(UPDATE, None, **{UPDATE: 6000, "norm_kernel": 50})
    on_device = SimpleNamespace(device_type=torch.autograd.DeviceType.CUDA)
    events = [
        loss,
        launched("aten::mm", loss, nvjet_tst_128x256=2000),
        launched("aten::mm", grad, nvjet_tst_256x128=4000, emit_kernel=500),
        launched("FlowBackward", None, nvjet_qqtst_128x256=8000, cudnn_sdpa_bprop=3000),
        launched("aten::copy_", None, swiglu_kernel=700, nccl_all_reduce=9000),
        launched("step", update, adamw_kernel=250),
        launched("triton_poi_fused_add", None, triton_poi_fused_add=300),  # as Inductor names it
        update,
        on_device,
    ]
    assert parts(events) == {
        "output_layer": 7.5,
        "gemm": 8.0,
        "attention": 3.0,
        "elementwise": 1.0,
        "update": 0.3,
    }
