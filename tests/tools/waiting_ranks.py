"""Ranks of a benchmark that measures nothing but the time at which they may measure."""

from __future__ import annotations

import os
import sys
import time

from tools.benchmarks.ranks import send_record, wait_to_measure


def main() -> None:
    """Run one of the ranks."""
    wait_to_measure()
    if os.environ["RANK"] == "0":
        send_record({"measured": time.time(), "words": sys.argv[1:]})


if __name__ == "__main__":
    main()
