"""Synthetic tasks for fine-tuning, as pairs of a prompt and the one right completion.

    addition    "add 407+58="     "465"       two numbers of up to 3 digits
    sorting     "sort 38140="     "01348"     up to 8 digits, with repetitions
    brackets    "close ([{}<="    ">])"       the brackets that close those that are open

Every prompt occurs once, in training or in the test, so no test example was trained on. Examples
are a pure function of the seed, and each task has the same share of both parts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ADDEND = 1000  # numbers to add are below this
LONGEST = 8  # digits to sort
OPENED = 8  # brackets before those to close
CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
MOST_REPEATS = 1000  # draws in a row of prompts that occur already, at which a task is exhausted


@dataclass(frozen=True)
class TaskExample:
    """An example of one task."""

    task: str
    prompt: str
    completion: str


def addition(rng: random.Random) -> tuple[str, str]:
    """Two numbers and their sum."""
    a, b = rng.randrange(ADDEND), rng.randrange(ADDEND)
    return f"add {a}+{b}=", str(a + b)


def sorting(rng: random.Random) -> tuple[str, str]:
    """Digits, and the same digits in order."""
    digits = [str(rng.randrange(10)) for _ in range(rng.randint(2, LONGEST))]
    return f"sort {''.join(digits)}=", "".join(sorted(digits))


def brackets(rng: random.Random) -> tuple[str, str]:
    """Nested brackets of which some are open at the end, and those that close them."""
    text, still_open = "", list[str]()
    for _ in range(rng.randint(2, OPENED)):
        if still_open and rng.random() < 0.3:
            text += CLOSING[still_open.pop()]
        else:
            still_open.append(rng.choice(list(CLOSING)))
            text += still_open[-1]
    if not still_open:
        still_open.append("(")
        text += "("
    return f"close {text}=", "".join(CLOSING[bracket] for bracket in reversed(still_open))


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "addition": addition,
    "sorting": sorting,
    "brackets": brackets,
}


def draw_pairs(
    train: int, test: int, *, seed: int = 0
) -> tuple[list[TaskExample], list[TaskExample]]:
    """`train` and `test` different examples per task, each part in random order.

    Raises ValueError if a task does not have as many prompts.
    """
    rng = random.Random(seed)
    parts: tuple[list[TaskExample], list[TaskExample]] = ([], [])
    for task, draw in TASKS.items():
        drawn: dict[str, str] = {}
        repeats = 0
        while len(drawn) < train + test:
            prompt, completion = draw(rng)
            repeats = repeats + 1 if prompt in drawn else 0
            if repeats > MOST_REPEATS:
                raise ValueError(
                    f"{train} examples to train on and {test} to test: {task} has fewer prompts"
                )
            drawn[prompt] = completion
        pairs = [TaskExample(task, prompt, completion) for prompt, completion in drawn.items()]
        parts[0].extend(pairs[:train])
        parts[1].extend(pairs[train:])
    for part in parts:
        rng.shuffle(part)
    return parts


def write_pairs(pairs: Sequence[TaskExample], path: Path) -> None:
    """Write JSON lines that tools/preprocess_data.py --chat reads."""
    lines = [json.dumps({"prompt": p.prompt, "completion": p.completion}) for p in pairs]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
