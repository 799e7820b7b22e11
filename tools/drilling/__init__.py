"""What tools/drill.py consists of: jobs, the run that they train, faults, and the report."""
