"""Angles of every scaling against plain formulas in fp64 and transformers, and what a pass does."""

import json
import math
import random

import pytest
import torch
from mt_files import FieldError
from mt_fusions import ROPE
from mt_model import (
    GPT,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    ModelConfig,
    RopeConfig,
    YarnScaling,
    gpt,
    preset,
)
from mt_model.rope.config import Rotary
from mt_model.rope.rotary import rotary_table

TINY = {"vocab_size": 48, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "init_std": 0.3}
HEAD_DIM = 16
LENGTHS = (5, 64, 65, 300)


def draw(kind, seed):
    """One scaling of a kind, its rope, and what transformers calls them."""
    rng = random.Random(f"{kind} {seed}")
    fraction = rng.choice([1.0, 0.5])
    theta, factor = rng.choice([100.0, 1e4, 5e5]), rng.choice([1.0, 2.0, 8.5, 32.0])
    theirs = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    theirs["partial_rotary_factor"] = fraction
    original, fields = 64, {"factor": factor}
    if kind != "linear":
        theirs["original_max_position_embeddings"] = fields["original_length"] = original
    if kind == "llama3":
        low = rng.uniform(0.5, 2)
        more = {"low_freq_factor": low, "high_freq_factor": low + rng.uniform(0.5, 4)}
        fields |= more
        theirs |= more
    if kind == "yarn":
        more = {
            "beta_fast": rng.choice([32.0, 4.0]),
            "beta_slow": rng.choice([1.0, 0.5]),
            "mscale": rng.choice([None, 0.7]),
            "mscale_all_dim": rng.choice([None, 1.3]),
            "attention_factor": rng.choice([None, None, 1.25]),
            "truncate": rng.choice([True, False]),
        }
        fields |= more
        theirs |= more
    if kind == "longrope":
        pairs = int(HEAD_DIM * fraction) // 2
        more = {
            "short_factor": [rng.uniform(1, 2) for _ in range(pairs)],
            "long_factor": [rng.uniform(1, 9) for _ in range(pairs)],
            "attention_factor": rng.choice([None, 1.25]),
        }
        fields |= {name: tuple(v) if isinstance(v, list) else v for name, v in more.items()}
        theirs |= more
    rope = RopeConfig(theta=theta, fraction=fraction, scaling=KINDS[kind](**fields))
    return rope, theirs, original


KINDS = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongropeScaling,
}
DRAWN = [(kind, seed) for kind in KINDS for seed in range(12)]


def llama_config(theirs, original):
    from transformers.models.llama.configuration_llama import LlamaConfig

    return LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=original,
        rope_parameters=theirs,
    )


@pytest.mark.parametrize(("kind", "seed"), DRAWN)
def test_angles_and_magnitude_are_those_of_transformers(kind, seed):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, theirs, original = draw(kind, seed)
    rotary, config = Rotary(rope, HEAD_DIM), llama_config(theirs, original)
    for length in LENGTHS:
        expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
        found = torch.tensor(rotary.angles(length))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        assert rotary.magnitude == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rotation_is_that_of_transformers_with_and_without_a_cache(kind):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    rope, theirs, original = draw(kind, 1)
    rotary = Rotary(RopeConfig(theta=rope.theta, fraction=rope.fraction, scaling=rope.scaling), 16)
    width = rope.width(HEAD_DIM)
    theirs = LlamaRotaryEmbedding(llama_config(theirs, original))
    generator = torch.Generator().manual_seed(0)
    held = original - 2
    for start, stop in ((0, held), *((n, n + 1) for n in range(held, original + 4)), (0, 90)):
        x, positions = (
            torch.randn(1, stop - start, 2, 16, generator=generator),
            torch.arange(start, stop),
        )
        cos, sin = theirs(x, positions[None])
        expected, _ = apply_rotary_pos_emb(x[..., :width], x[..., :width], cos, sin, 2)
        table = rotary_table(positions, rotary, length=stop, dtype=torch.float32)
        found = ROPE.get("torch").function(x, x, *table)[0]
        torch.testing.assert_close(found[..., :width], expected, rtol=0, atol=2e-5)
        assert torch.equal(found[..., width:], x[..., width:])


def formula(rope, length):
    """The angles, each by its published formula, in fp64."""
    scaling, width = rope.scaling, int(HEAD_DIM * rope.fraction)
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    plain = 1 / torch.tensor(rope.theta, dtype=torch.float64) ** exponent
    wavelength = 2 * math.pi / plain
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    original = scaling.original_length
    if isinstance(scaling, DynamicScaling):
        alpha = scaling.factor * max(length, original) / original - (scaling.factor - 1)
        return 1 / (rope.theta * alpha ** (width / (width - 2))) ** exponent
    if isinstance(scaling, Llama3Scaling):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = (original / wavelength - low) / (high - low)
        blend = (1 - smooth) * plain / scaling.factor + smooth * plain
        blend = torch.where(wavelength > original / low, plain / scaling.factor, blend)
        return torch.where(wavelength < original / high, plain, blend)
    if isinstance(scaling, LongropeScaling):
        each = scaling.long_factor if length > original else scaling.short_factor
        return plain / torch.tensor(each, dtype=torch.float64)

    def index(turns):
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    places = torch.arange(width // 2, dtype=torch.float64)
    ramp = ((places - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


@pytest.mark.parametrize(("kind", "seed"), DRAWN)
def test_angles_are_those_of_the_formula(kind, seed):
    rope, _, _ = draw(kind, seed)
    for length in LENGTHS:
        found = torch.tensor(Rotary(rope, HEAD_DIM).angles(length), dtype=torch.float64)
        torch.testing.assert_close(found, formula(rope, length), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scaling_survives_json_and_the_arguments_of_gpt(kind):
    rope, _, _ = draw(kind, 2)
    config = gpt(**TINY, head_dim=HEAD_DIM, rope=rope)
    assert config.layers[0].mixer.rope == rope
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    arguments = json.loads(json.dumps(config.to_dict()))
    assert arguments["layers"][0]["mixer"]["rope"]["scaling"]["type"] == kind
    assert gpt(**arguments) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"theta": 0}, "rope.theta: 0.0 must be greater than 0"),
        ({"fraction": 1.5}, "rope.fraction: 1.5 is too large; use 1 or less"),
        ({"fraction": 0.4}, "head_dim: 8, of which rope turns 3, is odd"),
        ({"fraction": 0.1}, "head_dim: 8, of which rope turns 0, is odd or zero"),
        ({"thetas": 1.0}, "rope.thetas: unknown key. Did you mean rope.theta"),
        ({"scaling": {"factor": 2.0}}, "rope.scaling.type: missing; add `type:` with one of"),
        ({"scaling": {"type": "ntk"}}, "rope.scaling.type: 'ntk' is not known here.*llama3"),
        ({"scaling": {"type": "linear", "factor": 0.5}}, "scaling.factor: 0.5 is too small"),
        ({"scaling": {"type": "yarn", "factor": 2.0}}, "scaling.original_length: missing"),
        (
            {"scaling": {"type": "llama3", "factor": 2.0, "high_freq_factor": 1.0}},
            "high_freq_factor: 1.0 is not above low_freq_factor=1.0",
        ),
        (
            {
                "scaling": {
                    "type": "longrope",
                    "original_length": 8,
                    "short_factor": [1.0] * 4,
                    "long_factor": [1.0] * 3,
                }
            },
            "head_dim: 8: longrope's long_factor has 3 numbers for 4 pairs",
        ),
        (
            {"scaling": {"type": "yarn", "factor": 2.0, "original_length": 8}, "theta": 1.0},
            "yarn needs a theta above 1",
        ),
        (
            {"scaling": {"type": "dynamic", "factor": 2.0, "original_length": 8}, "fraction": 0.25},
            "dynamic scaling needs at least 4 channels",
        ),
    ],
)
def test_a_rope_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        gpt(**TINY, rope=given)


def test_the_short_and_the_long_form_must_agree():
    assert gpt(**TINY, rope={"theta": 5.0}) == gpt(**TINY, rope_theta=5.0)
    same = gpt(**TINY, rope_theta=5.0, rope=RopeConfig(theta=5.0, fraction=0.5))
    assert same.layers[0].mixer.rope == RopeConfig(theta=5.0, fraction=0.5)
    assert gpt(**TINY, rope_theta=5.0, rope={"fraction": 0.5}) == same
    with pytest.raises(ValueError, match="its theta is 10000"):
        gpt(**TINY, rope_theta=5.0, rope=RopeConfig(fraction=0.5))
    with pytest.raises(ValueError, match="positions: 'learned'"):
        gpt(**TINY, positions="learned", rope={})


def longrope():
    factors = {"short_factor": (1.0, 1.5, 2.0, 3.0), "long_factor": (2.0, 4.0, 5.0, 7.0)}
    return LongropeScaling(**factors, original_length=8, factor=4.0)


def model_of(scaling):
    rope = RopeConfig(theta=30.0, scaling=scaling)
    config = gpt(**TINY, max_sequence_length=32, rope=rope)
    return GPT(config, dtype=torch.float64, seed=3).eval()


@pytest.mark.parametrize(
    "scaling",
    [
        LinearScaling(factor=2.0),
        Llama3Scaling(factor=4.0, original_length=8),
        YarnScaling(factor=4.0, original_length=8),
        DynamicScaling(factor=4.0, original_length=16),
        longrope(),
    ],
)
def test_a_cache_changes_nothing_where_angles_stay(scaling):
    model, tokens = model_of(scaling), torch.arange(16)[None]
    for start, stop in ((0, 8), (9, 16)):  # longrope: short sequences, then long ones
        whole = model.logits(tokens[:, :stop])
        cache = model.new_cache(batch_size=1, max_length=16)
        parts = [model.logits(tokens[:, : max(start, 3)], cache=cache)]
        parts += [
            model.logits(tokens[:, n : n + 1], cache=cache) for n in range(cache.length, stop)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-12)


def test_a_cache_of_short_longrope_keys_is_refused_once_the_sequence_is_long():
    model, tokens = model_of(longrope()), torch.arange(16)[None]
    cache = model.new_cache(batch_size=1, max_length=16)
    model.logits(tokens[:, :7], cache=cache)
    model.logits(tokens[:, 7:8], cache=cache)
    assert model.config.cache_break(8, 9) == 8
    assert model.config.cache_break(0, 9) is model.config.cache_break(7, 8) is None
    assert model.config.cache_break(9, 12) is None
    with pytest.raises(ValueError, match="the cache holds 8 tokens, and keys made in sequences"):
        model.logits(tokens[:, 8:9], cache=cache)


SECTIONS = {
    "chunked": RopeConfig(theta=30.0, sections=(2, 1, 1)),
    "interleaved": RopeConfig(theta=30.0, sections=(2, 1, 1), sections_interleaved=True),
}


def grid(rows=2, length=9):
    """Text, then an image of two rows of two, then text again, each row from another place."""
    time = torch.tensor([0, 1, 2, 2, 2, 2, 4, 5, 6])
    height = torch.tensor([0, 1, 2, 2, 3, 3, 4, 5, 6])
    width = torch.tensor([0, 1, 2, 3, 2, 3, 4, 5, 6])
    one = torch.stack((time, height, width))[:, None, :length]
    return torch.cat([one + 3 * row for row in range(rows)], dim=1)


def theirs_of(kind, sections):
    parameters = {"rope_type": "default", "rope_theta": 30.0, "mrope_section": list(sections)}
    if kind == "chunked":
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig as Config
        from transformers.models.qwen2_vl.modeling_qwen2_vl import (
            Qwen2VLRotaryEmbedding as Rotation,
        )
    else:
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig as Config
        from transformers.models.qwen3_vl.modeling_qwen3_vl import (
            Qwen3VLTextRotaryEmbedding as Rotation,
        )
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 2 * sum(sections)}
    return Rotation(Config(**sizes, rope_parameters=parameters))


@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("sections", [(2, 1, 1), (16, 24, 24), (24, 20, 20), (4, 0, 0), (3, 1, 2)])
def test_sections_turn_as_in_transformers(kind, sections):
    interleaved = kind == "interleaved"
    if interleaved and max(sections[1:]) * 3 > sum(sections):
        with pytest.raises(ValueError, match="interleaved, height and width can have at most"):
            RopeConfig(sections=sections, sections_interleaved=True)
        return
    rope = RopeConfig(theta=30.0, sections=sections, sections_interleaved=interleaved)
    head_dim, positions = 2 * sum(sections), grid()
    x = torch.randn(2, 9, 3, head_dim, generator=torch.Generator().manual_seed(1))
    cos, sin = theirs_of(kind, sections)(x, positions)
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    expected, _ = apply_rotary_pos_emb(x, x, cos, sin, 2)
    table = rotary_table(positions, Rotary(rope, head_dim), length=9, dtype=torch.float32)
    found = ROPE.get("torch").function(x, x, *table)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", SECTIONS)
def test_text_alone_turns_as_without_sections(kind):
    text = torch.arange(9).expand(3, 2, 9)
    made = rotary_table(text, Rotary(SECTIONS[kind], 8), length=9, dtype=torch.float64)
    plain = Rotary(RopeConfig(theta=30.0), 8)
    expected = rotary_table(text[0], plain, length=9, dtype=torch.float64)
    assert torch.equal(made.values, expected.values)


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_model_takes_three_positions_for_each_token_with_and_without_a_cache(kind):
    config = gpt(**TINY, max_sequence_length=32, rope=SECTIONS[kind])
    model, tokens = GPT(config, dtype=torch.float64, seed=3).eval(), torch.arange(18).view(2, 9)
    with torch.no_grad():
        whole = model(None, {"tokens": tokens, "positions": grid()})
        assert not torch.allclose(whole, model(None, {"tokens": tokens}))
        text = {"tokens": tokens, "positions": torch.arange(9).expand(3, 2, 9)}
        assert torch.allclose(model(None, text), model(None, {"tokens": tokens}), rtol=1e-12)
        cache = model.new_cache(batch_size=2, max_length=12)
        for piece in (slice(0, 7), slice(7, 8), slice(8, 9)):
            part = {"tokens": tokens[:, piece], "positions": grid()[..., piece], "cache": cache}
            found = model(None, part)[:, -1]
            torch.testing.assert_close(found, whole[:, piece.stop - 1], rtol=1e-10, atol=1e-12)
    plain = GPT(gpt(**TINY), dtype=torch.float64)
    with pytest.raises(
        ValueError, match="three for each token, but a layer's rope has no sections"
    ):
        plain(None, {"tokens": tokens, "positions": grid()})
    with pytest.raises(ValueError, match=r"positions must be \(3, 2, 9\) here, got \(2, 2, 9\)"):
        plain(None, {"tokens": tokens, "positions": grid()[:2]})


def test_sections_must_be_of_all_pairs():
    with pytest.raises(ValueError, match=r"sections \(2, 1, 2\) are not of its 4 pairs"):
        gpt(**TINY, rope={"sections": [2, 1, 2]})
    with pytest.raises(ValueError, match="there are no sections; set them, or leave it out"):
        RopeConfig(sections_interleaved=True)


def test_a_base_beside_another_is_refused_and_not_ignored() -> None:
    with pytest.raises(FieldError, match=r"theta is 500000.0, but rope_theta is 10000.0"):
        preset("llama3.2-1b", rope_theta=10000.0)
    assert preset("llama3-8b", rope_theta=10000.0).layers[0].mixer.rope == RopeConfig(theta=10000.0)
