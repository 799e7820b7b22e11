"""Write and submit a batch script for SLURM: the code is in coatlm/commands/submit.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.submit", run_name="__main__")
