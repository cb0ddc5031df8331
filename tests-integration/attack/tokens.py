"""Damaged or hostile token files, tokenizers and texts."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from world import (
    BadError,
    Row,
    World,
    call,
    demand,
    expect,
    files_of,
    flip_bit,
    infer,
    replace_with,
    train,
)

HOSTILE_LINES = (
    "{",
    "[]",
    '"text"',
    '{"text": 5}',
    '{"txt": "x"}',
    '{"text": null}',
    '{"text": ' + "9" * 5000 + "}",
    "[" * 100_000,
    '{"text": "\\ud800"}',
    "\udcff",
    '{"text": "' + "x" * 300_000 + '"',
    "NaN",
    "\0",
)


def damaged_index(world: World, rng: random.Random, scratch: Path) -> None:
    """Change an index file at random: refused, or what verifying finds."""
    from mt_data import DataError, IndexedDataset
    from mt_files import FileError

    data = Path(shutil.copytree(world.run / "data", scratch / "data"))
    path = data / "train.idx"
    for _ in range(rng.choice([1, 1, 1, 3])):
        flip_bit(path, rng)
    how = rng.randrange(6)
    if how == 0:
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    elif how == 1:
        path.write_bytes(path.read_bytes() + rng.randbytes(9))
    elif how == 2:
        replace_with(path, rng.choice(["fifo", "folder", "device"]), scratch)
    with_json = rng.random() < 0.5
    if not with_json:
        (data / "train.json").unlink()
    try:
        dataset = IndexedDataset(data / "train")
        for index in range(len(dataset)):
            dataset[index]
        dataset.verify()
    except (DataError, FileError) as error:
        demand(len(str(error)) < 2000, "a long message")
        return
    demand(not with_json, "a damaged index passed verify()")


def flipped_tokens(world: World, rng: random.Random, scratch: Path) -> None:
    """Flip a bit of the tokens, then continue the run."""
    run = world.copy(scratch)
    flip_bit(run / "data" / "train.bin", rng)
    expect(train(world.train(run, "training.steps=8")), [1, 2], named="train.bin")


def other_tokenizer(world: World, rng: random.Random, scratch: Path) -> None:
    """Change the run's tokenizer: refused, or what changed means nothing to a tokenizer."""
    run = world.copy(scratch)
    command = ["generate", str(run), "--prompt", "old", "--max-tokens", "2"]
    path = run / "tokenizer.json"
    before = path.read_bytes()
    how = rng.choice(["flip", "flip", "flip", "device", "fifo", "folder", "empty"])
    if how == "flip":
        flip_bit(path, rng)
    elif how == "empty":
        path.write_bytes(b"")
    else:
        replace_with(path, how, scratch)
    result = infer(command)
    if result.code == 0 and how == "flip":  # a word that is no key, where the default was meant
        path.write_bytes(before)
        demand(infer(command).output == result.output, "another tokenizer, another text")
    else:
        expect(result, [1, 2], named="tokenizer")


def edited_tokenizer(world: World, rng: random.Random, scratch: Path) -> None:
    """Load and use a tokenizer file of which one place was exchanged: typed errors alone."""
    from checkpoints import mutate
    from mt_tokenizer import TokenizerError, load_tokenizer

    content = (world.run / "tokenizer.json").read_text()
    path = scratch / "tokenizer.json"
    if rng.random() < 0.5:
        path.write_text(json.dumps(mutate(json.loads(content), rng)))
    else:
        path.write_text(content)
        for _ in range(rng.choice([1, 1, 5])):
            flip_bit(path, rng)
    try:
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode("old reder, newish blue\n\n é")
        tokenizer.decode(ids)
    except TokenizerError as error:
        demand(len(str(error)) < 5000, "a long message")


def hostile_texts(world: World, rng: random.Random, scratch: Path) -> None:
    """Build a data set from lines without documents."""
    from mt_data.cli import main

    path = scratch / "texts.jsonl"
    lines = rng.choices([*HOSTILE_LINES, '{"text": "old red"}'], k=rng.choice([1, 3, 2000]))
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    if rng.random() < 0.3:
        path.write_bytes(rng.randbytes(5000))
    if rng.random() < 0.4:
        path = _damaged_table(rng, scratch)
    skip = rng.choice([(), ("--skip-bad",)])
    tokenizer = str(world.run / "tokenizer.json")
    out = scratch / "out"
    result = call(main, ["build", str(path), "--out", str(out), "--tokenizer", tokenizer, *skip])
    expect(result)
    left = [each.name for each in files_of(scratch) if ".tmp-" in each.name]
    demand(not left, f"left behind: {left}")


def _damaged_table(rng: random.Random, scratch: Path) -> Path:
    """Write a table of texts with a few flipped bits, or a folder of one that `datasets` saved."""
    import pyarrow.ipc
    import pyarrow.parquet

    table = pyarrow.table({"text": ["old red", "newish blue é" * rng.randrange(40)] * 50})
    folder = scratch / "tables"
    folder.mkdir()
    if rng.random() < 0.3:
        path = folder / "a.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=30)
    else:
        path = folder / "a.arrow"
        with (
            pyarrow.OSFile(str(path), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=30)
    for _ in range(rng.choice([1, 1, 4])):
        flip_bit(path, rng)
    if rng.random() < 0.3:
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    if path.suffix == ".arrow" and rng.random() < 0.5:
        names = [{"filename": rng.choice(["a.arrow", "a.arrow", "../a.arrow", "", "\0", 7])}]
        state = json.dumps({"_data_files": rng.choice([names, names, names * 9, [[]], None])})
        (folder / "state.json").write_text(rng.choice([state, state, state[:-1], "[]"]))
        return folder
    return path


def links_out(world: World, rng: random.Random, scratch: Path) -> None:
    """Put links that lead out into a folder of texts."""
    folder = Path(shutil.copytree(world.folder / "texts", scratch / "texts"))
    (scratch / "secret").write_text("the secret word")
    link = folder / f"{rng.randrange(99)}.link.txt"
    link.symlink_to(rng.choice(["../secret", str(scratch / "secret"), "/etc/passwd"]))
    result = train(world.train(scratch / "run", f"data.corpus={folder}"))
    if result.code == 0:
        _no_secret(scratch / "run")
    expect(result)


def _no_secret(run: Path) -> None:
    from mt_data import IndexedDataset
    from mt_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(run / "data" / "tokenizer.json")
    for name in ("train", "validation"):
        dataset = IndexedDataset(run / "data" / name)
        for index in range(len(dataset)):
            text = tokenizer.decode(dataset[index].tolist())
            demand("secret word" not in text and "root:" not in text, "a link out was read")


def damaged_record(world: World, rng: random.Random, scratch: Path) -> None:
    """Damage `metrics.jsonl` or `corpus.json`: no row is lost, and the run goes on or says why."""
    run = world.copy(scratch)
    contents = [
        b"\0",
        b"\xff\xfe",
        b"[]\n",
        b"{}\n",
        b'{"step": "x"}\n',
        b'{"step": -1}\n',
        b"[" * 9999,
    ]
    contents += [b'{"step": ' + b"9" * 5000 + b"}\n", b'{"step": NaN}\n', b"\n\n"]
    path = rng.choice([run / "metrics.jsonl", run / "data" / "corpus.json"])
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(contents))
    path.write_bytes(b"".join(lines))
    before = _readable_losses(run)  # without a line that what was put before it has joined
    result = train(world.train(run, "training.steps=8"))
    expect(result)
    if result.code == 0:
        after = _readable_losses(run)
        lost = {step for step, loss in before.items() if after.get(step) != loss}
        demand(not lost, f"rows lost: {sorted(lost)}")


def _readable_losses(run: Path) -> dict[int, float]:
    found = {}
    for line in (run / "metrics.jsonl").read_bytes().splitlines():
        try:
            row = json.loads(line)
            found[row["step"]] = row["loss"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def planted_links(world: World, rng: random.Random, scratch: Path) -> None:
    """Put links at every name that a run writes: what they lead to stays as it was."""
    run, victim = world.copy(scratch), scratch / "victim"
    victim.write_text("as it was")
    for name in (
        "config.yaml",
        "loss.png",
        ".config.yaml.tmp",
        ".metrics.jsonl.tmp",
        ".tokenizer.json.tmp",
    ):
        path = run / name
        path.unlink(missing_ok=True)
        path.symlink_to(rng.choice([victim, Path("../victim")]))
    expect(train(world.train(run, "training.steps=8")))
    if victim.read_text() != "as it was":
        raise BadError(f"written through a link: {victim.read_text()[:200]}")


ROWS = [
    Row(name="token index damaged", attack=damaged_index, cases=200, sample=2),
    Row(name="bit flips of tokens", attack=flipped_tokens, cases=30, sample=1),
    Row(name="tokenizer of a run changed", attack=other_tokenizer, cases=40, sample=1),
    Row(name="tokenizer file edited", attack=edited_tokenizer, cases=200, sample=2),
    Row(name="texts that are no documents", attack=hostile_texts, cases=60, sample=2),
    Row(name="links out of a corpus", attack=links_out, cases=6, sample=1),
    Row(name="metrics and corpus records damaged", attack=damaged_record, cases=24, sample=1),
    Row(name="links where files are written", attack=planted_links, cases=4, sample=1),
]
