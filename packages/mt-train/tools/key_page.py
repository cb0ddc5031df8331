"""The page of all keys, made of the docstrings of the configuration.

python packages/mt-train/tools/key_page.py > docs/mt-train-keys.md
"""

import sys
import textwrap

from mt_train.config.other_names import other_names
from mt_train.keys import sections

_WIDTH = 100
_COMMAND = "python packages/mt-train/tools/key_page.py"


def page() -> str:
    """Write the page of all keys in Markdown."""
    lines = [
        "# Every key of mt-train",
        "",
        "`mt-train keys NAME` prints the same in a terminal, `mt-train config FILE` a run's own.",
        "This page is made of the docstrings:",
        f"`{_COMMAND} > docs/mt-train-keys.md`.",
    ]
    for section in sections():
        lines += ["", f"## {section.name}", "", *textwrap.wrap(section.text, _WIDTH), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in section.keys:
            default = f"`{key.default}`" if key.default else "needed"
            cells = (f"`{key.name}`", key.type, default, key.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## Names of other frameworks", ""]
    lines += ["Megatron-LM's arguments, the fields of Hugging Face, and axolotl's.", ""]
    lines += ["| there | here |", "|---|---|"]
    lines += [f"| `{name}` | {told} |" for name, told in sorted(other_names().items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
