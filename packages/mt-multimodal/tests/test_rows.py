"""Rows of conversations with images: tokens, labels, pixels, packing, sources, refusals."""

import json
import os
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mt_data import DataError, DataFileError, Rows
from mt_multimodal import ImagePreprocessing, ImageTextDataset, open_images
from mt_tokenizer import ChatTemplate

IMAGE, PER_IMAGE = 4, 4  # as in the data sets of `rows_of`


def drawn(draw, count):
    """Conversations with their numbers of images."""
    for number in range(count):
        images = int(draw.choice([0, 1, 1, 3]))
        letters = "".join(draw.choice(list("abc "), draw.integers(1, 12)))
        yield images, f"{letters}{number}", "".join(draw.choice(list("xyz"), draw.integers(1, 6)))


@pytest.fixture
def tar(tmp_path, made):
    """A tar of drawn conversations, and the images of each."""
    members, talks, seed = [], list(drawn(np.random.default_rng(0), 30)), 0
    for number, (images, question, answer) in enumerate(talks):
        members.append((f"d/{number}.json", made.talk(images, question=question, answer=answer)))
        for place in range(images):
            members.append((f"d/{number}.{place}.png", made.png(seed)))
            seed += 1
    return made.write_tar(tmp_path / "a.tar", members), talks


def expected(tokenizer, images, question, answer):
    """Tokens and label weights of a conversation, by hand."""
    text = [tokenizer.special_tokens[name] for name in ("<|user|>", "<|end|>", "<|assistant|>")]
    user, end, assistant = text
    asked = [user, *[IMAGE] * PER_IMAGE * images, *tokenizer.encode(question), end, assistant]
    said = [*tokenizer.encode(answer), end]
    return [*asked, *said], [-100] * len(asked) + said


def test_packed_rows_have_each_conversation_once_with_its_images(tar, template, form, made):
    path, talks = tar
    data = ImageTextDataset(path, template, form, sequence_length=48)
    pixels = [form.preprocessing.pixels(made.picture(seed)) for seed in range(99)]
    first = np.cumsum([0, *(images for images, _, _ in talks)])
    seen = []
    for index in range(len(data)):
        row, talks_here = data.row(index), data.items(index)
        seen += talks_here
        numbers = [n for talk in talks_here for n in range(first[talk], first[talk + 1])]
        assert row["pixel_values"].shape[0] == len(numbers)
        for got, number in zip(row["pixel_values"], numbers, strict=True):
            assert (got == pixels[number]).all()
        assert (row["tokens"] == IMAGE).sum() == len(numbers) * PER_IMAGE
        assert not (row["labels"] == IMAGE).any()
        for place, talk in enumerate(talks_here):
            ids, labels = expected(template.tokenizer, *talks[talk])
            own = row["documents"] == place
            assert row["tokens"][own].tolist() == ids[:-1]
            assert row["labels"][own].tolist() == labels[1:]
            assert row["positions"][own].tolist() == list(range(len(ids) - 1))
    assert sorted(seen) == list(range(len(talks)))
    assert data.num_images == first[-1]


def test_batches_join_the_images_of_their_rows_where_a_stage_reads_them(tar, template, form):
    path, _ = tar
    data = ImageTextDataset(path, template, form, sequence_length=48)
    ids = np.arange(4)
    rows = [data.row(int(n))["pixel_values"] for n in ids]
    batch = Rows().read(data, ids)
    assert (batch["pixel_values"] == np.concatenate(rows)).all()
    assert batch["tokens"].shape == (4, 48)
    empty = Rows().read(data, np.array([-1, -1]))
    assert empty["pixel_values"].shape == (0, 3, 6, 8)
    part = Rows(parts=((0, 12), (36, 48))).read(data, ids)
    assert (part["pixel_values"] == batch["pixel_values"]).all()
    assert part["tokens"].shape == (4, 24)

    def fail(numbers):
        raise AssertionError(f"images {numbers} are decoded")

    data.pixel_values = fail
    assert Rows(stages=("last",)).read(data, ids)["pixel_values"].shape == (0, 3, 6, 8)


def test_one_thread_and_many_decode_the_same(tar, template, form):
    path, _ = tar
    one, four = (
        ImageTextDataset(path, template, replace(form, threads=threads), sequence_length=48)
        for threads in (1, 4)
    )
    assert one.fingerprint == four.fingerprint
    for index in range(len(one)):
        assert (one.row(index)["pixel_values"] == four.row(index)["pixel_values"]).all()


def test_json_lines_name_the_files_of_their_images(tmp_path, template, form, made):
    (tmp_path / "pictures").mkdir()
    for seed in range(3):
        made.picture(seed).save(tmp_path / f"pictures/{seed}.png")
    turns = [{"role": "user", "content": "<image><image>q"}, {"role": "assistant", "content": "a"}]
    parts = [{"type": "text", "text": "q"}, {"type": "image", "image": "2.png"}]
    lines = [
        {"image": ["1.png", "0.png"], "messages": turns},
        {"messages": [{"role": "user", "content": parts}, turns[1]]},
        {"messages": [{"role": "user", "content": "q"}, turns[1]]},
        {"image": "1.png", "prompt": "<image>\nq", "completion": "a"},
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ImageTextDataset(
        open_images(path, images=tmp_path / "pictures"),
        template,
        form,
        sequence_length=32,
        packing="none",
    )
    wanted = {0: [1, 0], 1: [2], 2: [], 3: [1]}
    for index in range(4):
        (talk,) = data.items(index)
        got = data.row(index)["pixel_values"]
        pixels = [form.preprocessing.pixels(made.picture(seed)) for seed in wanted[talk]]
        assert got.shape[0] == len(pixels)
        assert all((a == b).all() for a, b in zip(got, pixels, strict=True))


def test_parquet_rows_have_images_or_their_paths(tmp_path, template, form, made):
    contents = [made.png(seed) for seed in range(5)]
    (tmp_path / "4.png").write_bytes(contents[4])
    turns = [json.loads(made.talk(images))["conversations"] for images in (1, 2, 0, 1, 1)]
    cells = [[n] for n in (0,)] + [[1, 2], [], [3], [4]]
    as_bytes = [{"bytes": contents[n], "path": "gone.png"} for n in range(4)]
    as_bytes.append({"bytes": None, "path": "4.png"})
    tables = {
        "lists": pa.table({
            "conversations": turns, "images": [[as_bytes[n] for n in row] for row in cells]
        }),
        "bytes": pa.table({"conversations": turns, "image": [
            [contents[n] for n in row] or None for row in cells
        ]}),
        "one": pa.table({"conversations": turns[:1] * 5, "image": contents}),
        "path": pa.table({"conversations": turns[:1] * 2, "image": ["4.png"] * 2}),
    }  # fmt: skip
    for name, table in tables.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(table, path, row_group_size=2)
        data = ImageTextDataset(path, template, form, sequence_length=40, packing="none")
        wanted = {"one": [[n] for n in range(5)], "path": [[4]] * 2}.get(name, cells)
        assert len(data) == len(wanted)
        for index in range(len(data)):
            (talk,) = data.items(index)
            got = data.row(index)["pixel_values"]
            pixels = [form.preprocessing.pixels(made.picture(seed)) for seed in wanted[talk]]
            assert len(got) == len(pixels)
            assert all((a == b).all() for a, b in zip(got, pixels, strict=True))
    again = ImageTextDataset(path, template, form, sequence_length=40, packing="none")
    assert again.fingerprint == data.fingerprint


@pytest.mark.parametrize(
    ("cell", "word"),
    [([None], "the image None"), ([b"no image"], "row.*:1: image 1"), ([], "0 images")],
)
def test_parquet_rows_with_other_images_are_named(tmp_path, template, form, made, cell, word):
    turns = json.loads(made.talk(1))["conversations"]
    table = pa.table({"conversations": [turns], "images": pa.array([cell], pa.list_(pa.binary()))})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataFileError, match=word):
        ImageTextDataset(tmp_path / "rows.parquet", template, form, sequence_length=16).row(0)[
            "pixel_values"
        ]


def test_a_parquet_file_that_changes_or_is_damaged_is_named(tmp_path, template, form, made):
    path, turns = tmp_path / "rows.parquet", json.loads(made.talk(1))["conversations"]
    pq.write_table(pa.table({"conversations": [turns] * 3, "image": [made.png(0)] * 3}), path)
    whole = path.read_bytes()
    data = ImageTextDataset(path, template, form, sequence_length=16)
    place = whole.index(b"IDAT") + 8
    path.write_bytes(whole[:place] + b"x" + whole[place + 1 :])
    with pytest.raises(DataFileError, match=r"rows\.parquet:\d: image 1"):
        data.row(0)["pixel_values"]
    path.write_bytes(whole[:-20])
    with pytest.raises(DataFileError, match=r"rows\.parquet: cannot be read as parquet"):
        open_images(path)


def test_captions_are_what_the_assistant_says(tmp_path, template, form, made):
    path = made.write_tar(tmp_path / "a.tar", [("1.png", made.png(0)), ("1.txt", b"a cat\n")])
    data = ImageTextDataset(path, template, form, sequence_length=16)
    labels = data.row(0)["labels"]
    assert labels[labels >= 0][:-1].tolist() == template.tokenizer.encode("a cat")


def test_a_folder_is_read_file_by_file(tmp_path, template, form, made):
    (tmp_path / "b").mkdir()
    made.write_tar(tmp_path / "b/1.tar", [("1.json", made.talk(1)), ("1.png", made.png(0))])
    made.write_tar(tmp_path / "a.tar", [("1.json", made.talk(0))])
    line = json.loads(made.talk(1)) | {"image": "c.png"}
    made.picture(0).save(tmp_path / "b/c.png")
    (tmp_path / "b/2.jsonl").write_text(json.dumps(line))
    turns = [json.loads(made.talk(1))["conversations"]]
    table = pa.table({"conversations": turns, "image": [made.png(0)]})
    pq.write_table(table, tmp_path / "b/3.parquet")
    files = [tmp_path / name for name in ("a.tar", "b/1.tar", "b/2.jsonl", "b/3.parquet")]
    for _ in range(2):  # beside the indexes of the tars too
        whole, apart = (
            ImageTextDataset(given, template, form, sequence_length=16)
            for given in (tmp_path, files)
        )
        assert whole.fingerprint == apart.fingerprint
        assert len(whole.pixel_values(range(whole.num_images))) == 3


def test_a_caption_beside_a_description_is_read(tmp_path, template, form, made):
    """img2dataset writes both; a conversation is read in place of a caption."""
    about = json.dumps({"url": "u", "caption": "a dog", "width": 20, "prompt": "p"}).encode()
    for record, said in ((about, "a cat"), (made.talk(1, answer="yes"), "yes")):
        members = [("1.jpg", made.png(0)), ("1.txt", b"a cat"), ("1.json", record)]
        path = made.write_tar(tmp_path / "a.tar", members)
        labels = ImageTextDataset(path, template, form, sequence_length=16).row(0)["labels"]
        assert labels[labels >= 0][:-1].tolist() == template.tokenizer.encode(said)


def test_a_conversation_is_cut_before_an_image_and_never_inside(tmp_path, template, form, made):
    turns = [
        {"role": "user", "content": "<image>q"},
        {"role": "assistant", "content": "abc"},
        {"role": "user", "content": "<image><image>"},
    ]
    member = json.dumps({"messages": turns}).encode()
    members = [("1.json", member), *((f"1.{n}.png", made.png(n)) for n in range(3))]
    path = made.write_tar(tmp_path / "a.tar", members)
    for length in range(11, 30):
        data = ImageTextDataset(path, template, form, sequence_length=length, too_long="cut")
        row = data.row(0)
        assert (row["tokens"] == IMAGE).sum() == len(row["pixel_values"]) * PER_IMAGE
        assert (row["labels"] >= 0).sum() == min(4, length - 7)
    with pytest.raises(DataFileError, match=r"1\.json"):
        ImageTextDataset(path, template, form, sequence_length=11)


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ([("1.json", "talk2"), ("1.png", "png")], "places for them"),
        ([("1.json", "talk0"), ("1.png", "png")], "places for them"),
        ([("1.png", "png")], "neither json nor txt"),
        ([("1.json", b"{"), ("1.png", "png")], r"1\.json"),
        ([("1.json", b'{"images": {}, "conversations": []}')], "names the images"),
        ([("1.json", "named")], "not in the tar"),
        ([("1.txt", b"\xff"), ("1.png", "png")], "UTF-8"),
    ],
)
def test_samples_that_do_not_fit_are_refused_by_name(tmp_path, template, form, made, members, word):
    named = json.loads(made.talk(1)) | {"image": "../../x.png"}
    contents = {
        "talk0": made.talk(0),
        "talk2": made.talk(2),
        "png": made.png(0),
        "named": json.dumps(named).encode(),
    }
    members = [(name, contents.get(content, content)) for name, content in members]
    path = made.write_tar(tmp_path / "a.tar", members)
    with pytest.raises(DataError, match=word):
        ImageTextDataset(path, template, form, sequence_length=16)


LEADING_OUT = ["../secret.png", "/etc/passwd", "https://x/y.png", "data:image/png;base64,AA=="]


@pytest.mark.parametrize("name", [*LEADING_OUT, "link.png", "none.png", "pipe"])
def test_names_of_images_do_not_lead_out_of_their_folder(tmp_path, template, form, made, name):
    folder = tmp_path / "in"
    folder.mkdir()
    made.picture(0).save(tmp_path / "secret.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(folder / "pipe")
    line = json.loads(made.talk(1)) | {"image": name}
    (folder / "talks.jsonl").write_text(json.dumps(line))
    how = {"template": template, "form": form, "sequence_length": 16}
    if name in LEADING_OUT:  # before a run begins
        with pytest.raises(DataFileError, match=rf"talks\.jsonl:1: .*{name}"):
            ImageTextDataset(folder / "talks.jsonl", **how)
        return
    data = ImageTextDataset(folder / "talks.jsonl", **how)
    with pytest.raises(DataFileError, match=name):
        data.row(0)["pixel_values"]


def test_absolute_names_in_the_folder_are_read(tmp_path, template, form, made):
    made.picture(0).save(tmp_path / "a.png")
    line = json.loads(made.talk(1)) | {"image": str(tmp_path / "a.png")}
    (tmp_path / "talks.jsonl").write_text(json.dumps(line))
    for folder in (None, "/"):
        source = open_images(tmp_path / "talks.jsonl", images=folder)
        data = ImageTextDataset(source, template, form, sequence_length=16)
        assert len(data.row(0)["pixel_values"]) == 1


def test_a_template_that_writes_no_image_token_is_refused(tmp_path, template, form, made):
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    source += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    path = made.write_tar(tmp_path / "a.tar", [("1.json", made.talk(1)), ("1.png", made.png(0))])
    with (
        ChatTemplate(source, template.tokenizer) as other,
        pytest.raises(DataFileError, match="0 image tokens"),
    ):
        ImageTextDataset(path, other, form, sequence_length=400)


def test_the_name_of_the_image_token_in_a_message_is_text(tmp_path, template, form, made):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "<image>"}]},
        {"role": "assistant", "content": "<|end|>a"},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    row = ImageTextDataset(path, template, form, sequence_length=40).row(0)
    assert not (row["tokens"] == IMAGE).any()
    assert row["pixel_values"].shape[0] == 0


def test_other_data_and_preprocessing_have_another_fingerprint(tmp_path, template, form, made):
    def fingerprint(image, **changes):
        members = [("1.json", made.talk(1)), ("1.png", made.png(image))]
        path = made.write_tar(tmp_path / f"{image}.tar", members)
        how = {"form": form, "sequence_length": 16, **changes}
        return ImageTextDataset(path, template, **how).fingerprint

    first = fingerprint(0)
    assert fingerprint(0) == first
    other = ImagePreprocessing(size={"height": 6, "width": 8}, resample=2)
    changed = [
        fingerprint(1),
        fingerprint(0, form=replace(form, preprocessing=other)),
        fingerprint(0, seed=1),
    ]
    assert len({first, *changed}) == 4
