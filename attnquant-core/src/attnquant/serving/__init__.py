"""The serving half: MAX layers, weight adapter and pipeline model. Imports max."""
