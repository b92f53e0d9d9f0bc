"""Rules for λ_{i,t} beside GTPO's (arXiv:2508.03772, Eq. 9), each for `algorithm.gtpo.token_weights=pkg://MODULE.NAME`.

`MODULE` is this file's name where its folder is on PYTHONPATH on every node. A rule is compared with GRPO at equal
settings by what switches GTPO's other parts off: `entropy_coeff=0 completion_filter=never`.

`gtpo_verl.algorithm.token_weights` lists what a function may ask for. NTHR (arXiv:2505.18830) weighs tokens by hidden
states of the model, which no trainer keeps: it cannot be written here.
"""

import math

import torch


def lambda_grpo(responses: torch.Tensor, response_mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """λ-GRPO (arXiv:2509.21154): 1 / the number of the prompt's completions whose tokens up to this one are equal."""
    weights = response_mask.float()
    reaches = response_mask.flip(-1).cumsum(-1).flip(-1) > 0  # a completion's columns up to its last own token
    beginnings = groups.clone()  # a number for each beginning that completions share
    for t in range(responses.shape[1]):
        rows = reaches[:, t].nonzero().flatten()
        longer = torch.stack([beginnings[rows], responses[rows, t]])
        _, beginnings[rows], counts = longer.unique(dim=1, return_inverse=True, return_counts=True)
        weights[rows, t] *= 1 / counts[beginnings[rows]]
        if (counts == 1).all():
            break  # and no longer beginning is shared
    return weights


def highest_entropy(response_mask: torch.Tensor, entropy: torch.Tensor, share: float = 0.2) -> torch.Tensor:
    """Only the fifth of a batch's tokens that has the highest entropy is trained (arXiv:2506.01939, Eq. 5 and 6)."""
    own = entropy[response_mask]
    if not len(own):
        return response_mask.float()
    trained = math.ceil(share * len(own))
    threshold = own.topk(trained).values[-1]
    return (response_mask & (entropy >= threshold)).float()


def shared_beginning(
    responses: torch.Tensor, response_mask: torch.Tensor, groups: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """A control: GTPO's weights, 2 where A > 0 and 0 where A < 0, on the beginning that a whole group shares."""
    weights = response_mask.float()
    for group in groups.unique():
        rows = (groups == group).nonzero().flatten()
        a = advantages[rows]
        if a.min() < 0 < a.max():
            is_equal = (responses[rows] == responses[rows[0]]) & response_mask[rows]
            is_shared = is_equal.all(0).cumprod(0).bool()
            weights[rows] = torch.where(is_shared, a.sign().unsqueeze(-1) + 1, weights[rows])
    return weights
