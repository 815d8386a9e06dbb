"""Data axes beside `parallel/data.py`: what torch's two engines leave out, and the weights that neither holds."""
