"""Rows that hold several pairs of an encoder's tokens and a decoder's."""

import torch
from family_row import SEQUENCE, TARGET

INPUTS, TARGETS = (5, 1, SEQUENCE - 8), (2, TARGET - 4, 1)  # of three pairs, and filling behind
NUMBERS = (4, 0, 7)


def packed(row, config, rows=1):
    """Three pairs in each row; filling behind has labels that don't count, and sees no input."""
    batch = row.batch(config, rows)
    batch["labels"] = batch.pop("tokens")
    batch["labels"][:, sum(TARGETS) :] = -100
    sides = (
        ("encoder_documents", "encoder_tokens", INPUTS, -101),
        ("documents", "labels", TARGETS, -100),
    )
    for name, tokens, lengths, filling in sides:
        behind = batch[tokens].shape[1] - sum(lengths)
        counts = torch.tensor((*lengths, behind))
        numbers = torch.repeat_interleave(torch.tensor((*NUMBERS, filling)), counts)
        batch[name] = numbers.expand_as(batch[tokens])
    return batch


def packed_and_padded(row, config):
    """The same with tokens in place of labels, and with padding in some of the inputs."""
    batch = packed(row, config, rows=3)
    batch["tokens"] = batch.pop("labels").clamp(min=0)
    return {**batch, "encoder_mask": row.padded(config)["encoder_mask"]}


def pairs_of(batch):
    """The pairs of packed rows one by one."""
    for number in NUMBERS:
        sources, targets = (batch[name][0] == number for name in ("encoder_documents", "documents"))
        yield {
            "encoder_tokens": batch["encoder_tokens"][:, sources],
            "labels": batch["labels"][:, targets],
        }
