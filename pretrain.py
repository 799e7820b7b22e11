"""Train a Llama: the code is in coatlm/commands/train.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.train", run_name="__main__")
