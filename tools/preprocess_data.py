"""Tokenize text into datasets: the code is in coatlm/commands/prepare.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.prepare", run_name="__main__")
