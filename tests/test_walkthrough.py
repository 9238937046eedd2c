"""The worked example of docs/walkthrough.md: each block prints the text below it."""

import contextlib
import io
import re

import torch
from conftest import ROOT

PAGE = ROOT / "docs" / "walkthrough.md"


def outputs_of(page: str) -> list[tuple[str, str]]:
    """Run the Python blocks in one namespace; list (printed, text shown on the page) of each block."""
    namespace = {}
    outputs = []
    for code, shown in re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```\n)?", page, re.DOTALL):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, PAGE.name, "exec"), namespace)
        outputs.append((printed.getvalue(), shown))
    torch.set_printoptions(profile="default")  # the page changes the precision
    return outputs


def test_each_block_prints_what_the_page_shows():
    outputs = outputs_of(PAGE.read_text())
    assert len(outputs) == 11
    assert all(printed == shown for printed, shown in outputs), outputs
