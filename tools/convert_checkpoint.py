"""Convert checkpoints: the code is in coatlm/commands/convert.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.convert", run_name="__main__")
