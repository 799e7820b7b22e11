"""The parts of tools/drill.py: jobs, the run that they train, faults, and the report."""
