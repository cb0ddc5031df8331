"""Temperature, top-k and top-p on four logits: how often each token is drawn."""

import torch
from mt_infer import Sampling, choose

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def shares(sampling: Sampling, draws: int = 10_000) -> list[float]:
    tokens = choose(LOGITS.expand(draws, 4), sampling, range(draws))
    return (torch.bincount(tokens, minlength=4) / draws).tolist()


if __name__ == "__main__":
    print("softmax        ", [round(p, 3) for p in LOGITS.softmax(-1)[0].tolist()])
    for name, sampling in {
        "as they are    ": Sampling(),
        "temperature 0.5": Sampling(temperature=0.5),
        "top-k 2        ": Sampling(top_k=2),
        "top-p 0.9      ": Sampling(top_p=0.9),
        "greedy         ": Sampling(temperature=0),
    }.items():
        print(name, [round(share, 3) for share in shares(sampling)])
