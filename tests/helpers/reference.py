"""A slow, obvious GTPO (arXiv:2508.03772), written from its definitions alone, to test the fast one against."""

import statistics
from fractions import Fraction

import numpy as np


def conflict_mask(responses, response_mask, advantages, index, span, masks="both"):
    """Lists in, lists out; see Sec. 5.1."""
    tokens = [
        [t for t, m in zip(row, mask, strict=True) if m] for row, mask in zip(responses, response_mask, strict=True)
    ]
    columns = [[c for c, m in enumerate(mask) if m] for mask in response_mask]
    masked = [[False] * len(row) for row in responses]
    for i, row in enumerate(tokens):
        group = [j for j in range(len(tokens)) if index[j] == index[i]]

        def is_conflict(number, i=i, row=row, group=group, from_end=False):
            k = -1 - number if from_end else number
            signs = {
                (advantages[j] > 0) - (advantages[j] < 0)
                for j in group
                if number < len(tokens[j]) and tokens[j][k] == row[k]
            }
            return {1, -1} <= signs

        for from_end in {"both": (False, True), "forward": (False,), "backward": (True,)}[masks]:
            begun = span != "first"
            for number in range(len(row)) if span != "none" else ():
                if is_conflict(number, from_end=from_end):
                    begun = True
                    masked[i][columns[i][-1 - number if from_end else number]] = True
                elif begun and span != "all":
                    break
    return masked


def decimal(reward):
    """The number that was written, such as 1/10, of which a trainer has the nearest float32."""
    return Fraction(str(np.float32(reward)))


def advantages(rewards, response_mask, index, responses, entropy, config, initial_entropy, norm_by_std, epsilon):
    """Eq. 9 to 11, one completion and one token at a time; `rewards` is one number per completion."""
    real = [any(mask) for mask in response_mask]
    rewards = [decimal(reward) for reward in rewards]
    a = []
    for i in range(len(rewards)):
        group = [rewards[j] for j in range(len(rewards)) if real[j] and index[j] == index[i]]
        if not real[i] or len(set(group)) == 1:
            a.append(0.0)
            continue
        deviation = float(rewards[i] - sum(group) / len(group))
        a.append(deviation / (statistics.stdev(map(float, group)) + epsilon) if norm_by_std else deviation)
        if config.min_correct_reward is not None and rewards[i] < decimal(config.min_correct_reward):
            a[i] = min(a[i], 0.0)
    masked = conflict_mask(responses, response_mask, a, index, config.conflict_span, config.conflict_masks)
    result = []
    for i, mask in enumerate(response_mask):
        h = sum(e for e, m in zip(entropy[i], mask, strict=True) if m) / max(1, sum(mask))
        active = config.completion_filter == "always" or (
            config.completion_filter == "auto" and initial_entropy < config.entropy_threshold
        )
        drop = active and h > config.entropy_threshold and (config.filter_scope == "all" or a[i] < 0)
        row = []
        for t, m in enumerate(mask):
            weight = 1.0
            if masked[i][t]:
                weight = {1: config.conflict_weight_positive, -1: config.conflict_weight_negative, 0: 1.0}[
                    (a[i] > 0) - (a[i] < 0)
                ]
            row.append(0.0 if drop or not m else (a[i] - config.entropy_coeff * h) * weight)
        result.append(row)
    return result
