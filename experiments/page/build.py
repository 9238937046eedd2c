"""Make one HTML file for reading completions; the page works offline and needs no other file.

    html = build_page(header, prompts, details)

The page consists of page.html, page.css and page.js of this folder. The data are JSON, compressed by gzip and
encoded in base64, so that a browser never takes the text of a model or a dataset for markup. For example, a
completion "<script>..." is shown as text. There are two kinds of data elements: an index of all prompts and
completions, which the page reads at the start, and the tokens of each prompt, which the page reads when a
reader opens the prompt. A Content-Security-Policy allows only the page's own script and blocks all network
access.

This file imports neither torch nor an engine.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
HIGH_ENTROPY_SHARE = 0.2  # fraction of a completion's tokens in ESPO's first entropy group
COMPLETION_KEYS = (
    "completion", "status", "reward", "detail", "parts", "num_tokens", "finish_reason", "sample",
    "temperature", "label", "advantage",
)  # fmt: skip
PROMPT_KEYS = ("prompt", "answer", "kind", "source", "difficulty", "step")


def build_page(header: dict, prompts: list[dict], details: list[list[dict | None]]) -> str:
    """Return the HTML of the page.

    header: title, facts, tiles, tables, mode ("evaluation" or "samples"), bins of the histogram. prompts:
    made by group_rows(). details: for each prompt, a list with the token_details() of each completion, or
    None for a completion without recorded tokens.
    """
    all_details = [detail for prompt_details in details for detail in prompt_details if detail]
    levels = {p["difficulty"]: p["difficulty_order"] for p in prompts if p["difficulty"]}
    choices = {
        "sources": sorted({p["source"] for p in prompts if p["source"]}),
        "difficulties": sorted(levels, key=levels.get),
        "scales": scales_of(all_details),
    }
    entries = [{key: value for key, value in p.items() if key != "difficulty_order"} for p in prompts]
    elements = [data_element("index", {"header": header | choices, "prompts": entries})]
    elements += [data_element(f"tokens-{number}", each) for number, each in enumerate(details) if any(each)]
    css = (FOLDER / "page.css").read_text()
    js = (FOLDER / "page.js").read_text()
    policy = f"default-src 'none'; style-src '{digest(css)}'; script-src '{digest(js)}'; base-uri 'none'"
    # a title cannot hold lone surrogates and control characters
    title = "".join(c if c.isprintable() else "\ufffd" for c in header["title"])
    fields = {"policy": html.escape(policy), "title": html.escape(title)}
    fields |= {"style": css, "script": js, "data": "\n".join(elements)}
    page = re.split(r"\{\{(\w+)\}\}", (FOLDER / "page.html").read_text())  # text, name, text, name ...
    page[1::2] = [fields[name] for name in page[1::2]]
    return "".join(page)


def digest(text: str) -> str:
    """Return the hash by which a Content-Security-Policy identifies an element of the page."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def data_element(name: str, value: object) -> str:
    """Return an element with JSON that a browser neither runs nor shows."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: lone surrogates are escaped
    data = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return f'<script type="application/gzip" id="{name}">{data}</script>'


# ------------------------------------------------------------------------------------------------------------
# From rows of completions to the data of the page
# ------------------------------------------------------------------------------------------------------------
def group_rows(
    rows: list[dict], levels: dict[tuple[str, float], str] | None = None
) -> tuple[list[dict], list[list[int]]]:
    """Group rows by prompt; return the prompts, and the row numbers of each prompt.

    Rows form a prompt if step, prompt_index and text of the prompt are equal; a missing step or prompt_index
    equals another missing one. A missing key becomes null. levels: label of each difficulty
    of a set, for example {("sums", 2.0): "2 to 3"}; None: the number is the label.
    """
    groups: dict[tuple, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault((row.get("step"), row.get("prompt_index"), row["prompt"]), []).append(number)
    prompts = []
    for numbers in groups.values():
        first = rows[numbers[0]]
        prompt = {key: first.get(key) for key in PROMPT_KEYS}
        if first.get("messages"):  # the list shows the question without the chat template
            prompt["question"] = first["messages"][-1]["content"]
        if (value := prompt["difficulty"]) is not None:
            label = levels[first["source"], value] if levels else f"{value:g}"
            prompt |= {"difficulty": label, "difficulty_order": value}
        prompt["completions"] = []
        for place, n in enumerate(numbers, start=1):
            values = {key: rows[n].get(key) for key in COMPLETION_KEYS}
            prompt["completions"].append(finite(values | {"sample": rows[n].get("sample", place)}))
        prompts.append(prompt)
    return prompts, list(groups.values())


def reading_notes(rows: list[dict]) -> list[list[str]]:
    """Return a fact for the header if the sums of these rows have reversed digits, as in the demo."""
    sums = [(re.fullmatch(r"(\d+) *\+ *(\d+) *=", row["prompt"].strip()), row.get("answer")) for row in rows]
    sums = [(match, answer) for match, answer in sums if match and str(answer).isdigit()]

    def num_right(step: int) -> int:
        digits = [[int(text[::step]) for text in (match[1], match[2], str(answer))] for match, answer in sums]
        return sum(a + b == c for a, b, c in digits)

    if num_right(-1) <= num_right(1):
        return []
    return [["digits", "reversed, the smallest weight first: 21+43= is 12 + 34, and 46 is right"]]


def finite(value):
    """Replace NaN and infinities, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def token_details(row: dict, pieces: list[str]) -> dict:
    """Return the data of a completion's tokens for the page.

    row: token_ids; optional rollout_logprobs (of the engine), trainer_logprobs and entropy, with null at
    inserted tokens, and turns [{role, num_tokens}]. pieces: text of each token.
    """
    entropy = row.get("entropy")
    engine = row.get("rollout_logprobs")
    trainer = row.get("trainer_logprobs")
    detail = {
        "ids": row["token_ids"],
        "pieces": pieces,
        "engine": rounded(engine, ".5f"),
        "trainer": rounded(trainer, ".5f"),
        "entropy": rounded(entropy, ".4f"),
        "high": None if entropy is None else highest(entropy, HIGH_ENTROPY_SHARE),
        "turns": [[turn["role"], turn["num_tokens"]] for turn in row["turns"]] if "turns" in row else None,
    }
    if engine is not None and trainer is not None:  # the page adds engine and difference: smaller than both
        differences = [math.nan if None in pair else pair[0] - pair[1] for pair in zip(trainer, engine)]
        detail |= {"difference": rounded(differences, ".2e"), "trainer": None}
    return {key: value for key, value in detail.items() if value is not None}


def rounded(values: Sequence[float | None] | None, form: str) -> list[float | None] | None:
    """Round numbers for the page by a format, for example ".4f"; null for NaN and infinities."""
    if values is None:
        return None
    return finite([None if value is None else float(format(value, form)) for value in values])


def highest(values: Sequence[float | None], share: float) -> list[int]:
    """Return the positions of the highest values: a share of all values, rounded up; ties go to the first.

    Values of null, at inserted tokens, do not count. For entropies, this is ESPO's first token group (arXiv
    2512.00499, eq. 7), see entropy_groups() of train_rl.py. Example: share 0.2 of 11 tokens selects 3 tokens.
    """
    positions = [i for i, value in enumerate(values) if value is not None]
    order = np.argsort([-values[i] for i in positions], kind="stable")
    return sorted(positions[i] for i in order[: math.ceil(len(positions) * share - 1e-9)])


def scales_of(details: list[dict]) -> dict[str, float]:
    """Return the value at which each shading is darkest: the 99th percentile over all tokens of the page."""
    logprobs = token_values(details, "engine") or token_values(details, "trainer")
    shadings = {
        "entropy": token_values(details, "entropy"),
        "surprise": [-logprob for logprob in logprobs],
        "difference": [abs(difference) for difference in token_values(details, "difference")],
    }
    scales = {name: float(np.percentile(values, 99)) for name, values in shadings.items() if values}
    return {name: scale if scale > 0 else 1.0 for name, scale in scales.items()}


def token_values(details: list[dict], name: str) -> list[float]:
    """Return the numbers of a key over all tokens of the page, without nulls."""
    return [value for detail in details for value in detail.get(name, []) if value is not None]


def text_pieces(tokenizer, token_ids: list[int]) -> list[str]:
    """Return the text of each token; joined, the pieces give the text with special tokens.

    tokenizer: a tokenizer of transformers. A character that spans several tokens, for example an emoji, is
    the text of the last token, and the tokens before have an empty text.
    """
    from tokenizers.decoders import DecodeStream

    backend = tokenizer.backend_tokenizer
    stream = DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(backend, token_id) or "" for token_id in token_ids]
    text = backend.decode(token_ids, skip_special_tokens=False)
    prefix = "".join(pieces)
    if pieces and len(prefix) < len(text) and text.startswith(prefix):
        pieces[-1] += text[len(prefix) :]  # bytes of an incomplete character at the end
    return pieces
