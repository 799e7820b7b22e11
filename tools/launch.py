"""Train on all GPUs of this machine: the code is in coatlm/commands/launch.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.launch", run_name="__main__")
