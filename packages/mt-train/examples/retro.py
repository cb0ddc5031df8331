"""Facts for retro.yaml: documents of a key of four letters and digits and a value of four signs.

    python retro.py                     # writes facts/: documents, databases, neighbours, questions
    python retro.py losses runs/retro   # held-out loss on values, as a share of a guess's
    python retro.py answers.jsonl       # counts the right answers to the held-out keys

No value can be guessed: each of its tokens is drawn uniformly from 64. The database facts/db has
all facts, also the 200 that training does not see. facts/new-db has other values of these 200.
`python retro.py 500` makes 500 facts to train on, in place of 24,000.
"""

import json
import math
import string
import sys
from pathlib import Path

import numpy as np
from mt_data import IndexedDataset, IndexedWriter
from mt_retro import Neighbours, NGramEmbedding, build_database, find_neighbours
from mt_tokenizer import Tokenizer, load_tokenizer, train_tokenizer

FOLDER = Path("facts")
TRAINED, HELD_OUT, SIZE = 24_000, 200, 4  # documents, and tokens of a chunk: a key or a value
KEYS, VALUES = string.ascii_lowercase + string.digits, string.ascii_letters + string.digits + "+/"


def write(trained: int) -> None:
    """Write documents, databases, the neighbours of each key, and the questions."""
    FOLDER.mkdir(exist_ok=True)
    tokenizer, draw = train_tokenizer(["key"], vocab_size=257), np.random.default_rng(0)  # bytes
    tokenizer.save(FOLDER / "tokenizer.json")
    held_out = min(HELD_OUT, trained // 10)
    numbers = draw.choice(len(KEYS) ** SIZE, trained + held_out, replace=False)
    digits = numbers[:, None] // len(KEYS) ** np.arange(SIZE) % len(KEYS)
    keys, old = ids_of(KEYS, tokenizer)[digits], drawn_values(draw, len(numbers), tokenizer)
    facts = np.concatenate((keys, old), 1)
    new = np.concatenate((keys[trained:], drawn_values(draw, held_out, tokenizer)), 1)
    parts = {"train": facts[:trained], "held-out": facts[trained:], "library": facts, "new": new}
    for name, documents in parts.items():
        with IndexedWriter(FOLDER / name, np.uint16) as writer:
            for document in documents:
                writer.add_document(document)
    how = {"chunk": SIZE, "embedding": NGramEmbedding(64)}
    database = build_database([FOLDER / "library"], FOLDER / "db", **how)
    build_database([FOLDER / "new"], FOLDER / "new-db", **how)
    for name in ("train", "held-out"):
        dataset = IndexedDataset(FOLDER / name)
        find_neighbours(database, dataset, FOLDER / f"near-{name}", neighbours=1)
    asked = (json.dumps({"prompt": key}) + "\n" for key, _ in facts_of("held-out"))
    (FOLDER / "asked.jsonl").write_text("".join(asked))


def ids_of(letters: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the token of each letter."""
    return np.array([tokenizer.encode(letter)[0] for letter in letters])


def drawn_values(draw: np.random.Generator, count: int, tokenizer: Tokenizer) -> np.ndarray:
    """Return values, whose tokens are drawn uniformly."""
    return draw.choice(ids_of(VALUES, tokenizer), (count, SIZE))


def facts_of(name: str) -> list[tuple[str, str]]:
    """Return the keys and values of a set of documents as texts."""
    dataset, tokenizer = IndexedDataset(FOLDER / name), load_tokenizer(FOLDER / "tokenizer.json")
    texts = [tokenizer.decode(dataset.document(i).tolist()) for i in range(dataset.num_documents)]
    return [(text[:SIZE], text[SIZE:]) for text in texts]


def losses(run: Path) -> dict[str, float]:
    """Return the held-out loss of a value's token, as a share of a uniform guess's."""
    import torch
    from mt_infer import load_run
    from mt_parallel_state import ParallelLayout, ParallelState

    dataset, near = IndexedDataset(FOLDER / "held-out"), Neighbours(FOLDER / "near-held-out")
    numbers = range(dataset.num_documents)
    read = np.concatenate([near.tokens(i)[None, :1] for i in numbers])
    tokens = torch.tensor(np.stack([dataset.document(i) for i in numbers]).astype(np.int64))
    text, found = tokens[:, :-1], torch.from_numpy(read)
    model = load_run(run, ParallelState(ParallelLayout())).model
    cases = {"their neighbours": found, "other keys' neighbours": found.roll(1, 0)}
    cases["no neighbours"] = torch.full_like(found, -1)
    shares = {}
    for name, passages in cases.items():
        batch = {"tokens": text, "neighbours": passages.clamp(min=0)}
        batch["neighbour_lengths"] = (passages >= 0).sum(-1)
        with torch.no_grad():
            scores = model(None, batch)[:, SIZE - 1 :].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, tokens[:, SIZE:].flatten())
        shares[name] = loss.item() / math.log(len(VALUES))
    return shares


def right_answers(answers: Path) -> str:
    """Count the answers with values of facts/library, and with values of facts/new."""
    given = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    shares = [
        sum(value == text for (_, value), text in zip(facts_of(name), given, strict=True))
        for name in ("held-out", "new")
    ]
    old, new = (f"{100 * share / len(given):.1f}%" for share in shares)
    return f"{old} of the answers are those of facts/db, {new} those of facts/new-db"


if __name__ == "__main__":
    if sys.argv[1:2] == ["losses"]:
        for name, share in losses(Path(sys.argv[2])).items():
            print(f"{share:.4f} of a guess's loss with {name}")
    elif sys.argv[1:] and not sys.argv[1].isdigit():
        print(right_answers(Path(sys.argv[1])))
    else:
        write(int(sys.argv[1]) if sys.argv[1:] else TRAINED)
