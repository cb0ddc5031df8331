"""Drawn images for llava.yaml: shapes of a colour, whose names a model learns.

    python llava.py                # writes the folder shapes: tars, a tokenizer, a preprocessor
    python llava.py runs/llava     # counts a run's right answers to the held-out questions

An image shows one of six shapes in one of eight colours, and is asked for one of them. Six
combinations of a shape and a colour are in no image of train.tar; held-out.tar has only these.
"""

import io
import json
import random
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

FOLDER = Path("shapes")
SIZE, TRAINED, HELD_OUT = 24, 6000, 120
SHAPES = ("square", "ring", "triangle", "cross", "bar", "pole")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 230),
    "yellow": (230, 210, 40),
    "purple": (160, 50, 180),
    "white": (245, 245, 245),
    "orange": (240, 130, 30),
    "cyan": (60, 210, 220),
}
QUESTIONS = "which colour ?", "which shape ?"
UNKNOWN = "<unk>"
SPECIAL = ("<|eod|>", "<|user|>", "<|assistant|>", "<|end|>", "<image>")


def picture(shape: str, colour: str, chance: random.Random) -> bytes:
    """Return a PNG of a shape on a dark ground."""
    ground = tuple(chance.randrange(50) for _ in range(3))
    image = Image.new("RGB", (SIZE, SIZE), ground)
    draw = ImageDraw.Draw(image)
    fill = tuple(min(255, value + chance.randint(-15, 15)) for value in COLOURS[colour])
    half = chance.randint(8, 9)
    x, y = (SIZE // 2 + chance.randint(-1, 1) for _ in range(2))
    box, third = (x - half, y - half, x + half, y + half), half // 3
    if shape == "square":
        draw.rectangle(box, fill)
    elif shape == "ring":
        draw.ellipse(box, outline=fill, width=3)
    elif shape == "triangle":
        draw.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill)
    elif shape == "cross":
        draw.rectangle((x - third, y - half, x + third, y + half), fill)
        draw.rectangle((x - half, y - third, x + half, y + third), fill)
    elif shape == "bar":
        draw.rectangle((x - half, y - third, x + half, y + third), fill)
    else:
        draw.rectangle((x - third, y - half, x + third, y + half), fill)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def is_held_out(shape: str, colour: str) -> bool:
    """Tell whether a combination is in no image of train.tar."""
    return SHAPES.index(shape) == list(COLOURS).index(colour)


def write_tar(path: Path, pairs: Iterable[tuple[str, str]], seed: int) -> None:
    """Write a sample for each shape and colour: an image beside a conversation."""
    chance = random.Random(seed)  # noqa: S311 - drawings, no secrets
    with tarfile.open(path, "w") as tar:
        for number, (shape, colour) in enumerate(pairs):
            which = chance.randrange(2)
            said = {"from": "gpt", "value": (colour, shape)[which]}
            turns = [{"from": "human", "value": f"<image>\n{QUESTIONS[which]}"}, said]
            talk = json.dumps({"conversations": turns}).encode()
            members = {"json": talk, "png": picture(shape, colour, chance)}
            for kind, content in members.items():
                member = tarfile.TarInfo(f"{number:05}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write() -> None:
    """Write the images, the tokenizer of the words, and how images become pixel values."""
    FOLDER.mkdir(exist_ok=True)
    every = [(shape, colour) for shape in SHAPES for colour in COLOURS]
    held_out = [pair for pair in every if is_held_out(*pair)]
    trained = [pair for pair in every if not is_held_out(*pair)]
    write_tar(FOLDER / "train.tar", (trained[n % len(trained)] for n in range(TRAINED)), 0)
    write_tar(FOLDER / "held-out.tar", (held_out[n % len(held_out)] for n in range(HELD_OUT)), 1)
    words = [*SPECIAL, UNKNOWN, *" ".join(QUESTIONS).split(), *COLOURS, *SHAPES]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    preprocessor = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": SIZE, "width": SIZE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (FOLDER / "preprocessor_config.json").write_text(json.dumps(preprocessor))


def share_of_right(run: Path, *, shuffled: bool = False) -> float:
    """Return the share of held-out questions that a run answers, of own images or of others'."""
    from mt_infer import Engine, Sampling
    from mt_multimodal import TarIndex, with_parts
    from mt_tokenizer import ChatTemplate, load_tokenizer

    tar = TarIndex(FOLDER / "held-out.tar")
    members = [tar.sample(number) for number in range(tar.num_samples)]
    talks = [json.loads(tar.read(each["json"]))["conversations"] for each in members]
    images = [Image.open(io.BytesIO(tar.read(each["png"]))) for each in members]
    if shuffled:
        random.Random(0).shuffle(images)  # noqa: S311
    tokenizer = load_tokenizer(run / "tokenizer.json", eod="<|eod|>")
    prompts = []
    with ChatTemplate.from_folder(run, tokenizer) as template:
        for talk in talks:
            messages, _ = with_parts([{"role": "user", "content": talk[0]["value"]}])
            prompts.append(tokenizer.encode_chat(template.write(messages)))
    with Engine.from_folder(run) as engine:
        sampling = Sampling(temperature=0.0, max_tokens=4, stop=("<|end|>",))
        given = engine.generate(prompts, sampling, [[image] for image in images])
    first = [(done.text or "").split()[:1] for done in given]
    return sum(a == [talk[1]["value"]] for a, talk in zip(first, talks, strict=True)) / len(talks)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(f"{share_of_right(Path(sys.argv[1])):.1%} of the answers are right")
        print(f"{share_of_right(Path(sys.argv[1]), shuffled=True):.1%} with images of others")
    else:
        write()
