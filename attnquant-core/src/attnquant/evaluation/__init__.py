"""What running models tells: calibration statistics, and how far a bundle is off.

Nothing here imports MAX: a model is whatever takes tokens and gives logits or inputs
(`attnquant.serving.probe` is the one that MAX runs).
"""
