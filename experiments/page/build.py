"""Make one HTML file in which completions are read; it needs no network and no file beside it.

    html = build_page(header, prompts, details)

The page is made of page.html, page.css and page.js of this folder. Its data stand in it as JSON, compressed
by gzip and written in base64, so that nothing a model or a data set wrote can be taken for markup: an index
of all prompts and completions, which the page reads at its start, and the tokens of each prompt, which it
reads when that prompt is shown. A Content-Security-Policy lets the page run its own script and nothing else,
and keeps it from asking a network for anything.

This file needs neither torch nor an engine.
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
HIGH_ENTROPY_SHARE = 0.2  # ESPO's first entropy group of a completion's tokens
MAX_ROUTE_BYTES = 32 << 20  # experts of all tokens; they hardly compress
COMPLETION_KEYS = (
    "completion", "status", "reward", "detail", "parts", "num_tokens", "finish_reason", "sample",
    "temperature",
)  # fmt: skip
PROMPT_KEYS = ("prompt", "answer", "kind", "source", "difficulty", "step")


def build_page(header: dict, prompts: list[dict], details: list[list[dict | None]]) -> str:
    """Return the HTML.

    header: title, facts, tiles, tables, mode ("evaluation" or "samples"), bins of the histogram, layers that
    have experts, num_experts. prompts: as group_rows() makes them. details: of each prompt, and of each of
    its completions in order, what token_details() returns, or None where tokens are not known.
    """
    known = [detail for of_prompt in details for detail in of_prompt if detail]
    choices = {
        "sources": sorted({p["source"] for p in prompts if p["source"]}),
        "difficulties": list(dict.fromkeys(p["difficulty"] for p in sorted(prompts, key=_difficulty_order)
                                           if p["difficulty"])),
        "scales": scales_of(known),
    }  # fmt: skip
    shown = [{key: value for key, value in p.items() if key != "difficulty_order"} for p in prompts]
    parts = [data_element("index", {"header": header | choices, "prompts": shown})]
    for number, of_prompt in enumerate(details):
        if any(of_prompt):
            parts.append(data_element(f"tokens-{number}", of_prompt))
    style, script = ((FOLDER / name).read_text() for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; base-uri 'none'"
    )
    fields = {"policy": html.escape(policy), "title": html.escape(plain(header["title"]))}
    fields |= {"style": style, "script": script, "data": "\n".join(parts)}
    page = re.split(r"\{\{(\w+)\}\}", (FOLDER / "page.html").read_text())  # text, name, text, name ...
    page[1::2] = [fields[name] for name in page[1::2]]
    return "".join(page)


def _difficulty_order(prompt: dict) -> float:
    order = prompt.get("difficulty_order")
    return math.inf if order is None else order


def digest(text: str) -> str:
    """Return the hash by which a Content-Security-Policy knows an element of the page."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def plain(text: str) -> str:
    """Replace what UTF-8 and the title of a page cannot hold: lone surrogates and control characters."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def data_element(name: str, value: object) -> str:
    """Return an element that a browser does not run or show, with JSON in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: lone surrogates are escaped
    data = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return f'<script type="application/gzip" id="{name}">{data}</script>'


# ------------------------------------------------------------------------------------------------------------
# From rows of completions to what the page reads
# ------------------------------------------------------------------------------------------------------------
def group_rows(
    rows: list[dict], levels: dict[float, str] | None = None
) -> tuple[list[dict], list[list[int]]]:
    """Gather rows into prompts; return these and the numbers of the rows of each.

    Rows belong together that have one step, one prompt_index (where they have them) and one prompt. A key
    that a row lacks becomes null. levels: the label of each difficulty; without it the number itself.
    """
    groups: dict[tuple, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault((row.get("step"), row.get("prompt_index"), row["prompt"]), []).append(number)
    prompts = []
    for numbers in groups.values():
        first = rows[numbers[0]]
        prompt = {key: first.get(key) for key in PROMPT_KEYS}
        if first.get("messages"):  # the list shows what was asked, without the chat template around it
            prompt["question"] = first["messages"][-1]["content"]
        if prompt["difficulty"] is not None:
            value = prompt["difficulty"]
            prompt |= {"difficulty": levels[value] if levels else f"{value:g}", "difficulty_order": value}
        prompt["completions"] = [
            {"sample": place + 1}
            | finite({key: rows[n].get(key) for key in COMPLETION_KEYS if key in rows[n]})
            for place, n in enumerate(numbers)
        ]
        for completion in prompt["completions"]:
            for key in COMPLETION_KEYS:
                completion.setdefault(key)
        prompts.append(prompt)
    return prompts, list(groups.values())


def finite(value):
    """Return a JSON value with null for numbers that JSON does not have: NaN and infinities."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def token_details(
    row: dict, pieces: list[str], routes: np.ndarray | None = None, trainer_routes: np.ndarray | None = None
) -> dict:
    """Return what the page shows of a completion's tokens.

    row: token_ids, and where they are known rollout_logprobs (the engine's), trainer_logprobs and entropy.
    pieces: the text of each token. routes, trainer_routes: experts [tokens, layers, K] that predicted each.
    """
    entropy, engine, trainer = (row.get(key) for key in ("entropy", "rollout_logprobs", "trainer_logprobs"))
    detail = {
        "ids": row["token_ids"],
        "pieces": pieces,
        "engine": rounded(engine, ".5f"),
        "trainer": rounded(trainer, ".5f"),
        "entropy": rounded(entropy, ".4f"),
        "high": None if entropy is None else highest(entropy, HIGH_ENTROPY_SHARE),
        "routes": route_table(routes),
        "trainer_routes": route_table(trainer_routes),
    }
    if engine is not None and trainer is not None:  # the page adds them up: this takes less room than both
        missing = math.nan
        pairs = [(missing if None in pair else pair[0] - pair[1]) for pair in zip(trainer, engine)]
        detail |= {"difference": rounded(pairs, ".2e"), "trainer": None}
    if routes is not None and trainer_routes is not None:
        differs = (np.sort(routes, axis=-1) != np.sort(trainer_routes, axis=-1)).any(axis=(1, 2))  # [tokens]
        table = route_table(trainer_routes[differs]) | {"at": differs.nonzero()[0].tolist()}
        detail["trainer_routes"] = table  # other tokens have the engine's
    return {key: value for key, value in detail.items() if value is not None}


def rounded(values: Sequence[float | None] | None, form: str) -> list[float | None] | None:
    """Round numbers for the page, as a format says; null for what is not finite."""
    if values is None:
        return None
    return finite([None if value is None else float(format(value, form)) for value in values])


def highest(values: Sequence[float], share: float) -> list[int]:
    """Return the places of the highest values, a share of them rounded up; of equal ones the first.

    Entropies give ESPO's first token group (arXiv 2512.00499, eq. 7), as entropy_groups() of train_rl.py.
    """
    order = np.argsort(-np.asarray(values, dtype=np.float64), kind="stable")
    return sorted(order[: math.ceil(len(values) * share - 1e-9)].tolist())


def route_table(ids: np.ndarray | None) -> dict | None:
    """Return expert ids [tokens, layers, K] as bytes, little end first, in base64."""
    if ids is None:
        return None
    ids = np.ascontiguousarray(ids, dtype="<u1" if ids.max(initial=0) < 256 else "<u2")
    return {
        "shape": list(ids.shape),
        "width": ids.dtype.itemsize,
        "data": base64.b64encode(ids.tobytes()).decode(),
    }


def drop_routes(details: list[dict], limit: int = MAX_ROUTE_BYTES) -> int:
    """Remove experts where all before them fill the limit in bytes; return how many lost them."""
    used = num_dropped = 0
    for detail in details:
        tables = [detail[name] for name in ("routes", "trainer_routes") if name in detail]
        used += sum(len(table["data"]) for table in tables)
        if tables and used > limit:
            detail.pop("routes", None)
            detail.pop("trainer_routes", None)
            num_dropped += 1
    return num_dropped


def scales_of(details: list[dict]) -> dict[str, float]:
    """Return the value at which each shading is darkest: the 99th percentile over all tokens of the page."""
    join = lambda name: [value for detail in details for value in detail.get(name, []) if value is not None]
    values = {
        "entropy": join("entropy"),
        "surprise": [-logprob for logprob in join("engine") or join("trainer")],
        "difference": [abs(difference) for difference in join("difference")],
    }
    scales = {name: float(np.percentile(found, 99)) for name, found in values.items() if found}
    return {name: scale if scale > 0 else 1.0 for name, scale in scales.items()}


def text_pieces(tokenizer, token_ids: list[int]) -> list[str]:
    """Return the text of each token; together they are the text with special tokens.

    tokenizer: of transformers. A character of several tokens stands at the last of them, and the others have
    an empty text.
    """
    from tokenizers.decoders import DecodeStream

    inner, stream = tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(inner, token_id) or "" for token_id in token_ids]
    whole = inner.decode(token_ids, skip_special_tokens=False)
    if pieces and len(rest := "".join(pieces)) < len(whole) and whole.startswith(rest):
        pieces[-1] += whole[len(rest) :]  # bytes at the end that are no whole character
    return pieces
