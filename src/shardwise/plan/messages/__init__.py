"""The messages of a step, axis by axis: what `plan/traffic.py` puts together. No torch."""
