"""Parts of a build, on several processes and machines, joined into what one process writes."""

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from mt_data import (
    DataError,
    HeldOut,
    IndexedDataset,
    Part,
    build_corpus,
    merge_datasets,
    read_documents,
)
from mt_data.cli import main
from mt_tokenizer import load_tokenizer, train_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "—", "naïve", "日本"]
ENDINGS = ("bin", "idx", "json", "tokenizer.json")


def text(draw):
    return " ".join(draw.choices(WORDS, k=draw.randrange(0, 60)))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Files of each kind: long lines, no newline at the end, an empty file, texts, an array."""
    folder = tmp_path_factory.mktemp("source") / "texts"
    folder.mkdir()
    draw = random.Random(5)
    lines = [json.dumps({"text": text(draw)}, ensure_ascii=False) for _ in range(150)]
    lines[40] = json.dumps({"text": text(draw) * 60}, ensure_ascii=False)
    (folder / "a.jsonl").write_text("\n".join(lines[:100]) + "\n\n\r\n", encoding="utf-8-sig")
    (folder / "b.jsonl").write_text("\n".join(lines[100:]))
    (folder / "c.jsonl").touch()
    (folder / "d.json").write_text(json.dumps([{"text": text(draw)} for _ in range(20)]))
    for number in range(4):
        (folder / f"e{number}.txt").write_text(text(draw) or "x")
    (folder / "f.jsonl").touch()
    train_tokenizer([text(draw) for _ in range(50)], 300).save(folder.parent / "tok.json")
    return folder


@pytest.fixture
def places(source, tmp_path):
    return {"source": source, "tok": source.parent / "tok.json", "out": tmp_path}


@pytest.fixture
def command(places, capsys):
    def run(line):
        code = 0
        try:
            main(shlex.split(line.format(**places)))
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().err

    return run


def content(prefix):
    return {ending: Path(f"{prefix}.{ending}").read_bytes() for ending in ENDINGS}


@pytest.mark.parametrize("count", [1, 3, 16, 400])
def test_parts_hold_each_document_once_and_in_order(source, count):
    whole = [(document.path, document.line, document.text) for document in read_documents(source)]
    parts = [
        (document.path, document.line, document.text)
        for number in range(1, count + 1)
        for document in read_documents(source, part=Part(number=number, count=count))
    ]
    assert parts == whole


@pytest.mark.parametrize("count", [1, 3, 16])
def test_merged_parts_have_the_bytes_of_one_process(source, tmp_path, count):
    tokenizer = load_tokenizer(source.parent / "tok.json")
    build_corpus(read_documents(source), tmp_path / "whole", tokenizer)
    prefixes = []
    for number in range(1, count + 1):
        prefixes.append(tmp_path / f"part{number}")
        build_corpus(
            read_documents(source, part=Part(number=number, count=count)), prefixes[-1], tokenizer
        )
    random.Random(0).shuffle(prefixes)
    merge_datasets(prefixes, tmp_path / "merged")
    assert content(tmp_path / "merged") == content(tmp_path / "whole")


@pytest.mark.parametrize("count", [1, 3, 16])
def test_documents_are_held_out_alike_in_any_number_of_parts(source, tmp_path, command, count):
    """Both data sets have the bytes of one process, and together each document once."""
    tokenizer = load_tokenizer(source.parent / "tok.json")
    whole = build_corpus(read_documents(source), tmp_path / "all", tokenizer)
    rule = HeldOut(fraction=0.2)
    stats = build_corpus(read_documents(source), tmp_path / "whole", tokenizer, held_out=rule)
    held = [document for document in read_documents(source) if rule.holds_out(document)]
    build_corpus(held, tmp_path / "held", tokenizer)
    assert content(tmp_path / "whole-validation") == content(tmp_path / "held")
    assert stats.documents + stats.held_out.documents == whole.documents
    assert stats.bytes + stats.held_out.bytes == whole.bytes
    assert stats.empty_documents + stats.held_out.empty_documents == whole.empty_documents
    prefixes = []
    for number in range(1, count + 1):
        prefixes.append(str(tmp_path / f"part{number}"))
        part = read_documents(source, part=Part(number=number, count=count))
        build_corpus(part, prefixes[-1], tokenizer, held_out=rule)
    merge_datasets(prefixes, tmp_path / "train")
    sides = [f"{prefix}-validation" for prefix in prefixes]
    merge_datasets(sides, tmp_path / "validation")
    assert content(tmp_path / "train") == content(tmp_path / "whole")
    assert content(tmp_path / "validation") == content(tmp_path / "whole-validation")
    if count > 1:
        with pytest.raises(DataError, match="is_held_out"):
            merge_datasets([prefixes[0], *sides[1:]], tmp_path / "mixed")
    build = "build {source} --tokenizer {tok} --out {out}/c --held-out 0.2"
    assert command(f"{build} --parts {count}") == (0, "")
    assert content(tmp_path / "c") == content(tmp_path / "whole")
    assert content(tmp_path / "c-validation") == content(tmp_path / "whole-validation")


def test_a_build_that_was_killed_while_it_wrote_its_datasets_goes_on(tmp_path, command):
    build = "build {source} --tokenizer {tok} --out {out}/c --held-out 0.2 --parts 2"
    assert command(build)[0] == 0
    wanted = content(tmp_path / "c"), content(tmp_path / "c-validation")
    code, error = command(build)
    assert code == 2
    assert "--overwrite" in error
    (tmp_path / "c.idx").unlink()  # the file that is written last
    (tmp_path / "c.parts").mkdir()
    assert command(build)[0] == 0
    assert (content(tmp_path / "c"), content(tmp_path / "c-validation")) == wanted


@pytest.mark.parametrize(
    ("share", "message"), [("1", "must lie between 0 and 1"), ("1e-9", "'c-validation'")]
)
def test_a_share_that_leaves_a_side_empty_is_refused(tmp_path, command, share, message):
    code, error = command("build {source} --tokenizer {tok} --out {out}/c --held-out " + share)
    assert code == 2
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_datasets_that_are_no_parts_are_joined_as_given(source, tmp_path):
    tokenizer = load_tokenizer(source.parent / "tok.json")
    for name in ("a.jsonl", "d.json"):
        build_corpus(read_documents(source / name), tmp_path / name[0], tokenizer)
    stats = merge_datasets([tmp_path / "d", tmp_path / "a", tmp_path / "d"], tmp_path / "all")
    d, a, merged = (IndexedDataset(tmp_path / name) for name in ("d", "a", "all"))
    expected = [*d, *a, *d]
    assert [row.tolist() for row in merged] == [row.tolist() for row in expected]
    assert stats.documents == merged.num_documents == len(expected)
    assert stats.bytes == 2 * d.metadata()["bytes"] + a.metadata()["bytes"]


def test_parts_that_do_not_fit_are_refused(source, tmp_path, command):
    for part in ("1/3", "2/3", "3/3", "1/2"):
        name = part.replace("/", "of")
        line = f"build {{source}} --tokenizer {{tok}} --out {{out}}/{name} --part {part}"
        assert command(line)[0] == 0
    for prefixes, word in (
        ("{out}/1of3 {out}/3of3", "part 2 is missing"),
        ("{out}/1of3 {out}/2of3 {out}/3of3 {out}/2of3", "twice"),
        ("{out}/1of3 {out}/1of2", "the same files"),
    ):
        code, error = command(f"merge {prefixes} --out {{out}}/m")
        assert code == 2
        assert error.startswith("mt-data: ")
        assert word in error
    damaged = Path(f"{tmp_path}/2of3.bin")
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"\0\1")
    code, error = command("merge {out}/1of3 {out}/2of3 {out}/3of3 --out {out}/m")
    assert code == 2
    assert "2of3.bin" in error
    assert not list(tmp_path.glob("m.*"))


def test_a_killed_build_goes_on_where_it_was(places, tmp_path, command):
    assert command("build {source} --tokenizer {tok} --out {out}/whole")[0] == 0
    with building(places) as process:
        wait_for(lambda: process.poll() is not None or parts_of(tmp_path))
    assert parts_of(tmp_path) or (tmp_path / "c.idx").exists()
    assert command(f"{BUILD} --overwrite")[0] == 0
    assert content(tmp_path / "c") == content(tmp_path / "whole")
    assert not (tmp_path / "c.parts").exists()


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Let new processes look at this file for the moment at which they kill their build."""
    path = tmp_path_factory.mktemp("plan") / "plan"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "kill_hook"))
        patch.setenv("KILL_PLAN", str(path))
        yield path


@pytest.fixture(scope="module")
def cluster(plan):
    """Start Ray on this machine, for builds that come and go; its address."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


BUILD = "build {source} --tokenizer {tok} --out {out}/c --parts 5 --workers 2"
KILLS = 50
MOMENTS = 9  # four files are created and renamed, for a part or the whole; then the parts go


@pytest.mark.campaign
@pytest.mark.parametrize("on", ["processes", "ray"])
@pytest.mark.parametrize("parts", [1, 3, 16])
def test_fifty_kills_change_no_byte(
    places, tmp_path, plan, command, record_property, monkeypatch, request, parts, on
):
    """A kill comes at a drawn one of the files of a part or of the whole, or somewhat later."""
    if on == "ray":
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("cluster"))
    assert command("build {source} --tokenizer {tok} --out {out}/whole")[0] == 0
    build = f"build {{source}} --tokenizer {{tok}} --out {{out}}/c --parts {parts} --on {on}"
    build += " --workers 2"
    draw, left = random.Random(parts), Counter()
    for _ in range(KILLS):
        if (tmp_path / "c.idx").exists():
            left["whole"] += 1
            assert content(tmp_path / "c") == content(tmp_path / "whole")
            for path in tmp_path.glob("c.*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        built = {path.stem for path in parts_of(tmp_path)}
        missing = [name for name in map(str, range(1, parts + 1)) if name not in built]
        name = draw.choice(missing) if missing and draw.random() < 0.5 else "c"
        moment = draw.randint(1, MOMENTS - (name != "c"))
        delay = draw.choice([0, draw.uniform(0, 0.02)])
        with building(places, build) as process:
            plan.write_text(f"{name} {moment} {delay} {process.pid}")
            assert process.wait() == -signal.SIGKILL
        plan.unlink()
        left["finished parts"] += bool(parts_of(tmp_path))
        left["unfinished parts"] += any(tmp_path.glob("c.parts/*/.*.tmp-*"))
        left["unfinished whole"] += any(tmp_path.glob(".c.*.tmp-*"))
    assert command(f"{build} --overwrite")[0] == 0
    assert content(tmp_path / "c") == content(tmp_path / "whole")
    record_property("killed", KILLS)
    for found, count in left.items():
        record_property(f"left {found}", count)
    for name in ("finished parts", "unfinished parts", "unfinished whole", "whole"):
        assert left[name], left


@contextlib.contextmanager
def building(places, build=BUILD):
    """Run a build; kill it at the end of the block, and wait for the end of its children."""
    start = [sys.executable, "-c", "from mt_data.cli import main; main()"]
    process = subprocess.Popen(
        [*start, *shlex.split(build.format(**places))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.wait()
    wait_for(lambda: not processes_of(process.pid))


def parts_of(folder):
    return sorted(folder.glob("c.parts/*/*.idx"))


def wait_for(condition):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def processes_of(session):
    """Return the processes of a session, and those in which Ray builds a part."""
    mine = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            named = (path / "cmdline").read_bytes().startswith(b"ray::_run")
            if named or os.getsid(int(path.name)) == session:
                mine.append(path.name)
    return mine


@pytest.mark.campaign  # Ray takes long to start
@pytest.mark.usefixtures("cluster")
def test_ray_builds_the_parts(tmp_path, command):
    assert command("build {source} --tokenizer {tok} --out {out}/whole")[0] == 0
    assert command("build {source} --tokenizer {tok} --out {out}/c --parts 3 --on ray")[0] == 0
    assert content(tmp_path / "c") == content(tmp_path / "whole")
