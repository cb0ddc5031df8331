"""What serving reads and writes besides HTTP: receipts, files of keys, exports of other engines."""

from __future__ import annotations

import json
import random
from pathlib import Path

from checkpoints import mutate
from world import MESSAGE_BYTES, Row, World, demand, expect, flip_bit, infer, replace_with

HOSTILE = ("-1", "0", "nan", "x", "", "9" * 50, "--tp", "gpt-2", "q8_0", "trtllm", "3")
OPTIONS = ("--format", "--type", "--tp", "--pp", "--splitting", "--step", "--bogus")


def receipt(world: World, rng: random.Random, scratch: Path) -> None:
    """Damage a receipt, or exchange a value of it: replayed, refused, or said what differs."""

    def make(path: Path) -> None:
        from mt_files import to_plain
        from mt_infer import Engine, Sampling
        from mt_infer.receipts import Receipt, answered, versions

        how, engine = Sampling(seed=1, max_tokens=6, logprobs=True), Engine.from_folder(world.run)
        made = Receipt(
            model="run",
            step=engine.step,
            weights=engine.digest,
            dtype="float32",
            layout="tp1-pp1",
            versions=versions(),
            prompts=((1, 2, 3),),
            sampling=how,
            answers=answered(engine.generate([1, 2, 3], how)),
        )
        path.write_text(json.dumps({"receipt": to_plain(made)}))

    path, how = scratch / "answer.json", rng.choice(["forged"] * 4 + ["flip", "cut", "device"])
    text = world.once("receipt.json", make).read_text()
    path.write_text(text)
    if how == "forged":
        path.write_text(json.dumps(mutate(json.loads(text), rng)))
    elif how == "flip":
        flip_bit(path, rng)
    elif how == "cut":
        path.write_text(text[: rng.randrange(len(text))])
    else:
        replace_with(path, how, scratch)
    result = infer(["replay", str(path), "--model", str(world.run)])
    expect(result, codes=(0, 1, 2)) if result.errors else demand(result.output, "nothing was said")


def keys(world: World, rng: random.Random, scratch: Path) -> None:
    """Spoil a file of keys: read, or refused without a key in the message."""
    from mt_files import UserError
    from mt_infer.server import Keys
    from mt_infer.server.keys import read_keys

    path, secret = scratch / "keys", "a-key-of-nineteen-s"
    path.write_text(f"# ours\n{secret}\n{secret[::-1]} priority=1\n")
    path.chmod(rng.choice([0o600, 0o600, 0o600, 0o644, 0o660]))
    how = rng.choice(["flip", "flip", "fifo", "device", "folder", "secret", "long", "none"])
    if how == "flip":
        flip_bit(path, rng)
    elif how == "long":
        path.write_text("x" * 3_000_000)
    elif how != "none":
        replace_with(path, how, scratch)
    try:
        found = Keys(clients=read_keys(path))
    except (UserError, ValueError, OSError) as error:
        demand(len(str(error)) < MESSAGE_BYTES, "a long message")
        demand(secret not in str(error), "the message has a key")
        return
    demand(how in ("flip", "none"), f"keys were read with {how}")
    demand(path.stat().st_mode & 0o077 == 0, "others may read the file")
    demand(found.clients, "no keys")


def export(world: World, rng: random.Random, scratch: Path) -> None:
    """Export with arguments that make no sense: what fails leaves nothing behind."""
    out = scratch / "out"
    arguments = ["export", str(world.run), str(out), "--format", rng.choice(["gguf", "trtllm"])]
    for option in rng.sample(OPTIONS, rng.choice([1, 1, 2])):
        arguments += [option, rng.choice(HOSTILE)]
    if rng.random() < 0.2:
        arguments[rng.choice([1, 2])] = rng.choice(["/dev/null", str(world.folder), "x" * 5000])
    result = infer(arguments)
    expect(result)
    demand(not result.code or not out.exists(), "a failed export left something")


ROWS = [
    Row(name="receipts damaged or forged", attack=receipt, cases=100),
    Row(name="files of keys spoiled", attack=keys, cases=100),
    Row(name="hostile arguments of export", attack=export, cases=100),
]
