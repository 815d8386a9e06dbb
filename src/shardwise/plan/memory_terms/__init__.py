"""The terms of `plan/memory.py`: what a rank holds at the peak of a step, and outside of steps. No torch."""
