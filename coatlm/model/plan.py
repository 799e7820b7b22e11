"""The plan of a run as text, before anything is allocated: sizes, layout, compute and memory."""

from __future__ import annotations

from dataclasses import fields

from coatlm.config import Config
from coatlm.model.accounting import (
    flops_per_token,
    matmul_parameters,
    model_vocab,
    parameters,
)
from coatlm.model.memory import (
    GIB,
    RankBytes,
    chunks_in_flight,
    fallback_bytes,
    highest_stage,
    microbatches_per_step,
    peak_bytes,
    rank_bytes,
    replaced,
    stage_bytes,
)


def plan(
    config: Config, world_size: int | None = None, *, tokenizer_vocab: int | None = None
) -> str:
    """A table of the sizes, layout, compute and memory of a run, without a final newline.

    `world_size=None` plans for the fewest processes that hold the model, tp * pp * cp.
    `tokenizer_vocab` is used if `model.vocab` is null. Raises ConfigError if `world_size` does not
    fit the configuration or if the vocabulary is not known.
    """
    m, p, t = config.model, config.parallel, config.train
    world_size = p.tp * p.pp * p.cp if world_size is None else world_size
    dp = config.data_parallel_size(world_size)
    vocab = model_vocab(config, tokenizer_vocab)
    tokens = t.global_batch * config.data.seq_len
    flops = flops_per_token(m, vocab, config.data.seq_len)
    total, active = parameters(m, vocab), matmul_parameters(m, vocab)
    heads = f"{m.heads} heads of {m.size_per_head} ({m.queries_groups} kv)"
    chunks = f", {p.vpp} chunks of {m.layers // (p.pp * p.vpp)}" if p.vpp > 1 else ""
    microbatches = f"microbatches: {microbatches_per_step(config, dp)} of {t.micro_batch} per rank"
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
    lines = [f"{name:<14}{text}" for name, text in rows] + memory_table(config, vocab, dp)
    return "\n".join(lines + (stage_table(config, vocab, dp) if p.pp > 1 else []))


def memory_table(config: Config, vocab: int, dp: int) -> list[str]:
    """Lines with the memory, by kind, of the rank with the highest peak."""
    p, t = config.parallel, config.train
    stage = highest_stage(config, vocab, dp)
    rank = rank_bytes(config, vocab, stage=stage, data_parallel=dp)
    in_flight = chunks_in_flight(config, stage, microbatches_per_step(config, dp)) / p.vpp
    in_memory = f"microbatches in flight: {in_flight:g}, recompute {t.recompute}"
    states = f"{config.optim.recipe}, sharded over {dp * p.cp if p.zero else 1}"
    smaller = "(not in the sum: not live at the peak)"
    logits = "all of them" if t.logits == "save" else "a chunk of them"
    rows = [
        ("weights", rank.weights, "fp32" if config.precision.recipe == "fp32" else "bf16"),
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
        table.append(saved_logits_line(config, vocab, dp))
    if config.precision.guard == "fallback":
        table.append(fallback_line(config, stage, dp))
    return [head, *(line.rstrip() for line in table)]


def saved_logits_line(config: Config, vocab: int, dp: int) -> str:
    """What saving the logits adds to the highest peak."""
    saving = replaced(config, train={"logits": "save"})
    more = peak_bytes(saving, vocab, dp) - peak_bytes(config, vocab, dp)
    note = "not in the sum: all logits, which are saved where the GPU has room for them"
    return f"  {'all logits':<12}{more / GIB:10.3f}  {note}"


def fallback_line(config: Config, stage: int, dp: int) -> str:
    """What layers that fall back to BF16 add to the peak: the first of the stage, and all."""
    every = range(1, config.model.layers + 1)
    sizes = [fallback_bytes(config, [n], stage=stage, data_parallel=dp) for n in every]
    more = fallback_bytes(config, every, stage=stage, data_parallel=dp) / GIB
    note = f"not in the sum: per layer that falls back to bf16; of all {more:.3f}"
    return f"  {'fallback':<12}{max(sizes) / GIB:10.3f}  {note}"


def stage_table(config: Config, vocab: int, dp: int) -> list[str]:
    """Lines with the memory by kind in GiB, one per pipeline stage."""
    names = [field.name.replace("_", " ") for field in fields(RankBytes)]
    lines = [f"{'stage':<6}" + "".join(f"{name:>13}" for name in [*names, "sum"])]
    for stage, rank in enumerate(stage_bytes(config, vocab, dp)):
        sizes = [*(getattr(rank, field.name) for field in fields(RankBytes)), rank.total]
        lines.append(f"{stage:<6}" + "".join(f"{size / GIB:13.3f}" for size in sizes))
    return lines


def short(count: float) -> str:
    """Three digits and a decimal prefix: 8030261248 -> '8.03 G'."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if count < 999.5:
            return f"{count:.3g} {prefix}"
        count /= 1000
    return f"{count:.3g} Z"
