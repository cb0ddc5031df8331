"""Add a family of models from another package: other names, and fused projections.

In the package's pyproject.toml stands

    [project.entry-points."mt.models"]
    fused = "family:FAMILY"

and from then on its folders are read and written like all others.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from mt_model import (
    GPT,
    AttentionConfig,
    Family,
    LayerConfig,
    Link,
    MLPConfig,
    ModelConfig,
    RopeConfig,
    from_pretrained,
    save_pretrained,
)


@dataclass(frozen=True, kw_only=True)
class FusedFields:
    """Every field of config.json that changes numbers; all others are refused."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    n_ctx: int = 2048


def read(given: FusedFields) -> ModelConfig:
    """Return the model that config.json describes."""
    mixer = AttentionConfig(
        num_heads=given.n_heads,
        num_kv_heads=given.n_heads,
        head_dim=given.d_model // given.n_heads,
        rope=RopeConfig(theta=10000.0),
    )
    layer = LayerConfig(mixer=mixer, feed_forward=MLPConfig(ffn_size=given.d_ff))
    return ModelConfig(
        vocab_size=given.vocab_size,
        hidden_size=given.d_model,
        max_sequence_length=given.n_ctx,
        layers=(layer,) * given.n_layers,
    )


def write(config: ModelConfig) -> FusedFields:
    """Return the fields of a model; what they can't say is noticed by reading them again."""
    mixer, mlp = config.layers[0].mixer, config.layers[0].feed_forward
    if not isinstance(mixer, AttentionConfig) or not isinstance(mlp, MLPConfig):
        raise ValueError("layer 0 is not attention and an MLP")  # noqa: TRY004
    return FusedFields(
        vocab_size=config.vocab_size,
        d_model=config.hidden_size,
        n_layers=config.num_layers,
        n_heads=mixer.num_heads,
        d_ff=mlp.ffn_size,
        n_ctx=config.max_sequence_length,
    )


def links(config: ModelConfig) -> Iterator[Link]:
    """Say which tensor is which parameter; every element of both has to come exactly once."""
    hidden = config.hidden_size
    yield Link(source="wte", shape=(config.vocab_size, hidden), target="embedding.weight")
    yield Link(source="norm_f", shape=(hidden,), target="final_norm.weight")
    for i in range(config.num_layers):
        fields, ours = write(config), f"layers.{i}"
        for norm, target in (("norm_1", "mixer_norm"), ("norm_2", "feed_forward_norm")):
            yield Link(source=f"h.{i}.{norm}", shape=(hidden,), target=f"{ours}.{target}.weight")
        # Stored as [in, q | k | v]: a range of its columns, transposed, is one part of ours.
        for part in range(3):
            yield Link(
                source=f"h.{i}.qkv",
                shape=(hidden, 3 * hidden),
                part={1: (part * hidden, (part + 1) * hidden)},
                target=f"{ours}.mixer.qkv.weight",  # [heads, q k v, head_dim, hidden]
                box={1: (part, part + 1)},
                order=(1, 2, 3, 0),
            )
        yield Link(source=f"h.{i}.out", shape=(hidden, hidden), target=f"{ours}.mixer.out.weight")
        shape = (2 * fields.d_ff, hidden)  # gate over up, as ours [2, ffn, hidden] in memory
        yield Link(source=f"h.{i}.up", shape=shape, target=f"{ours}.feed_forward.up.weight")
        shape = (hidden, fields.d_ff)
        yield Link(source=f"h.{i}.down", shape=shape, target=f"{ours}.feed_forward.down.weight")


FAMILY = Family(
    name="fused",
    architectures=("FusedForCausalLM",),
    model_types=("fused",),
    fields=FusedFields,
    read=read,
    write=write,
    links=links,
)


def install(folder: Path) -> None:
    """Stand in for `pip install`: what it writes beside a package that has an entry point."""
    info = folder / "fused-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fused\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mt.models]\nfused = family:FAMILY\n")
    (folder / "family.py").write_text(Path(__file__).read_text())


if __name__ == "__main__":
    import sys

    with tempfile.TemporaryDirectory() as name:
        install(Path(name))
        sys.path.insert(0, name)
        given = FusedFields(vocab_size=50, d_model=32, n_layers=2, n_heads=4, d_ff=48, n_ctx=64)
        model = GPT(read(given), seed=7).eval()
        save_pretrained(model, Path(name) / "out", family="fused", file_size=20_000)
        print(*sorted(path.name for path in (Path(name) / "out").iterdir()), sep="\n")
        tokens = torch.arange(10)[None]
        again = from_pretrained(Path(name) / "out")
        assert torch.equal(again(tokens), model(tokens))
