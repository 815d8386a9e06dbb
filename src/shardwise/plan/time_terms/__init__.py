"""The terms of `plan/timing.py`: blocks, data axes, experts, pipelines, input, stalls. No torch."""
