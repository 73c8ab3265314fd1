"""Fits a learning estimator to many steps at once.

What an engine learns step by step (regression.py) weighs a step by what was known when it came: the first hundreds are judged
by a roofline, and three in four of the later ones are not learned from. Where the steps are kept, the same sums of features,
with the same guesses and the same room around them, fit better at once:

    least over c of   sum over steps of huber((u · c - 1) / NOISE)  +  (c - guess)' P (c - guess)

with u the features over the measured seconds, by iteratively reweighted least squares. Huber's loss keeps what waited, or was
captured on the way, from counting more than others (Huber, Annals of Mathematical Statistics 35, 1964).
"""

from __future__ import annotations

import numpy as np

from pdlab.costs.regression import MEMORY, NOISE, Regression

HUBER = 1.5  # relative errors beyond so many times NOISE count by their size, not by its square
ROUNDS = 12


def fit(regression: Regression, rows: np.ndarray) -> None:
    """Fits to rows of features over measured seconds, [steps, weights + groups], in place; the regression's present weights are
    the guess and its covariance the room around it, so it should have learned nothing yet. The newest rows are the last."""
    n = len(regression.weights)
    guess = np.array([*regression.weights, *regression.offsets])
    precision = np.linalg.inv(regression.covariance)
    trust = np.ones(len(rows))
    c, normal = guess, precision
    for _ in range(ROUNDS):
        weighted = rows * (trust / NOISE**2)[:, None]
        normal = weighted.T @ rows + precision
        c = np.linalg.solve(normal, weighted.sum(axis=0) + precision @ guess)
        trust = np.minimum(1.0, HUBER * NOISE / np.maximum(np.abs(rows @ c - 1), 1e-12))
    regression.weights, regression.offsets = c[:n].tolist(), c[n:].tolist()
    regression.covariance = np.linalg.inv(normal)
    regression.seen = len(rows)
    regression.error = float(np.mean(np.abs(rows[-MEMORY:] @ c - 1)))
