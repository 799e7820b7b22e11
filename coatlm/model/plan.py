"""The plan of a run as text, before anything is allocated: sizes, layout, compute and memory.

It begins with sentences (`description`), the first lines of a run; tables follow.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from coatlm.config import PRESETS, Config
from coatlm.config.parallel import ONLY_ABOVE_1
from coatlm.model.accounting import (
    flops_per_token,
    matmul_parameters,
    model_vocab,
    parameters,
    rank_parameters,
)
from coatlm.model.bf16_tensors import alone, key_of
from coatlm.model.fits import tensor_bytes
from coatlm.model.layer_memory import element_bytes, weight_dtype
from coatlm.model.memory import (
    GIB,
    RankBytes,
    chunks_in_flight,
    fallback_bytes,
    highest_stage,
    optim_state_bytes,
    peak_bytes,
    rank_bytes,
    replaced,
    stage_bytes,
)
from coatlm.model.numerics import TENSORS
from coatlm.optim.shards import bytes_per_parameter

WIDTH = 100  # columns of a sentence's lines
FORMATS = {"fp32": "fp32", "bf16": "BF16", "fp8": "FP8"}
SAVED = {  # of SavedTensors: what an FP8 layer saves in FP8
    "norm_input": "norm inputs",
    "gate_up": "gate and up",
    **{"q": "q", "k": "k", "v": "v", "o": "the attention output"},
    "linear_input": "linear inputs",
}
OUTPUT_LAYER = {  # of precision.output_layer
    "fp8-gradients": "FP8 GEMMs in backward",
    "fp8": "FP8 GEMMs",
    "int8": "INT8 logits, and FP8 GEMMs in backward",
}


def plan(
    config: Config,
    world_size: int | None = None,
    *,
    tokenizer_vocab: int | None = None,
    device: str | None = None,
    chosen: str = "",
    expected: str = "",
) -> str:
    """Sentences and tables of what a run trains, its layout and memory, without a final newline.

    `world_size=None` plans for the fewest processes that hold the model, tp * pp * cp.
    `tokenizer_vocab` is used if `model.vocab` is null; `device` names the memory of a rank;
    `chosen` is the sentence of `decide`, `expected` that of `expectation`. Raises ConfigError if
    `world_size` does not fit the configuration or if the vocabulary is not known.
    """
    m, p, t = config.model, config.parallel, config.train
    world_size = p.tp * p.pp * p.cp if world_size is None else world_size
    dp = config.data_parallel_size(world_size)
    vocab = model_vocab(config, tokenizer_vocab)
    tokens = t.global_batch * config.data.seq_len
    flops = flops_per_token(m, vocab, config.data.seq_len)
    total, active = parameters(m, vocab), matmul_parameters(m, vocab)
    heads = f"{m.heads} heads of {m.size_per_head} ({m.key_value_heads} kv)"
    chunks = f", {p.vpp} chunks of {m.layers // (p.pp * p.vpp)}" if p.vpp > 1 else ""
    microbatches = f"microbatches: {config.train.microbatches(dp)} of {t.micro_batch} per rank"
    batch = f"{t.global_batch} samples x {config.data.seq_len}"
    work = [f"{short(flops * n)}FLOP" for n in (1, tokens, tokens * t.steps)]
    rows = [
        ("model", f"{m.layers} layers, hidden {m.hidden}, {heads}, ffn {m.ffn}, vocab {vocab}"),
        ("parameters", f"{total:,} ({short(total)}); {short(active)} multiply each token"),
        ("ranks", f"{world_size} = tp {p.tp} x pp {p.pp} x cp {p.cp} x dp {dp}"),
        ("stages", f"{m.layers // p.pp} layers per stage{chunks}"),
        ("step", f"{tokens:,} tokens = {batch}; {microbatches}"),
        ("run", f"{t.steps:,} steps, {short(t.steps * tokens)} tokens"),
        ("compute", f"{work[0]} per token, {work[1]} per step, {work[2]} in total"),
    ]
    lines = [wrapped(sentence) for sentence in description(config, vocab, dp, device)]
    lines += [wrapped(sentence) for sentence in (chosen, expected) if sentence]
    lines += [f"{name:<14}{text}" for name, text in rows] + memory_table(config, vocab, dp)
    return "\n".join(lines + (stage_table(config, vocab, dp) if p.pp > 1 else []))


def wrapped(sentence: str) -> str:
    """A sentence in lines of at most WIDTH columns."""
    return textwrap.fill(sentence, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def description(config: Config, vocab: int, dp: int, device: str | None) -> Iterator[str]:
    """What is trained, in which formats, in which layout, and what that layout is for."""
    t, begin = config.train, config.checkpoint
    tokens = t.global_batch * config.data.seq_len
    scope = "their own document" if config.data.reset_attention_mask else "all earlier ones"
    restart = ", where positions begin at 0" if config.data.reset_position_ids else ""
    yield (
        f"{config.run.name} trains {short(parameters(config.model, vocab))} parameters"
        + (f" from the weights of {begin.resume}" if begin.imports_weights else "")
        + f" for {t.steps:,} steps of {tokens:,} tokens, {short(t.steps * tokens)} in total. "
        + f"Tokens attend to {scope}{restart}."
    )
    yield from format_sentences(config, several=dp * config.parallel.cp > 1)
    yield from layout_sentences(config, vocab, dp, device)


def format_sentences(config: Config, *, several: bool) -> Iterator[str]:
    """The number formats of layers, states and gradients; `several` ranks sum gradients."""
    p, precision = config.parallel, config.precision
    presets = [name for name, sections in PRESETS.items() if _has(config, sections)]
    named = f" (preset {presets[0]})" if presets else ""
    recipe = precision.recipe
    if precision.flow:
        saved = precision.flow_recipe().saved
        what = [text for name, text in SAVED.items() if getattr(saved, name)]
        layers = (
            f"FP8 GEMMs and save {', '.join(what)} in FP8 ({recipe}, {precision.scaling} scales)"
        )
    elif recipe in FORMATS:
        layers = f"{FORMATS[recipe]} GEMMs"
    else:
        layers = f"TransformerEngine's FP8 GEMMs ({recipe})"
    if precision.output_layer != "bf16":
        layers += f"; the output layer has {OUTPUT_LAYER[precision.output_layer]}"
    each = element_bytes(config) + bytes_per_parameter(config.optim.recipe, weight_dtype(config))
    comm = FORMATS.get(p.grad_comm, f"FP8 ({p.grad_comm})")
    sums = f" and summed over ranks in {comm}" if several else ""
    yield (
        f"Formats{named}: layers have {layers}; weights and optimizer states take {each:.3g} bytes "
        f"per parameter ({config.optim.recipe}); gradients are accumulated in "
        f"{FORMATS[p.main_grads]}{sums}."
    )


def _has(config: Config, sections: dict[str, dict[str, Any]]) -> bool:
    """Whether a configuration has the number formats of a preset."""
    return all(
        getattr(getattr(config, section), key) == value
        for section, values in sections.items()
        for key, value in values.items()
        if key != "cuda_graphs"  # is no number format
    )


def layout_sentences(config: Config, vocab: int, dp: int, device: str | None) -> Iterator[str]:
    """How ranks share the model and the batch, and the peak with and without each of these."""
    p = config.parallel
    parts = [
        (p.tp, "each layer over {} ranks (tp)"),
        (p.pp, "the layers over {} pipeline stages (pp)"),
        (p.cp, "each sample over {} ranks (cp)"),
        (dp, "the batch over {} replicas (dp)"),
        (dp * p.cp if p.zero else 1, f"the optimizer states over {{}} ranks (zero={p.zero})"),
    ]
    shared = [text.format(n) for n, text in parts if n > 1]
    peak = peak_bytes(config, vocab, dp) / GIB
    without = ", ".join(f"{key} {size / GIB:.1f}" for key, size in simpler(config, vocab, dp))
    yield (
        (f"Layout: {', '.join(shared)}. " if shared else "Layout: one rank. ")
        + f"Estimated peak of a rank: {peak:.1f} GiB{f' of {device}' if device else ''}"
        + (f"; with {without}." if without else ".")
    )


def simpler(config: Config, vocab: int, dp: int) -> Iterator[tuple[str, int]]:
    """Yield (`key=value`, peak in bytes) of layouts that share less, on as many ranks."""
    p = config.parallel
    for key, ranks, changed in (
        ("tp", p.tp, {"tp": 1, "sequence_parallel": False, **ONLY_ABOVE_1["tp"]}),
        ("pp", p.pp, {"pp": 1, "vpp": 1}),
        ("cp", p.cp, {"cp": 1, **ONLY_ABOVE_1["cp"]}),
    ):
        batch = config.train.micro_batch * dp * ranks
        if ranks > 1 and config.train.global_batch % batch == 0:
            less = replaced(config, parallel=changed)
            yield f"{key}=1", peak_bytes(less, vocab, dp * ranks)
    if p.zero and dp * p.cp > 1:
        yield "zero=0", peak_bytes(replaced(config, parallel={"zero": 0}), vocab, dp)
    if config.train.recompute != "none":
        less = replaced(config, train={"recompute": "none"})
        yield "recompute=none", peak_bytes(less, vocab, dp)


def memory_table(config: Config, vocab: int, dp: int) -> list[str]:
    """Lines with the memory, by kind, of the rank with the highest peak."""
    p, t = config.parallel, config.train
    stage = highest_stage(config, vocab, dp)
    rank = rank_bytes(config, vocab, stage=stage, data_parallel=dp)
    in_flight = chunks_in_flight(config, stage, config.train.microbatches(dp)) / p.vpp
    in_memory = f"microbatches in flight: {in_flight:g}, recompute {t.recompute}"
    states = f"{config.optim.recipe}, sharded over {dp * p.cp if p.zero else 1}"
    if config.optim.offload == "states":
        count = rank_parameters(config.model, vocab, tp=p.tp, pp=p.pp, stage=stage)
        states += f"; {optim_state_bytes(config, count, dp) / GIB:.3f} in host memory"
    smaller = "(not in the sum: not live at the peak)"
    weights = "fp32" if config.precision.recipe == "fp32" else "bf16"
    if p.zero == 3 and dp * p.cp > 1:
        whole = f"{rank.initial / GIB:.3f} while the model is built"
        weights += f", sharded over {dp * p.cp}, and two gathered layers; {whole}"
    logits = "all of them" if t.logits == "save" else "a chunk of them"
    rows = [
        ("weights", rank.weights, weights),
        ("fp8 weights", rank.fp8_weights, "W and its transpose"),
        ("main grads", rank.main_grads, p.main_grads),
        ("optim states", rank.optim_states, states),
        ("activations", rank.activations, in_memory),
        (
            "logits",
            rank.loss,
            f"{logits}, the gradient of the hidden state "
            + (smaller if rank.loss < rank.backward else ""),
        ),
        (
            "backward",
            rank.backward,
            "gradients within a layer " + (smaller if rank.backward <= rank.loss else ""),
        ),
        ("buffers", rank.buffers, "workspaces of cuBLAS, hidden states in transit"),
        ("cuda graphs", rank.graphs, "static inputs, a pool beside eager microbatches"),
        ("sum", rank.total, "the peak, without CUDA context, NCCL and fragmentation"),
    ]
    which = ", the highest peak" if p.pp > 1 else ""
    head = f"{'memory':<14}GiB on a rank of stage {stage}{which}"
    table = [f"  {name:<12}{size / GIB:10.3f}  {note}" for name, size, note in rows if size]
    if t.logits == "auto":
        table += saved_logits_line(config, vocab, dp)
    if config.precision.falls_back:
        table.append(fallback_line(config, stage, dp))
    return [head, *(line.rstrip() for line in table)]


def saved_logits_line(config: Config, vocab: int, dp: int) -> list[str]:
    """What saving the logits adds to the highest peak, if it is a MiB or more."""
    saving = replaced(config, train={"logits": "save"})
    more = (peak_bytes(saving, vocab, dp) - peak_bytes(config, vocab, dp)) / GIB
    note = "not in the sum: all logits, which are saved where the GPU has room for them"
    return [f"  {'all logits':<12}{more:10.3f}  {note}"] if more >= 0.001 else []


def fallback_line(config: Config, stage: int, dp: int) -> str:
    """What layers that fall back to BF16 add to the peak: the first of the stage, and all.

    With guard=operand these are layers in which every tensor has fallen back that can alone.
    """
    every, at = range(1, config.model.layers + 1), {"stage": stage, "data_parallel": dp}
    by_tensor = config.precision.guard == "operand" and alone(config, "fc2_input")

    def size(layers: Collection[int]) -> int:
        if not by_tensor:
            return fallback_bytes(config, layers, **at)
        return tensor_bytes(config, [key_of(n, name) for n in layers for name in TENSORS], **at)

    sizes, more = [size([n]) for n in every], size(every) / GIB
    which = "whose tensors all fall back" if by_tensor else "that falls back"
    note = f"not in the sum: per layer {which} to bf16; of all {more:.3f}"
    return f"  {'fallback':<12}{max(sizes) / GIB:10.3f}  {note}"


def stage_table(config: Config, vocab: int, dp: int) -> list[str]:
    """Lines with the memory by kind in GiB, one per pipeline stage."""
    names = [kind.replace("_", " ") for kind in RankBytes.kinds()]
    lines = [f"{'stage':<6}" + "".join(f"{name:>13}" for name in [*names, "sum"])]
    for stage, rank in enumerate(stage_bytes(config, vocab, dp)):
        sizes = [*(getattr(rank, kind) for kind in RankBytes.kinds()), rank.total]
        lines.append(f"{stage:<6}" + "".join(f"{size / GIB:13.3f}" for size in sizes))
    return lines


def short(count: float) -> str:
    """Three digits and a decimal prefix: 8030261248 -> '8.03 G'."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if count < 999.5:
            return f"{count:.3g} {prefix}"
        count /= 1000
    return f"{count:.3g} Z"
