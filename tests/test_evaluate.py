"""experiments/evaluate.py: figures by other means, the data of the page, hostile markup, real runs."""

import base64
import contextlib
import gzip
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from conftest import ROOT

from experiments import evaluate as evaluate_py
from experiments.evaluate import (
    all_figures,
    best_constants,
    date_of,
    level_labels,
    link_newest,
    mean_figures,
    mismatch_figures,
    open_model,
    parse_args,
    pass_at_k,
    prompt_figures,
    read_settings,
    refuse_overwriting,
    samples_header,
    samples_page,
    table_text,
    training_warnings,
    values_of_k,
)
from experiments.page.build import (
    FOLDER,
    build_page,
    digest,
    group_rows,
    highest,
    scales_of,
    text_pieces,
    token_details,
)
from tests import preloaded
from tests.patience import limit

TINY = ROOT / "data" / "built" / "tiny"
HOSTILE = (
    "</script><script>document.documentElement.dataset.hacked=1</script>",
    "<img src=x onerror='document.documentElement.dataset.hacked=2'>",
    '--></style><svg onload="document.documentElement.dataset.hacked=3"> {{data}} {{script}} ${1+1}',
    "null \0 bell \7 surrogate \ud83d right to left \u202e mark \u200f line \u2028 \U0001f642 & &lt; ' \" `",
)


def row(prompt_index=0, sample=0, right=False, **changes) -> dict:
    return {
        "prompt_index": prompt_index, "source": "set", "kind": "exact", "difficulty": None,
        "prompt": f"prompt {prompt_index}", "answer": "1", "sample": sample, "temperature": float(sample > 0),
        "completion": "1", "reward": float(right), "status": "ok" if right else "wrong", "detail": "",
        "by_text": False, "parts": {}, "num_tokens": 2, "finish_reason": "stop", "token_ids": [1, 2],
        "rollout_logprobs": [-0.5, -0.25],
    } | changes  # fmt: skip


# ---- figures -----------------------------------------------------------------------------------------------
def share_of_subsets(right: list[bool], k: int) -> float:
    subsets = list(itertools.combinations(right, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        expected = share_of_subsets([i < c for i in range(n)], k)
        assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_k_and_the_figures_of_a_prompt():
    assert [values_of_k(n) for n in (0, 1, 6, 8)] == [[], [1], [1, 2, 4, 6], [1, 2, 4, 8]]
    rows = [row(right=True, num_tokens=5), row(sample=1, reward=0.5, num_tokens=3, finish_reason="length"),
            row(sample=2, right=True), row(sample=3, status="timeout"),
            row(sample=4, status="error", by_text=True)]  # fmt: skip
    assert prompt_figures(rows) == pytest.approx({
        "accuracy": 1.0, "avg_at_4": 1.5 / 4, "pass_at_1": 0.25, "pass_at_2": 0.5, "pass_at_4": 1.0,
        "completion_tokens": 14 / 5, "cut_at_limit_frac": 0.2, "failed_frac": 0.2,
        "failed_by_text_frac": 0.2,
    })  # fmt: skip


def test_bootstrap_intervals_and_labels_of_difficulties():
    figures = [{"a": float(i % 2), "b": 1 - float(i % 2), "c": 0.25} for i in range(400)]
    means = mean_figures(figures, seed=0)
    assert means["num_prompts"] == 400 and means["c"] == {"mean": 0.25, "low": 0.25, "high": 0.25}
    a = means["a"]
    half = 1.96 * (0.25 / 400) ** 0.5
    assert [a["low"], a["mean"], a["high"]] == pytest.approx([0.5 - half, 0.5, 0.5 + half], abs=0.008)
    assert means["b"]["low"] == pytest.approx(1 - a["high"]), "all figures share the resamples"
    assert mean_figures(figures, 0) == means
    assert mean_figures([{"a": 1.0}], 0)["a"] == {"mean": 1.0, "low": None, "high": None}
    graded = [{"source": "a", "difficulty": value} for value in (2.0, None, 1.0, 2.0, 0.5)]
    assert list(level_labels(graded).items()) == [(("a", 0.5), "0.5"), (("a", 1.0), "1"), (("a", 2.0), "2")]
    many = level_labels({"source": "a", "difficulty": float(i)} for i in range(80))
    labels = list(dict.fromkeys(many.values()))
    assert labels[:2] == ["0 to 9", "10 to 19"] and len(labels) == 8
    labels = level_labels([*graded, {"source": "b", "difficulty": 2.0}])
    assert (labels["a", 2.0], labels["b", 2.0]) == ("a 2", "b 2"), "units of two sets differ"


def test_figures_by_source_and_difficulty_add_up_and_are_printed():
    rows = [
        row(p, s, (p * s) % 3 == 1, source="ab"[p % 2], difficulty=[1, 2, None][p % 3], task="mn"[p % 2])
        for p in range(12) for s in range(5)
    ]  # fmt: skip
    figures = all_figures(rows, 0)
    assert list(figures["source"]) == ["a", "b"]
    assert list(figures["difficulty"]) == ["a 1", "a 2", "b 1", "b 2"]
    sources = [(means["num_prompts"], means["avg_at_4"]["mean"]) for means in figures["source"].values()]
    assert sum(n * mean for n, mean in sources) / 12 == pytest.approx(figures["all"]["avg_at_4"]["mean"])
    rewards = [r["reward"] for r in rows if (r["source"], r["difficulty"]) == ("a", 2) and r["sample"] > 0]
    assert figures["difficulty"]["a 2"]["num_prompts"] == 2
    assert list(figures["task"].values()) == list(figures["source"].values())
    assert figures["difficulty"]["a 2"]["avg_at_4"]["mean"] == pytest.approx(np.mean(rewards))
    assert f"{figures['all']['pass_at_4']['mean']:.3f}" in table_text(figures)
    assert "avg@" not in table_text(all_figures([r for r in rows if r["sample"] == 0], 0))
    assert "constant" not in table_text(figures)
    answer = json.dumps({"task": "gcd", "answer": "4", "metadata": {}})
    gym = [r | {"kind": "reasoning_gym", "answer": answer} if r["task"] == "m" else r for r in rows]
    broken = {"answer": "5", "status": "error"}  # a bad row costs no figure of the others
    gym += [r | broken | {"prompt_index": 98} for r in gym if r["prompt_index"] == 0]
    number = json.dumps({"task": "gcd", "answer": 4, "metadata": {}})  # the verifier raises a TypeError
    gym += [
        r | {"answer": number, "status": "no_answer", "prompt_index": 99}
        for r in gym
        if not r["prompt_index"]
    ]
    assert best_constants({"m": gym[-1:], "n": [gym[-1] | {"status": "no_answer"}]}) == {}
    figures = all_figures(gym, 0)
    assert (
        figures["task"]["m"]["best_constant"] == {"mean": 1} and "best_constant" not in figures["task"]["n"]
    )
    *_, of_m, of_n = table_text(figures).splitlines()
    assert of_m.endswith(" 1.000") and of_n.endswith(" -") and "constant" in table_text(figures)


def test_mismatch_of_trainer_and_engine():
    assert mismatch_figures([row()]) == {}
    rows = [row(trainer_logprobs=[-0.5, -0.35]), row(trainer_logprobs=[-0.3, -0.25])]
    figures = mismatch_figures(rows)
    assert figures["abs_dlogp"] == pytest.approx(0.075) and figures["abs_dlogp_max"] == pytest.approx(0.2)
    k3 = [math.exp(x) - 1 - x for x in (0.0, -0.1, 0.2, 0.0)]
    assert figures["mismatch_k3"] == pytest.approx(sum(k3) / 4)


# ---- the page's data ---------------------------------------------------------------------------------------
class Elements(HTMLParser):
    """Collect elements, attributes, and the text of title, scripts and styles, as a browser does."""

    def __init__(self, page: str):
        super().__init__()
        self.tags = []
        self.texts = {}
        self.attributes = []
        self.open = None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes.append(dict(attributes))
        self.open = (tag, dict(attributes).get("id"))

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        if self.open and self.open[0] in ("script", "style", "title"):
            self.texts[self.open] = self.texts.get(self.open, "") + data

    def read(self, name: str):
        """Return the JSON of a data element."""
        return json.loads(gzip.decompress(base64.b64decode(self.texts["script", name])))


def header(**changes) -> dict:
    return {"title": "m", "facts": [], "tiles": [], "tables": [], "mode": "evaluation", "bins": 1} | changes


def hostile_page() -> tuple[str, list[dict]]:
    """Return a page of prompts, completions, sources, details and a title that are full of markup."""
    rows = [
        row(p, s, prompt=text, completion=text, source=text, answer=text, detail=text, kind=text,
            finish_reason=text, parts={text: 0.5}, token_ids=[0, 1, 2], rollout_logprobs=[-1.0] * 3,
            messages=[{"role": "user", "content": text}])
        for p, text in enumerate(HOSTILE) for s in range(2)
    ]  # fmt: skip
    prompts, groups = group_rows(rows)
    details = [[token_details(rows[n], ["", rows[n]["prompt"], "\0"]) for n in group] for group in groups]
    facts = [[text, text] for text in HOSTILE]
    page = build_page(header(title=" ".join(HOSTILE), facts=facts), prompts, details)
    return page, rows


def test_a_page_shows_hostile_texts_and_never_as_markup():
    page, _ = hostile_page()
    elements = Elements(page.encode("utf-8").decode())  # fails for a lone surrogate
    template = Elements((FOLDER / "page.html").read_text())
    num_data = 1 + len(HOSTILE)
    assert sorted(elements.tags) == sorted(template.tags + ["script"] * num_data), "no other element"
    assert not any(name.startswith("on") for attributes in elements.attributes for name in attributes)
    assert all(text not in page for text in HOSTILE)
    kinds = [attributes.get("type") for attributes in elements.attributes if "id" in attributes]
    assert kinds.count("application/gzip") == num_data  # a browser ignores this type
    index = elements.read("index")
    prompts = index["prompts"]
    assert [prompt["prompt"] for prompt in prompts] == list(HOSTILE)
    assert prompts[3]["completions"][1]["completion"] == HOSTILE[3] and prompts[0]["question"] == HOSTILE[0]
    assert index["header"]["sources"] == sorted(HOSTILE) and index["header"]["facts"][0][0] == HOSTILE[0]
    assert elements.read("tokens-3")[0]["pieces"] == ["", HOSTILE[3], "\0"]


def test_the_policy_allows_one_script_only():
    page, _ = hostile_page()
    elements = Elements(page)
    script = elements.texts["script", None]
    style = elements.texts["style", None]
    assert script == (FOLDER / "page.js").read_text() and style == (FOLDER / "page.css").read_text()
    (policy,) = [attributes["content"] for attributes in elements.attributes if "http-equiv" in attributes]
    assert policy.split("; ")[:3] == [
        "default-src 'none'", f"style-src '{digest(style)}'", f"script-src '{digest(script)}'",
    ]  # fmt: skip
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "fetch(", "http://"):
        assert word not in script.replace("http://www.w3.org/2000/svg", ""), word
    assert "url(" not in style and "@import" not in style


def test_details_of_tokens():
    numbers = {
        "token_ids": [5, 6, 7, 8], "rollout_logprobs": [-1.0, -2.0, -0.125, -3.0],
        "trainer_logprobs": [-1.0, -2.00001, math.nan, -3.5], "entropy": [0.1, 2.0, 0.3, math.inf],
    }  # fmt: skip
    detail = json.loads(json.dumps(token_details(numbers, list("abcd")), allow_nan=False))
    assert detail["difference"] == [0.0, -1e-5, None, -0.5] and detail["entropy"] == [0.1, 2.0, 0.3, None]
    assert "trainer" not in detail and detail["engine"] == [-1.0, -2.0, -0.125, -3.0]
    assert scales_of([detail])["difference"] == pytest.approx(np.percentile([0, 1e-5, 0.5], 99))
    only_trainer = token_details({"token_ids": [1], "trainer_logprobs": [-1.5]}, ["a"])
    assert only_trainer == {"ids": [1], "pieces": ["a"], "trainer": [-1.5]}


def test_the_marked_fifth_is_the_first_entropy_group_of_espo():
    import torch

    from train_rl import entropy_groups

    generator = torch.Generator().manual_seed(0)
    for length in (1, 4, 5, 6, 11, 200):
        entropy = torch.randint(0, 9, (1, length), generator=generator).double()  # some are equal
        groups = entropy_groups(entropy, torch.ones(1, length, dtype=torch.bool), (0.2, 0.8))
        assert highest(entropy[0].tolist(), 0.2) == (groups[0] == 0).nonzero().flatten().tolist()


def byte_tokenizer():
    """Return a tokenizer whose tokens are bytes, and two words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)} | {"<end>": 256}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


def test_pieces_of_a_text_are_whole_characters():
    tokenizer = byte_tokenizer()
    ids = tokenizer("a \U0001f642\u00e9<end>")["input_ids"]
    assert text_pieces(tokenizer, ids) == ["a", " ", "", "", "", "\U0001f642", "", "\u00e9", "<end>"]
    cut = tokenizer("a\U0001f642")["input_ids"][:-1]
    pieces = text_pieces(tokenizer, cut)
    assert "".join(pieces) == tokenizer.decode(cut) and len(pieces) == 4


# ---- models and runs ---------------------------------------------------------------------------------------
def write_model(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(text)
    return folder


def write_checkpoint(run_dir: Path, step: int) -> Path:
    checkpoint = run_dir / "checkpoints" / f"step_{step:06d}"
    write_model(checkpoint / "model", f"weights {step}")
    (checkpoint / "state.json").write_text("{}")
    return checkpoint


def test_a_model_is_opened_in_each_kind_of_folder(tmp_path):
    model = write_model(tmp_path / "export" / "model", "m")
    for folder, name in ((model, "export/model"), (tmp_path / "export", "export")):
        with open_model(folder) as opened:
            assert opened == (model, name)
    with pytest.raises(ValueError, match="--model"), open_model(tmp_path):
        pass


def test_the_newest_checkpoint_stays_readable_while_a_run_trains(tmp_path, monkeypatch):
    run_dir = tmp_path / "espo"
    checkpoints = [write_checkpoint(run_dir, step) for step in (5, 10)]
    write_model(run_dir / "checkpoints" / "step_000015.tmp" / "model", "half")
    with open_model(run_dir) as (folder, name):
        assert name == "espo at step 10" and os.stat(folder / "model.safetensors").st_nlink == 2
        for checkpoint in checkpoints:
            shutil.rmtree(checkpoint)  # the run has written newer checkpoints
        assert (folder / "model.safetensors").read_text() == "weights 10"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000015.tmp"]

    newest = [write_checkpoint(run_dir, step) for step in (20, 25)]
    link = os.link

    def race(source, target):  # while step 25 is linked, the run deletes it and writes step 30
        if newest[1].is_dir():
            shutil.rmtree(newest[1])
            write_checkpoint(run_dir, 30)
        link(source, target)

    monkeypatch.setattr(os, "link", race)
    assert link_newest(run_dir / "checkpoints", tmp_path / "linked") == "step_000030"
    assert (tmp_path / "linked" / "model.safetensors").read_text() == "weights 30"

    monkeypatch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(PermissionError("no links")))
    link_newest(run_dir / "checkpoints", tmp_path / "copied")
    assert (tmp_path / "copied" / "model.safetensors").read_text() == "weights 30"


def sample_row(step: int, **changes) -> dict:
    texts = {"prompt": "1+1=", "completion": "2", "status": "ok", "detail": ""}
    return {"step": step, "reward": 1.0} | texts | changes


def test_samples_of_a_run_become_a_page(tmp_path):
    with pytest.raises(ValueError, match="samples.jsonl"):
        samples_page(tmp_path)
    rows = [sample_row(10), sample_row(10, status="wrong", reward=0.5), sample_row(20, parts={"math": 1.0})]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 30, "pro')
    index = Elements(samples_page(tmp_path)).read("index")
    assert [(p["step"], len(p["completions"])) for p in index["prompts"]] == [(10, 2), (20, 1)]
    assert index["header"]["tiles"][0]["mean"] == pytest.approx(2.5 / 3)


@pytest.mark.parametrize(
    "prompt, answer, is_noted",
    [
        ("058  +498  =", "4471", True), ("89096+01050=", "801470", True), ("12+34=", "46", False),
        ("11+22=", "33", False), ("What is 1+1?", "2", False), ("1+1=", "one", False),
        ("1+1=", None, False),
    ],
)  # fmt: skip
def test_the_page_says_that_digits_are_reversed(prompt, answer, is_noted):
    rows = [sample_row(10, prompt=prompt, answer=answer)]
    facts = samples_header(["run"], rows, 1)["facts"]
    assert any("reversed" in text for _, text in map(lambda fact: map(str, fact), facts)) == is_noted


def test_two_runs_and_two_checkpoints_stand_side_by_side(tmp_path):
    """Evaluations of all steps share a group for each prompt; training samples are grouped by step.

    The second run numbers the same prompts otherwise, as with another set before them.
    """
    for place, run in enumerate(("espo", "grpo")):
        (tmp_path / run).mkdir()
        rows = [
            sample_row(step, sample=0, prompt_index=i + 5 * place, prompt=f"{i}+1=", reward=step / 50 * place)
            for step in (0, 50) for i in (0, 1)
        ]  # fmt: skip
        for name, of_file in (("eval_samples", rows), ("samples", [sample_row(10, advantage=0.5)])):
            (tmp_path / run / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in of_file))
    files = [tmp_path / run / "eval_samples.jsonl" for run in ("espo", "grpo")]
    labels = [f"{file} step {step}" for file in files for step in (0, 50)]
    for places, expected, mode in (
        (files, [labels, labels], "evaluation"),
        (files[:1], [["step 0", "step 50"]] * 2, "evaluation"),
        (
            [tmp_path / "espo", tmp_path / "grpo"],
            [[str(tmp_path / "espo"), str(tmp_path / "grpo")]],
            "samples",
        ),
        ([tmp_path / "espo"], [[None]], "samples"),
    ):
        index = Elements(samples_page(*places)).read("index")
        assert [[c["label"] for c in p["completions"]] for p in index["prompts"]] == expected
        assert index["header"]["mode"] == mode
        if places == files:
            (table,) = index["header"]["tables"]
            assert [[line[0], line[2]["mean"]] for line in table["rows"]] == [
                [label, reward] for label, reward in zip(labels, (0, 0, 0, 1))
            ]
            tiles = {tile["name"]: tile["mean"] for tile in index["header"]["tiles"]}
            assert tiles == {f"{labels[i]} {name}": value for i, name, value in (
                (0, "mean reward", 0), (0, "right", 1), (3, "mean reward", 1), (3, "right", 1),
            )}  # fmt: skip
    assert index["prompts"][0]["completions"][0]["advantage"] == 0.5
    assert [tile["name"] for tile in index["header"]["tiles"]] == ["mean reward", "at the end", "right"]
    other = [sample_row(step) for step in (5, 10)]
    (tmp_path / "grpo" / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in other))
    index = Elements(samples_page(tmp_path / "espo", tmp_path / "grpo")).read("index")
    assert [p["step"] for p in index["prompts"]] == [5, 10], "steps of two runs are in order"


@pytest.mark.parametrize("has_export", [True, False])
def test_samples_with_tokens_are_shown_by_token(has_export, tmp_path):
    model = write_model(tmp_path / ("model" if has_export else "elsewhere"), "m")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "config.yaml").write_text(f"model: {{path: {model}}}")
    tokens = {"token_ids": tokenizer("2 \u00e9")["input_ids"], "entropy": [0.5, 0.1, 0.2, 0.0],
              "trainer_logprobs": [-0.1] * 4, "rollout_logprobs": [-0.2] * 4}  # fmt: skip
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample_row(10, **tokens)) + "\n")
    ((detail,),) = [Elements(samples_page(tmp_path)).read("tokens-0")]
    assert detail["pieces"] == ["2", " ", "", "\u00e9"] and detail["high"] == [0]
    assert detail["difference"] == [0.1] * 4


# ---- options -----------------------------------------------------------------------------------------------
def settings_of(*options, context=512):
    return read_settings(parse_args(["--model", "m", *options]), context)


@pytest.mark.parametrize(
    "options, message",
    [
        ("", "--model"),
        ("--model m --run r", "--run"),
        ("--model m", "--data"),
        ("--run r", "--html"),
        ("--model m --data d --samples -1", "--samples"),
        ("--model m --data d --json x.json --html x.json", "different files"),
        ("--model m --data {path:·a.jsonl,·kinds:·math}", "data.eval"),
        ("--model m --data {path:·a.jsonl", "--data"),
        ("--model m --data a.jsonl --columns prompt", "--columns"),
        ("--model m --data a.jsonl --temperature 0", "rollout.temperature"),
        ("--model m --data a.jsonl", "--max-new-tokens"),
        ("--model m --data a --max-new-tokens 99 rollout.max_prompt_tokens=500", "rollout.max_prompt_tokens"),
        *(
            (f"--model m --data a --seed 0 rollout{value}", f"rollout{value.partition('=')[0]}: ")
            for value in ("=5", "=null", ".max_new_tokens=1e3", ".max_new_tokens=null")
        ),
    ],
)
def test_invalid_options_are_named(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_settings(parse_args([option.replace("·", " ") for option in options.split()]), 512)


def test_options_become_settings_and_settings_override_them():
    settings = settings_of(
        "--data", "a.jsonl", "{path: hub/b, split: test, kind: math}", "--kind", "gsm8k", "--limit", "7",
        "--columns", "{prompt: q}", "--chat", "never", "--max-new-tokens", "100", "--dtype", "float32",
        "reward.timeout_s=3", "rollout.temperature=0.5", "data.on_bad_row=drop",
    )  # fmt: skip
    first, second = settings.data.eval
    assert (first.path, first.kind, first.limit, first.columns) == ("a.jsonl", "gsm8k", 7, {"prompt": "q"})
    assert (second.path, second.split, second.kind, second.limit) == ("hub/b", "test", "math", 7)
    assert (settings.data.chat, settings.data.on_bad_row, settings.reward.timeout_s) == ("never", "drop", 3)
    assert (settings.rollout.temperature, settings.rollout.max_prompt_tokens) == (0.5, 412)


@pytest.mark.parametrize("option", ["--json", "--html", "--completions"])
def test_an_output_that_is_a_folder_is_refused_at_once(option, tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder"):
        parse_args(["--model", "m", "--data", "a.jsonl", option, str(tmp_path)])


def test_settings_that_differ_from_the_training_are_reported(tmp_path):
    from train_rl import load_config

    options = ("rollout.temperature=0.5", 'rollout.stop=["\\n"]')
    trained = load_config(["data.train=[{path: x}]", "data.system_prompt=Be brief.", *options])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(trained.model_dump(mode="json")))
    (tmp_path / "versions.json").write_text('{"prompt_date": "2025-05-05"}')
    options = ("--data=a.jsonl", "--max-new-tokens=9", "--system-prompt=Be brief.", "--temperature=0.5")
    for place in (".", "model", "checkpoints/step_000004", "checkpoints/step_000004/model"):
        assert training_warnings(tmp_path / place, settings_of(*options, 'rollout.stop=["\\n"]')) == []
        (warning,) = training_warnings(
            tmp_path / place, settings_of(*options[:3], "--template", "Q: {prompt}")
        )
        assert "rollout.stop" in warning and "rollout.temperature was 0.5" in warning
        assert "system_prompt" not in warning
        assert "the template was '{prompt}' and is 'Q: {prompt}'" in warning
        assert date_of(tmp_path / place, settings_of(*options)) == "2025-05-05"
        assert date_of(tmp_path / place, settings_of(*options, "data.date=2020-02-02")) == "2020-02-02"
    (tmp_path / "config.yaml").write_text("name: of another program\n")
    assert training_warnings(tmp_path, settings_of(*options)) == []


def test_results_never_overwrite_the_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sets").mkdir()
    Path("sets/test.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path("link").symlink_to("sets")
    for data in ("sets/test.jsonl", "sets", "sets/*.jsonl"):
        sources = settings_of("--data", data, "--max-new-tokens", "100").data.eval
        options = ["--model", "m", "--data", data, "--json", "sets/test.json"]
        args = parse_args(options)
        assert args.completions == Path("sets/test_completions.jsonl")
        refuse_overwriting(args, sources)
        with pytest.raises(ValueError, match="--completions"):
            refuse_overwriting(parse_args([*options, "--completions", "link/test.jsonl"]), sources)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_one_engine_use_the_same_context_length(rank, monkeypatch):
    """vLLM ends a completion at this length, so with different lengths the ranks would diverge."""
    import rollout

    class Stop(Exception):
        pass

    def engine(folder, max_model_len, settings):
        raise Stop(max_model_len)

    monkeypatch.setattr(rollout, "RolloutEngine", engine)
    monkeypatch.setattr(evaluate_py, "start_pool", lambda settings, tokenizer: contextlib.nullcontext())
    monkeypatch.setattr(evaluate_py, "reference_warning", lambda pool, tasks: "")
    monkeypatch.setenv("RANK", str(rank))
    tasks = [SimpleNamespace(prompt_ids=[5] * length) for length in (3, 8, 4)]
    monkeypatch.setattr("moe_model.load_config", lambda folder: None)
    options = ["--data", "a.jsonl", "--max-new-tokens", "100", "--kv-cache-gib", "1"]
    args = parse_args(["--model", "m", *options])
    with pytest.raises(Stop, match="108"):
        evaluate_py.generate(args, settings_of(*options), Path("m"), None, tasks, tasks[rank::2])


# ---- real runs ---------------------------------------------------------------------------------------------
def evaluate(*arguments) -> subprocess.CompletedProcess:
    done = preloaded.run(0, "experiments/evaluate.py", *arguments, timeout_s=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def evaluated(demo_model, tmp_path_factory):
    """Return the folder of an evaluation of the tiny model: 40 additions, 4 samples each."""
    folder = tmp_path_factory.mktemp("evaluated")
    evaluate(
        "--model", TINY / "model", "--data", TINY / "test.jsonl", "--limit", 40, "--samples", 4,
        "--max-new-tokens", 16, "--temperature", 0.8, "--dtype", "float32", "--kv-cache-gib", 0.25,
        "--json", folder / "e.json", "--html", folder / "e.html",
    )  # fmt: skip
    return folder


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_the_figures_agree_with_a_recount(evaluated):
    from reward import verify

    figures = json.loads((evaluated / "e.json").read_text())["figures"]
    rows = read_rows(evaluated / "e_completions.jsonl")
    assert [(r["prompt_index"], r["sample"]) for r in rows] == list(itertools.product(range(40), range(5)))
    verdicts = [verify(r["kind"], r["completion"], r["answer"]) for r in rows]
    assert [v.reward for v in verdicts] == [r["reward"] for r in rows]
    right = np.array([v.reward == 1 for v in verdicts]).reshape(40, 5)
    assert 0 < right.sum() < right.size
    expected = {
        "accuracy": right[:, 0].mean(), "avg_at_4": right[:, 1:].mean(),
        "completion_tokens": np.mean([len(r["token_ids"]) for r in rows]),
    } | {
        f"pass_at_{k}": np.mean([share_of_subsets(of_prompt.tolist(), k) for of_prompt in right[:, 1:]])
        for k in (1, 2, 4)
    }  # fmt: skip
    assert {name: figures["all"][name]["mean"] for name in expected} == pytest.approx(expected)
    levels = {r["difficulty"] for r in rows}
    assert {float(level) for level in figures["difficulty"]} == levels and len(levels) > 1


@pytest.mark.slow
def test_greedy_text_and_log_probabilities_equal_transformers(evaluated):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    for r in read_rows(evaluated / "e_completions.jsonl")[:100]:
        prompt_ids = tokenizer(r["prompt"])["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt_ids + r["token_ids"]])).logits[0, len(prompt_ids) - 1 : -1]
        logp = (logits.double() / (r["temperature"] or 1.0)).log_softmax(-1)
        if r["sample"] == 0:
            assert logits.argmax(-1).tolist() == r["token_ids"]
            assert tokenizer.decode(r["token_ids"], skip_special_tokens=True) == r["completion"]
        logprobs = logp.gather(1, torch.tensor(r["token_ids"]).unsqueeze(1)).squeeze(1)
        assert np.allclose(r["rollout_logprobs"], logprobs, atol=1e-4, rtol=0)
        assert np.allclose(r["trainer_logprobs"], logprobs, atol=1e-4, rtol=0)
        assert np.allclose(r["entropy"], -(logp.exp() * logp).sum(-1), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_run_is_evaluated_as_its_own_evaluation_did(undisturbed, tmp_path):
    """The newest checkpoint, the same seeds: the figures of the run's last evaluation."""
    evaluate(
        "--model", undisturbed, "--data", "{path: data/built/tiny/test.jsonl, name: additions, limit: 20}",
        "--samples", 2, "--max-new-tokens", 16, "--dtype", "float32", "--kv-cache-gib", 0.25,
        "--no-trainer-logprobs", "--json", tmp_path / "e.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "e.json").read_text())
    rows = read_rows(undisturbed / "metrics.jsonl")
    last = [r for r in rows if "eval/additions/accuracy" in r][-1]
    assert result["model"] == "undisturbed at step 6" and result["mismatch"] == {}
    for name in ("accuracy", "avg_at_2", "pass_at_2"):
        assert result["figures"]["all"][name]["mean"] == pytest.approx(last[f"eval/additions/{name}"]), name
    assert not list((undisturbed / "checkpoints").glob("evaluate_*"))

    evaluate("--run", undisturbed, "--html", tmp_path / "run.html")
    index = Elements((tmp_path / "run.html").read_text()).read("index")
    assert [p["step"] for p in index["prompts"]] == [step for step in range(1, 7) for rank in (0, 1)]
    assert all(len(p["completions"]) == 4 for p in index["prompts"])


def run_python(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(60))


def test_importing_the_page_needs_no_torch():
    code = "import sys, experiments.evaluate; assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    done = run_python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_impossible_command_is_explained_in_one_line(tmp_path):
    done = run_python("experiments/evaluate.py", "--run", tmp_path, "--html", tmp_path / "p.html")
    assert done.returncode == 2 and "samples.jsonl" in done.stderr and "Traceback" not in done.stderr
