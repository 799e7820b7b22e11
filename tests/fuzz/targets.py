"""What reads files that others wrote: one function each, called in a directory with such files.

Each works as a user's command would, on relative paths; what it writes goes to `out`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.sandbox import Target

TEXT = "The quick brown fox: 42 Füchse.\n\ud7ff\U0001f98a <|endoftext|> \x00\t"
CHECKPOINT = "run/checkpoints/step_00000002"


def config() -> int:
    """config.yaml with overrides, as --dry-run takes it; what it resolves to loads again."""
    from coatlm.commands import train as pretrain
    from coatlm.config import ConfigError, load_config

    options = json.loads(Path("options.json").read_text())
    words = ["config.yaml", *options["overrides"], "--dry-run"]
    code = pretrain.main([*words, *(f"--ranks={n}" for n in options["ranks"])])
    if code == 0:
        loaded = load_config("config.yaml", options["overrides"])
        Path("out.yaml").write_text(loaded.to_yaml())
        assert load_config("out.yaml") == loaded
        for size in range(1, 9):
            try:
                assert 1 <= loaded.data_parallel_size(size) <= size
            except ConfigError as error:
                assert str(error)
    return code


def launch() -> None:
    """The variables of a launcher."""
    from coatlm.config import ConfigError
    from coatlm.train.setup import Launch

    env = json.loads(Path("environment.json").read_text())
    try:
        found = Launch.from_environment(env)
    except ConfigError:
        raise
    except ValueError as error:
        raise AssertionError(f"which variable is it? {error}") from error
    assert 0 <= found.rank < found.world_size
    assert 0 <= found.local_rank < found.local_size
    if found.address is not None:
        host, port = found.address.rsplit(":", 1)
        assert host and 0 < int(port) < 65536
    assert found.restarts >= 0


def start() -> int:
    """A run that is started again, on what its directory and the data cache hold."""
    from coatlm.commands import train as pretrain

    return pretrain.main(["config.yaml"])


def inspect() -> int:
    """A run's newest checkpoint: what it holds, whether it is whole, how it differs."""
    from coatlm.commands.inspect import main

    codes = [main(["run", *option]) for option in ((), ("--verify",), ("--tensors",))]
    return max(*codes, main(["--diff", "run", "whole"]))


def export() -> int:
    """A run to Hugging Face."""
    from coatlm.commands.convert import main

    return main(["--from", "coatlm", "--to", "hf", "run", "out"])


def evaluate() -> int:
    """The perplexity of a run's newest checkpoint."""
    from coatlm.commands.evaluate import main

    return main(["run", "--data", "text.txt", "--window=32", "--out=out/perplexity.json"])


def huggingface() -> int:
    """A Hugging Face directory to a checkpoint, which is whole."""
    from coatlm.commands import inspect as inspect_checkpoint
    from coatlm.commands.convert import main

    code = main(["--from", "hf", "--to", "coatlm", "model", "out", "--dtype=bf16"])
    if code == 0:
        assert inspect_checkpoint.main(["out", "--verify"]) == 0
    return code


def remote_model() -> None:
    """A Hugging Face directory at a URL: opened, and every tensor read."""
    from coatlm.config import ConfigError
    from coatlm.hf.source import opened
    from coatlm.remote import RemoteError

    try:
        with opened(f"file://{Path('model').resolve()}", Path("out")) as source:
            for name in source.weights.files:
                assert source.weights.read(name).shape == source.stored[name].shape
            assert source.weights.versions()
    except RemoteError as error:  # as `check_huggingface` does
        raise ConfigError(str(error)) from error


def megatron() -> int:
    """Checkpoints of Megatron-LM in both formats, and of Megatron-Bridge, to whole checkpoints."""
    from coatlm.commands import inspect as inspect_checkpoint
    from coatlm.commands.convert import main

    codes = []
    for source in ("model", "ranks", "bridge"):
        codes.append(main(["--from", "megatron", "--to", "coatlm", source, f"out/{source}"]))
        if codes[-1] == 0:
            assert inspect_checkpoint.main([f"out/{source}", "--verify"]) == 0
    return max(codes)


def tokenizers() -> None:
    """Each kind of tokenizer; ids are in its vocabulary and decode to the text."""
    from coatlm.data.tokenizer import make_tokenizer

    found = make_tokenizer(Path("spec.txt").read_text(errors="replace"))
    ids = found.encode(TEXT)
    assert 0 <= found.eod < found.vocab_size
    assert all(0 <= i < found.vocab_size for i in ids)
    assert isinstance(found.decode(ids), str)
    assert isinstance(found.decode([found.eod, *range(min(found.vocab_size, 300))]), str)


def indexed() -> None:
    """An indexed dataset: opened, split, and read from both ends."""
    from coatlm.config import Data
    from coatlm.data.dataset import open_datasets
    from coatlm.data.tokenizer import ByteTokenizer

    data = Data.model_validate({"paths": ["data"], "seq_len": 8, "split": [90, 10, 0]})
    found = open_datasets(data, ByteTokenizer(), seed=1)
    for sample in (*range(40), 10**6):
        ids = found.train[sample]
        assert len(ids) == 9 and 0 <= ids.min() <= ids.max() < ByteTokenizer.vocab_size


def masked() -> None:
    """A dataset of conversations: opened with its loss mask, packed, and read from both ends."""
    from coatlm.config import Data
    from coatlm.data.dataset import open_datasets
    from coatlm.data.tokenizer import ByteTokenizer

    options = {"loss_mask": "completion", "packing": "best-fit", "split": [90, 10, 0]}
    data = Data.model_validate({"paths": ["data"], "seq_len": 8, **options})
    found = open_datasets(data, ByteTokenizer(), seed=1)
    for sample in (*range(40), 10**6):
        ids, counted = found.train[sample], found.train.counted(sample)
        assert len(ids) == len(counted) == 9 and set(counted.tolist()) <= {0, 1}


def conversations() -> int:
    """Conversations in a chat template, tokenized to a dataset that opens with its loss mask."""
    from coatlm.commands.prepare import main
    from coatlm.data.indexed import open_indexed
    from coatlm.data.tokenizer import make_tokenizer

    spec = "hf:tokenizer.json?eod=<|end_of_text|>"
    words = ["--chat", "--input", "talks.jsonl", "--output-prefix", "out/data", "--workers=1"]
    code = _command(main, *words, "--tokenizer", spec)
    if code == 0:
        data = open_indexed(Path("out/data"), make_tokenizer(spec))
        assert data.read_mask(0, len(data.tokens)).any()
    return code


def texts() -> int:
    """Text in every format, tokenized to a dataset that opens."""
    from coatlm.commands.prepare import main
    from coatlm.data.indexed import open_indexed
    from coatlm.data.tokenizer import ByteTokenizer

    words = ["--workers=1", "--shard-mb=1", "--pack=64"]
    code = _command(main, "--input", "text.*", "--output-prefix", "out/data", *words)
    if code == 0:
        open_indexed(Path("out/data"), ByteTokenizer())
    return code


def interrupted() -> int:
    """Tokenizing that goes on from the shards of a call that was interrupted."""
    from coatlm.commands.prepare import main
    from coatlm.data.indexed import open_indexed
    from coatlm.data.tokenizer import ByteTokenizer

    code = _command(main, "--input", "text.txt", "--output-prefix", "out/data", "--workers=1")
    if code == 0:
        open_indexed(Path("out/data"), ByteTokenizer())
    return code


def plots() -> int:
    """The curves of a run, alone and beside another one, and a report of both."""
    from coatlm.commands.plot import main
    from coatlm.commands.report import main as report
    from coatlm.train.run_directory import loss_plot

    Path("out").mkdir()
    for name in ("metrics.jsonl", "config.yaml"):
        if (Path("run") / name).exists():
            (Path("out") / name).write_bytes((Path("run") / name).read_bytes())
    loss_plot(Path("out"))
    return max(
        main(["run", "--out=out/a.html"]),
        main(["run", "whole", "--out=out/b.png", "--only", "loss"]),
        report(["run", "--with", "whole", "--out=out/c.html"]),
    )


def comparison() -> int:
    """Two runs compared, and what a start would drop from the first one's lines."""
    from coatlm.commands.compare import main
    from coatlm.train.run_directory import repair_metrics

    code = main(["run", "whole"])
    Path("out").mkdir()
    copy = Path("out/metrics.jsonl")
    if Path("run/metrics.jsonl").exists():
        copy.write_bytes(Path("run/metrics.jsonl").read_bytes())
    dropped = repair_metrics(copy, 1)
    assert dropped >= 0 and repair_metrics(copy, 1) == 0
    return code


def _command(main: Callable[[], int], *words: str) -> int:
    """A tool that takes its words from the command line alone."""
    sys.argv = [main.__module__, *words]
    return main()


START = ("run", "cache", ".cache", "runs")
TARGETS = {
    target.name: target
    for target in (
        Target("config", config, writes=("out.yaml",)),
        Target("launch", launch),
        Target("start", start, codes=(0, 2, 4), writes=START, fresh=True),
        Target("inspect", inspect, codes=(0, 1, 2)),
        Target("export", export, codes=(0, 2, 4)),
        Target("evaluate", evaluate, codes=(0, 2, 4)),
        Target("huggingface", huggingface, codes=(0, 2, 4)),
        Target("remote_model", remote_model),
        Target("megatron", megatron, codes=(0, 2, 4)),
        Target("tokenizers", tokenizers),
        Target("indexed", indexed),
        Target("masked", masked),
        Target("conversations", conversations),
        Target("texts", texts),
        Target("interrupted", interrupted),
        Target("plots", plots),
        Target("comparison", comparison, codes=(0, 1, 2)),
    )
}
