"""Install the package of family.py, and hold it to transformers: logits, bytes, and the way back.

python packages/mt-hf/examples/port_family.py
"""

import sys
import tempfile
from pathlib import Path

import torch
from mt_hf import from_pretrained, save_pretrained
from mt_hf.commands.cli import main
from safetensors.torch import load_file
from transformers import PhiConfig, PhiForCausalLM

SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
DRAWS = [
    {"num_attention_heads": 4},
    {"num_attention_heads": 4, "num_key_value_heads": 2},  # fewer key heads
    {
        "num_attention_heads": 2,
        "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.75},
    },
]


def install(folder: Path) -> None:
    """Stand in for `pip install`: write the files beside a module with an entry point."""
    source = Path(__file__).with_name("family.py")
    (folder / "mt_phi.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    info = folder / "mt_phi-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mt-phi\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mt.models]\nphi = mt_phi:FAMILY\n")


@torch.no_grad()
def random_model(index: int) -> PhiForCausalLM:
    """A model of transformers in which no value is 0 or 1, so that none can be forgotten."""
    torch.manual_seed(index)
    model = PhiForCausalLM(PhiConfig(**SIZES, **DRAWS[index])).eval()
    for param in model.parameters():
        param.copy_(0.2 * torch.randn(param.shape) + (0.7 if param.dim() == 1 else 0))
    return model


def compare(model: PhiForCausalLM, folder: Path) -> float:
    """Return the largest difference of logits, and compare the written files with the read ones."""
    model.save_pretrained(folder / "theirs")
    ours = from_pretrained(folder / "theirs")
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        difference = (ours(tokens) - model(tokens).logits).abs().max().item()
    ours.origin = None  # write a config.json of our own, and not a copy of theirs
    save_pretrained(ours, folder / "ours", family="phi")
    stored = [load_file(folder / name / "model.safetensors") for name in ("theirs", "ours")]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
    again, info = PhiForCausalLM.from_pretrained(folder / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)
    return difference


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        install(Path(name))
        sys.path.insert(0, name)
        for index in range(len(DRAWS)):
            found = compare(random_model(index), Path(name, str(index)))
            print(f"draw {index}: logits differ by {found:.1e}")
            assert found < 1e-5
        main(["verify", str(Path(name, "0/theirs")), "--tokens", "9"])
